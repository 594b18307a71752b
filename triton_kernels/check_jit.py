"""Defines the Triton body of `check_and_unscale`: one launch over all tensors, a second for partial results."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .arguments import flat

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BLOCK", "CHUNK", "check_kernel", "fold_kernel", "launch"]

# 32 Ki elements a program: 2,048 programs for 128 MiB of bf16, enough to fill the largest GPU, and a partial result for
# every 64 KiB read. 16 fp32 additions a lane.
CHUNK = 32768
BLOCK = 2048
WARPS = 8
FOLD_BLOCK = 1024

# Bits of fp32: infinity, and the range of magnitudes whose squares can be summed in fp32. A largest magnitude from
# 2^-50 up leaves what vanishes below 2^-126 without weight; below 2^50 32,768 squares stay under 2^115.
_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
_SAFE_MIN: tl.constexpr = tl.constexpr((127 - 50) << 23)
_SAFE_MAX: tl.constexpr = tl.constexpr((127 + 50) << 23)


@triton.jit
def _check_block(data, offsets, numel, factor, squares, largest, UNSCALE: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    if MASKED:
        inside = offsets < numel
        stored = tl.load(data + offsets, mask=inside, other=0.0)
    else:
        stored = tl.load(data + offsets)
    if UNSCALE:
        stored = (stored.to(tl.float32) * factor).to(stored.dtype)
        if MASKED:
            tl.store(data + offsets, stored, mask=offsets < numel)
        else:
            tl.store(data + offsets, stored)
    values = stored.to(tl.float32)
    magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return squares + values * values, tl.maximum(largest, magnitudes)


@triton.jit
def check_kernel(  # type: ignore[no-untyped-def]
    data, numel, table, count, squares_out, largest_out, factor,
    DTYPE: tl.constexpr, MANY: tl.constexpr, ALIGNED: tl.constexpr, UNSCALE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Checks one chunk: of `data`, or, with MANY, of the tensor that the table names for this program.

    `table` holds three rows of `count` int64: the number of chunks up to and including each tensor, addresses, lengths.
    """
    program = tl.program_id(0)
    # 64 bits before the multiplication: a tensor may have more than 2^31 elements.
    chunk = program.to(tl.int64)
    if MANY:
        low = 0
        high = count - 1
        while low < high:
            middle = (low + high) // 2
            if tl.load(table + middle) <= chunk:
                low = middle + 1
            else:
                high = middle
        if low > 0:
            chunk -= tl.load(table + low - 1)
        address = tl.load(table + count + low)
        numel = tl.load(table + 2 * count + low)
        data = address.to(tl.pointer_type(DTYPE))
        if ALIGNED:
            data = tl.multiple_of(data, 16)
    # An argument of 1 arrives as a constant, which has no `.to`.
    numel += tl.zeros((), tl.int64)
    start = chunk * CHUNK
    lanes = start + tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.int32)
    if start + CHUNK <= numel:
        for step in range(0, CHUNK, BLOCK):
            squares, largest = _check_block(data, lanes + step, numel, factor, squares, largest, UNSCALE, MASKED=False)
    else:
        for step in range(0, CHUNK, BLOCK):
            squares, largest = _check_block(data, lanes + step, numel, factor, squares, largest, UNSCALE, MASKED=True)
    peak = tl.max(largest, 0)
    total = tl.sum(squares.to(tl.float64), 0)
    if (peak > 0) & (peak < _INFINITY):
        if (peak < _SAFE_MIN) | (peak >= _SAFE_MAX):
            # Another thread may have written what this one reads next.
            tl.debug_barrier()
            exact = tl.zeros([BLOCK], tl.float64)
            for step in range(0, CHUNK, BLOCK):
                offsets = lanes + step
                values = tl.load(data + offsets, mask=offsets < numel, other=0.0).to(tl.float64)
                exact += values * values
            total = tl.sum(exact, 0)
    tl.store(squares_out + program, total)
    tl.store(largest_out + program, peak)


@triton.jit
def fold_kernel(squares, largest, programs, squares_out, found_out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds the partial results, in an order that depends on their number alone."""
    total = tl.zeros([BLOCK], tl.float64)
    peak = tl.zeros([BLOCK], tl.int32)
    for start in range(0, programs, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < programs
        total += tl.load(squares + offsets, mask=inside, other=0.0)
        peak = tl.maximum(peak, tl.load(largest + offsets, mask=inside, other=0))
    tl.store(squares_out, tl.sum(total, 0))
    tl.store(found_out, (tl.max(peak, 0) >= _INFINITY).to(tl.uint8))


_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def launch(tensors: Sequence[torch.Tensor], factor: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Queues the check of dense, non-empty tensors of one device; reads nothing back."""
    chunks = [triton.cdiv(t.numel(), CHUNK) for t in tensors]
    squares = torch.empty(sum(chunks), dtype=torch.float64, device=device)
    largest = torch.empty(sum(chunks), dtype=torch.int32, device=device)
    total = torch.empty((), dtype=torch.float64, device=device)
    found = torch.empty((), dtype=torch.uint8, device=device)
    by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, int]]] = {}
    for tensor, count in zip(tensors, chunks, strict=True):
        by_dtype.setdefault(tensor.dtype, []).append((tensor, count))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        first = 0
        for dtype, group in by_dtype.items():
            programs = sum(count for _, count in group)
            many = len(group) > 1
            table = _table(group, device) if many else squares
            check_kernel[(programs,)](
                flat(group[0][0]), group[0][0].numel(), table, len(group), squares[first:], largest[first:], factor,
                DTYPE=_TRITON_DTYPES[dtype], MANY=many, ALIGNED=all(t.data_ptr() % 16 == 0 for t, _ in group),
                UNSCALE=factor != 1.0, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
            first += programs
        fold_kernel[(1,)](squares, largest, first, total, found, BLOCK=FOLD_BLOCK, enable_fp_fusion=False)
    return found.view(torch.bool), total


def _table(group: Sequence[tuple[torch.Tensor, int]], device: torch.device) -> torch.Tensor:
    ends = torch.tensor([count for _, count in group], dtype=torch.int64, device="cpu").cumsum(0).tolist()
    rows = [ends, [t.data_ptr() for t, _ in group], [t.numel() for t, _ in group]]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    # From pinned memory the copy is queued like the launch that reads it; from pageable memory it would wait.
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
