"""What does the study itself cost, against the trainer that one would otherwise use, and does a run always end well?"""
