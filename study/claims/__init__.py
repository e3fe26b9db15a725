"""Decide published claims: read the ledger, apply the rule of each claim, and return a reproducible verdict."""
