"""Which strategy was asked for: its accelerate file, the launcher's request, and the Accelerator that comes of both."""
