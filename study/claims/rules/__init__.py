"""How is a claim decided? By its source's own numbers, by theory, or by records."""
