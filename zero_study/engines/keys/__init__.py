"""Read the table of what accelerate's and DeepSpeed's keys, flags and variables do, without importing either."""
