"""Compares whole training steps with other systems: `python -m benchmarks.train`."""
