"""The version of this distribution, which `study` and `zero_study` both report."""

__version__ = "0.1.0"
