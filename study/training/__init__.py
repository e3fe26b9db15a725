"""What does a run observe of itself, prove and leave behind?"""
