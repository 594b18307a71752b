"""Imports Triton and hashes Triton's files before programs are forked, which saves 0.5 s in each program."""

import triton.experimental.gluon  # noqa: F401
from triton.runtime import cache

# Older versions of Triton define `triton_key` in another module.
getattr(cache, "triton_key", lambda: None)()
