"""Check what accelerate, DeepSpeed and torch really do with a configuration file, a script and an installation."""
