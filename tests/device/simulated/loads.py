"""Imports Triton and hashes Triton's files once, before programs are forked, because each program would need 0.5 s."""

import triton.experimental.gluon  # noqa: F401
from triton.runtime import cache

# Older versions of Triton define `triton_key` in another module.
getattr(cache, "triton_key", lambda: None)()
