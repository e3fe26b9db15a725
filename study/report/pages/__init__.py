"""The data of each notebook, and its answer: a module per notebook, so that the notebook's first cell is short."""
