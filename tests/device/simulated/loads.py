"""Loads what the first launch of a Triton kernel loads, and what it computes of Triton's own files: half a second."""

import triton.experimental.gluon  # noqa: F401
from triton.runtime import cache

# Of Triton's older versions elsewhere.
getattr(cache, "triton_key", lambda: None)()
