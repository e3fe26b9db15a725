"""Conformance: whether installed engines train what they say, a matrix of cells against a reference without engines."""
