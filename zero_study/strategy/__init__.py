"""Read strategies: accelerate files, and the engines that these files configure."""
