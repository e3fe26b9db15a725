"""Instrument one training run: verify the engine, measure memory and time, write the record."""
