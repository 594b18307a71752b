"""Compares training steps of memascend with training steps of other systems: `python -m benchmarks.train`."""
