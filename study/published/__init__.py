"""The published protocols, run as published and with their defects mended; traps and settings, tried for real."""
