"""Report what a configuration file really does, or what would stop a run on this machine, and what to change."""
