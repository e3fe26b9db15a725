"""What accelerate, DeepSpeed and torch really do with a file, a script and an installation, whoever's they are."""
