"""Check what accelerate, DeepSpeed and torch really do with any file, script and installation."""
