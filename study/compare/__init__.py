"""Compare recorded runs: tables and pages.

Nothing in this package imports torch, so it runs in seconds on any machine.
"""
