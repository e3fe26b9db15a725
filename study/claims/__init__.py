"""The ledger of published claims: how each claim is decided, what was observed, and a reproducible verdict."""
