"""Read and write runs that others trained, and whose logs were imported: schema, folders and comparable numbers."""
