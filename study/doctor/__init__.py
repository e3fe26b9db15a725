"""Find out what an accelerate file, a DeepSpeed JSON or this machine really does, and what to change."""
