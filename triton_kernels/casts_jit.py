"""Defines the Triton body of `cast` and `accumulate`."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from .arguments import flat

__all__ = ["BLOCK", "launch", "move_kernel"]

BLOCK = 2048
WARPS = 8


@triton.jit
def move_kernel(source, out, numel, ADD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Casts one block of `source` to the dtype of `out`, or, with ADD, adds it to what is there."""
    # 64 bits before the multiplication: a tensor may have more than 2^31 elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    values = tl.load(source + offsets, mask=inside).to(out.dtype.element_ty)
    if ADD:
        values += tl.load(out + offsets, mask=inside)
    tl.store(out + offsets, values, mask=inside)


def launch(source: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Queues the cast or addition of dense, non-empty tensors of one device."""
    numel = out.numel()
    with torch.cuda.device(out.device) if out.device.type == "cuda" else contextlib.nullcontext():
        move_kernel[(triton.cdiv(numel, BLOCK),)](
            flat(source), flat(out), numel, ADD=add, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False
        )
