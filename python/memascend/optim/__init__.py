"""Runs optimizers on streamed state: Adam in the engine, any other by its own code."""
