"""Compare recorded runs, and make tables and pages of the results.

Nothing in this package imports torch, so it runs in seconds on any machine.
"""
