"""The published protocols, run as published and with their defects mended; traps and snippets, tried for real."""
