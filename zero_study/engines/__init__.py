"""Read from an installed engine which keys it knows, what it has built, and what it sends."""
