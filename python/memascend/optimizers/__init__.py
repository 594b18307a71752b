"""Runs optimizers on streamed state: Adam by the engine, any other by torch's own code."""
