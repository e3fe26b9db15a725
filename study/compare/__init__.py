"""What do the records say? Tables from records, redone in seconds on any machine; nothing here imports torch."""
