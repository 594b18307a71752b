"""Casts between fp32, bf16 and fp16, and adds 16-bit gradients to an fp32 total."""

from __future__ import annotations

import torch

from memascend import _core

from .arguments import FLOATS, flat, require, require_apart, require_same, threads_of
from .routes import route

__all__ = ["accumulate", "accumulate_reference", "cast", "cast_reference"]


def cast(source: torch.Tensor, out: torch.Tensor, *, threads: int | None = None) -> None:
    """Write `source` to `out` in the dtype of `out`: fp32 to or from bf16 or fp16, rounded to nearest even.

    Rounds as torch does: a number that is too large for fp16 becomes infinity, denormals are kept, and a NaN stays a
    NaN (its payload may differ).

    Args:
        source: fp32, bf16 or fp16; only read.
        out: of the same shape. At least one of the two is fp32; both may be, which copies.
        threads: CPU only; None means `torch.get_num_threads()`.

    Raises:
        ConfigError: a tensor is wrong, or both are 16-bit. Nothing has been changed.
    """
    # A cast between the two 16-bit formats would lose bits that most callers did not mean to lose.
    source_dtypes = FLOATS if isinstance(out, torch.Tensor) and out.dtype == torch.float32 else (torch.float32,)
    _move(
        require("source", source, source_dtypes), require("out", out), "source", "out", threads_of(threads), add=False
    )


def accumulate(total: torch.Tensor, grad: torch.Tensor, *, threads: int | None = None) -> None:
    """Add `grad` to `total` in place, in fp32: `total += grad.float()`, in one pass and without a temporary.

    Args:
        total: fp32, updated in place.
        grad: fp32, bf16 or fp16, of the same shape; only read.
        threads: CPU only; None means `torch.get_num_threads()`.

    Raises:
        ConfigError: a tensor is wrong. Nothing has been changed.
    """
    total = require("total", total, (torch.float32,))
    _move(require("grad", grad), total, "grad", "total", threads_of(threads), add=True)


def _move(source: torch.Tensor, out: torch.Tensor, source_name: str, out_name: str, threads: int, *, add: bool) -> None:
    require_same((out_name, out), {source_name: source})
    require_apart(((source_name, source), (out_name, out)))
    if not out.numel():
        return
    if route(out.device).name != "rust":
        # torch's own operations need one pass on a GPU.
        (accumulate_reference if add else cast_reference)(source, out)
        return
    move = _core.kernel_accumulate if add else _core.kernel_cast
    read, written = ((tensor.data_ptr(), FLOATS.index(tensor.dtype)) for tensor in (source, out))
    move(read, written, out.numel(), threads)
    torch.autograd.graph.increment_version([out])


def cast_reference(source: torch.Tensor, out: torch.Tensor) -> None:
    """The result of `cast`, in plain torch operations."""
    flat(out).copy_(flat(source))


def accumulate_reference(source: torch.Tensor, out: torch.Tensor) -> None:
    """The result of `accumulate`, in plain torch operations."""
    flat(out).add_(flat(source))
