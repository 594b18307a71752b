"""Leaves these tests out where the client libraries are not: `make test-clients` has them in an environment."""

import importlib.util

if importlib.util.find_spec("pytorch_optimizer") is None:
    collect_ignore_glob = ["test_*.py"]
