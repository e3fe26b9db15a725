"""Compute the data and the answer of each notebook. There is one module per notebook, to keep its first cell short."""
