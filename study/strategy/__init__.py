"""Strategies: accelerate files, and the engines that they configure."""
