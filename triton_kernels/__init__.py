"""Kernels on gradients and optimizer state: one pass each, on CPU (Rust) and on GPU (Triton).

Each kernel has three parts: the public wrapper and its torch reference in one file, and the Triton body in a file that
ends in `_jit`. `routes` chooses the implementation for a device. `scalars` computes the numbers of an update; `sums`
holds exact sums of squares.

Invariant: results are bit-identical for every number of threads, instruction set, alignment and device. Sums of squares
are added as integers, so their order does not matter. A rejected call has changed nothing.

This package imports triton only when a CUDA tensor arrives, and allocates no memory as large as its arguments. It does
not depend on units, stores or the owners of gradients. `import memascend` does not import this package.
"""

from __future__ import annotations

from .adamw import adamw
from .check import begin_check, check_and_unscale, checked
from .routes import Route, route
from .sums import found_in, new_sums

__all__ = [
    "Route", "adamw", "begin_check", "check_and_unscale", "checked", "found_in", "new_sums", "route",
]  # fmt: skip
