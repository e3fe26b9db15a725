"""Run functions in small groups of ranks (worlds). Each rank is a fork of this process."""
