"""Whole training steps beside peers: `python -m benchmarks.train`."""
