"""Runs a training: `offload()`, the optimizer that users hold, state dicts and reports."""
