"""What an engine says of itself, read from the built engine, and compared with what was requested of it."""
