"""Kernels on gradients and optimizer state: one pass each, on CPU (Rust) and on GPU (Triton).

Each kernel has three parts: the public wrapper and its torch reference in one file, and the Triton body in a file that
ends in `_jit`. `routes` chooses between them. `scalars` computes the numbers of an update; `sums` holds exact sums.

Invariant: results are bit-identical for every number of threads, instruction set, alignment and device. Sums of squares
are whole numbers, so their order does not matter. A rejected call has changed nothing.

Never: this package does not import triton before a CUDA tensor arrives, does not allocate memory as large as its
arguments, and does not know units, stores or the owners of gradients. `import memascend` does not import it.
"""

from __future__ import annotations

from .adamw import adam, adamw
from .check import begin_check, check_and_unscale, checked
from .routes import Route, route
from .sums import found_in, new_sums

__all__ = [
    "Route", "adam", "adamw", "begin_check", "check_and_unscale", "checked", "found_in", "new_sums", "route",
]  # fmt: skip
