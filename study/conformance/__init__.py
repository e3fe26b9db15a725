"""Check whether the installed engines train correctly: a matrix of cells, compared with a reference without engines."""
