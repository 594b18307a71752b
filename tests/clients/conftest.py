"""Ignores tests whose client libraries are not installed. `make` uses one environment for each group of libraries."""

import importlib.util

PROGRAMS = ("axolotl", "swift", "llamafactory")
# Each program of `PROGRAMS` has its own environment, in which the other client libraries are not installed.
if importlib.util.find_spec("pytorch_optimizer") is None:
    collect_ignore_glob = ["test_[!i]*.py"]
    if not any(importlib.util.find_spec(name) for name in PROGRAMS):
        collect_ignore_glob = ["test_*.py"]
