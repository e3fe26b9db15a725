"""Check everything in a project that the other commands can check: configuration files, lock files, checkpoints."""
