"""Exact arithmetic: a training in which no addition rounds, so that every engine must end with the same bits."""
