"""Kernels on gradients and optimizer state: one pass each, on CPU (Rust) and on GPU (Triton).

Each kernel is a triple: the public wrapper and its torch reference in one file, the Triton body beside it in a file
that ends in `_jit`; `routes` chooses between them. `scalars` has the numbers of an update, `sums` those of squares.

Invariant: a kernel has the same bits for every number of threads, instruction set, alignment and device; sums of
squares are whole numbers, so no order changes them. What is rejected has changed nothing.

Never: nothing here imports triton before a CUDA tensor arrives, allocates memory as large as its arguments, or knows
units, stores or gradients' owners; `import memascend` does not import this.
"""

from __future__ import annotations

from .adamw import adam, adamw
from .casts import accumulate, cast
from .check import begin_check, check_and_unscale, checked
from .reduced import adamw_reduced
from .routes import Route, route
from .sums import found_in, new_sums

__all__ = [
    "Route", "accumulate", "adam", "adamw", "adamw_reduced", "begin_check", "cast", "check_and_unscale", "checked",
    "found_in", "new_sums", "route",
]  # fmt: skip
