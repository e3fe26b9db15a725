"""Runs that others trained and whose logs were imported: their schema, the archive in reports/public, and comparisons.

A public run is "measured by others". It is never mixed with the records of this project's own runs.
"""
