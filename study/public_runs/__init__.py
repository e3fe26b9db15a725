"""Runs that others trained and whose logs were imported: schema, archive in reports/public, and comparable numbers.

A public run is "measured by others". It is never mixed with the records of this project's own runs.
"""
