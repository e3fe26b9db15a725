"""Run functions as the ranks of small worlds, each rank in a fork of this process."""
