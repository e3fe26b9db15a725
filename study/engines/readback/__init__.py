"""Read settings back from a built engine, and compare them with the request."""
