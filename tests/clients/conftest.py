"""Ignores tests whose client libraries are missing; the Makefile has an environment for each group of libraries."""

import importlib.util

PROGRAMS = ("axolotl", "swift", "llamafactory")
# Each of `PROGRAMS` has an environment of its own, without the other client libraries.
if importlib.util.find_spec("pytorch_optimizer") is None:
    collect_ignore_glob = ["test_[!i]*.py"]
    if not any(importlib.util.find_spec(name) for name in PROGRAMS):
        collect_ignore_glob = ["test_*.py"]
