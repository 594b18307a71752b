"""Kernels on gradients and optimizer state, for CPU (Rust) and GPU (Triton). Each kernel makes one pass over memory.

Each kernel has three parts here: the public wrapper and its torch reference in one file, and the Triton body in a file
that ends in `_jit`. The bodies for CPU are in rust/math. `routes` chooses the implementation for a device. `scalars`
computes the scalars of an update. `sums` keeps exact sums of squares.

Invariant: results of the kernels are bit-identical for every number of threads, instruction set, alignment and device
that has kernels. The kernels add squares as integers, so their order does not matter. A call that raises ConfigError
has changed nothing.

This package imports triton only for CUDA tensors. Its temporary memory has a limit that does not depend on the size of
the tensors. The package does not depend on other parts of memascend such as units and stores. `import memascend` does
not import this package.
"""

from __future__ import annotations

from .adamw import adamw
from .check import begin_check, check_and_unscale, checked
from .routes import Route, route
from .sums import found_in, new_sums

__all__ = [
    "Route", "adamw", "begin_check", "check_and_unscale", "checked", "found_in", "new_sums", "route",
]  # fmt: skip
