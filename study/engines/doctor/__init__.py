"""What will anybody's accelerate file or DeepSpeed JSON really do, and what to write instead?"""
