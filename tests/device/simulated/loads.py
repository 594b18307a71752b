"""Does the work of a first Triton launch before programs are forked: imports, and a hash of Triton's files (0.5 s)."""

import triton.experimental.gluon  # noqa: F401
from triton.runtime import cache

# Older versions of Triton define `triton_key` in another module.
getattr(cache, "triton_key", lambda: None)()
