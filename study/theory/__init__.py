"""Formulas of memory, communication and time, by the papers and by what engines do; without torch or the study."""
