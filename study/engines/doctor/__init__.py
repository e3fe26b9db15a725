"""Doctor: find out what an accelerate file, a DeepSpeed JSON and this machine really do, and what to change."""
