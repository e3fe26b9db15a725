"""Formulas for memory, communication and time, by the papers and by the code of the engines.

This package does not import torch.
"""
