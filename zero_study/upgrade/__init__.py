"""List what an upgrade of packages changes in a training, and the known faults of releases."""
