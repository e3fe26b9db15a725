"""List what an upgrade of packages changes in a training, and know the faults of releases."""
