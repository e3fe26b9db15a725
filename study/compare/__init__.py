"""Compare records: tables and pages that any machine makes in seconds. Nothing here imports torch."""
