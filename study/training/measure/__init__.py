"""What does a run observe of itself?"""
