"""Imports Triton and hashes its files (0.5 s) before programs are forked, so that the programs need not do this."""

import triton.experimental.gluon  # noqa: F401
from triton.runtime import cache

# Older versions of Triton define `triton_key` in another module.
getattr(cache, "triton_key", lambda: None)()
