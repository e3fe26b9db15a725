"""Can it run here? What this machine has, which extensions are built, and what is refused before a run starts."""
