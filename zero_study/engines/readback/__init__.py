"""Read the settings of an engine after it was built, and compare them with the requested settings."""
