"""The strategy that was asked for: its accelerate file, and the engine that it configures."""
