"""What do runs leave behind, where does it lie, and how does it get from one box to another?"""
