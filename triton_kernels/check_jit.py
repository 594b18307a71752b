"""Defines the Triton body of `check_and_unscale`: one launch for each dtype, which reads every element once.

The sums are whole numbers, so they are exact in any order: the square of a finite fp32 is a whole number of units of
2^-298 (see `memascend.tensors`). Exponents are divided into windows of `SPAN`. A block adds its squares of one window
in int64, shifted to the unit of that window, and then adds the result to four numbers that all programs share.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .arguments import flat
from .sums import INFINITE, NAN, PARTS, SPAN, SUMS, WINDOWS

if TYPE_CHECKING:
    from collections.abc import Sequence


# 32 Ki elements a program: 2,048 programs for 128 MiB of bf16, enough to fill the largest GPU.
CHUNK = 32768
# Half a square has 24 bits and is shifted by at most 26; the sum of 2^11 of them has 61 bits.
BLOCK = 2048
WARPS = 8

_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
_SPAN: tl.constexpr = tl.constexpr(SPAN)
_PARTS: tl.constexpr = tl.constexpr(PARTS)
_INFINITE: tl.constexpr = tl.constexpr(INFINITE)
_NAN: tl.constexpr = tl.constexpr(NAN)
# A digit of the folded sum is as wide as a window. The parts of the last window reach three digits further.
_DIGIT: tl.constexpr = tl.constexpr(2 * SPAN)
_DIGIT_MASK: tl.constexpr = tl.constexpr((1 << 2 * SPAN) - 1)
_DIGITS: tl.constexpr = tl.constexpr(WINDOWS + 3)
_WINDOWS: tl.constexpr = tl.constexpr(WINDOWS)


@triton.jit
def _add(sums, total):  # type: ignore[no-untyped-def]
    # In two numbers, so that neither overflows for any tensor.
    tl.atomic_add(sums, total & 0xFFFFFFFF, sem="relaxed")
    tl.atomic_add(sums + 1, total >> 32, sem="relaxed")


@triton.jit
def _add_block(values, sums, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds the squares of a block, window by window; most blocks have two or three windows."""
    magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponents = magnitudes >> 23
    significands = (magnitudes & 0x7FFFFF) | tl.where(exponents > 0, 0x800000, 0)
    # Denormals have the unit of the smallest exponent.
    places = tl.maximum(exponents, 1) - 1
    windows = places // _SPAN
    shifts = ((places - windows * _SPAN) * 2).to(tl.int64)
    squares = significands.to(tl.int64) * significands.to(tl.int64)
    waiting = tl.where((magnitudes > 0) & (magnitudes < _INFINITY), windows, -1)
    window = tl.max(waiting, 0)
    while window >= 0:
        here = waiting == window
        into = sums + window * _PARTS
        if not NARROW:
            _add(into, tl.sum(tl.where(here, (squares & 0xFFFFFF) << shifts, 0), 0))
        # The lower half of the square of a 16-bit value is zero.
        _add(into + 2, tl.sum(tl.where(here, (squares >> 24) << shifts, 0), 0))
        waiting = tl.where(here, -1, waiting)
        window = tl.max(waiting, 0)
    largest = tl.max(magnitudes, 0)
    if largest >= _INFINITY:
        tl.atomic_add(sums + _INFINITE, tl.sum((magnitudes == _INFINITY).to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(sums + _NAN, tl.sum((magnitudes > _INFINITY).to(tl.int64), 0), sem="relaxed")


@triton.jit
def check_kernel(  # type: ignore[no-untyped-def]
    data, numel, table, count, sums, factor,
    DTYPE: tl.constexpr, MANY: tl.constexpr, ALIGNED: tl.constexpr, UNSCALE: tl.constexpr, NARROW: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Checks one chunk: of `data`, or, with MANY, of the tensor that the table names for this program.

    `table` holds four rows of `count` int64: the number of chunks up to and including each tensor, addresses, lengths,
    and where its sums are.
    """
    # 64 bits before the multiplication: a tensor may have more than 2^31 elements.
    chunk = tl.program_id(0).to(tl.int64)
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
        numel = tl.load(table + 2 * count + low)
        sums += tl.load(table + 3 * count + low)
        data = tl.load(table + count + low).to(tl.pointer_type(DTYPE))
        if ALIGNED:
            data = tl.multiple_of(data, 16)
    # An argument of 1 arrives as a constant, which has no `.to`.
    numel += tl.zeros((), tl.int64)
    start = chunk * CHUNK
    end = tl.minimum(start + CHUNK, numel)
    while start < end:
        offsets = start + tl.arange(0, BLOCK)
        # Whole blocks are read 16 bytes at a time.
        if start + BLOCK <= numel:
            stored = tl.load(data + offsets)
            if UNSCALE:
                stored = (stored.to(tl.float32) * factor).to(stored.dtype)
                tl.store(data + offsets, stored)
        else:
            stored = tl.load(data + offsets, mask=offsets < numel, other=0.0)
            if UNSCALE:
                stored = (stored.to(tl.float32) * factor).to(stored.dtype)
                tl.store(data + offsets, stored, mask=offsets < numel)
        _add_block(stored.to(tl.float32), sums, NARROW)
        start += BLOCK


@triton.jit
def fold_kernel(sums, squares_out, found_out):  # type: ignore[no-untyped-def]
    """Rounds one sum to float64, once, to nearest even."""
    zero = tl.zeros((), tl.int64)
    carry = zero
    # The highest digit that is not zero, the two below it, and whether more is below them.
    high, middle, low, more, top = zero, zero, zero, zero, zero
    # The same of the digit that comes next.
    before, second, rest = zero, zero, zero
    for digit in tl.static_range(_DIGITS):
        value = carry
        if digit < _WINDOWS:
            value += tl.load(sums + digit * _PARTS) + ((tl.load(sums + digit * _PARTS + 2) & 15) << 24)
        # 32 bits up, and 24, where a digit has 28; and both.
        if digit >= 1 and digit <= _WINDOWS:
            value += (tl.load(sums + digit * _PARTS - 3) << 4) + (tl.load(sums + digit * _PARTS - 2) >> 4)
        if digit >= 2 and digit <= _WINDOWS + 1:
            value += tl.load(sums + digit * _PARTS - 5)
        carry = value >> _DIGIT
        value &= _DIGIT_MASK
        filled = value > 0
        high = tl.where(filled, value, high)
        middle = tl.where(filled, before, middle)
        low = tl.where(filled, second, low)
        more = tl.where(filled, rest, more)
        top = tl.where(filled, zero + digit, top)
        rest |= second
        second = before
        before = value
    # To 62 bits at most, of which the last stands for all below it.
    extra = zero
    while (high >> extra) >= 64:
        extra += 1
    significand = (((high << _DIGIT) | middle) << (_DIGIT - extra)) | (low >> extra)
    lost = more | (low & (((zero + 1) << extra) - 1))
    significand |= tl.where(lost > 0, zero + 1, zero)
    power = (top - 2) * _DIGIT + extra - 298
    squares = significand.to(tl.float64) * ((power + 1023) << 52).to(tl.float64, bitcast=True)
    infinite = tl.load(sums + _INFINITE)
    nan = tl.load(sums + _NAN)
    squares = tl.where(infinite > 0, float("inf"), squares)
    tl.store(squares_out, tl.where(nan > 0, float("nan"), squares))
    tl.store(found_out, (infinite + nan > 0).to(tl.uint8))


_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def begin(placed: Sequence[tuple[int, torch.Tensor]], factor: float, sums: torch.Tensor) -> None:
    """Queues the check of dense, non-empty tensors, each with its row of `sums`; reads nothing back."""
    by_dtype: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
    for row, tensor in placed:
        by_dtype.setdefault(tensor.dtype, []).append((row, tensor))
    with _on(sums.device):
        for dtype, group in by_dtype.items():
            row, first = group[0]
            chunks = [triton.cdiv(tensor.numel(), CHUNK) for _, tensor in group]
            many = len(group) > 1
            check_kernel[(sum(chunks),)](
                flat(first), first.numel(), _table(group, chunks, sums.device) if many else sums, len(group),
                sums if many else sums[row], factor,
                DTYPE=_TRITON_DTYPES[dtype], MANY=many, ALIGNED=all(t.data_ptr() % 16 == 0 for _, t in group),
                UNSCALE=factor != 1.0, NARROW=dtype != torch.float32, CHUNK=CHUNK, BLOCK=BLOCK,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip


def fold(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queues the rounding of one row of sums; returns whether an element is not finite, and the sum of squares."""
    squares = torch.empty((), dtype=torch.float64, device=sums.device)
    found = torch.empty((), dtype=torch.uint8, device=sums.device)
    with _on(sums.device):
        fold_kernel[(1,)](sums, squares, found, num_warps=1, enable_fp_fusion=False)
    return found.view(torch.bool), squares


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _table(group: Sequence[tuple[int, torch.Tensor]], chunks: Sequence[int], device: torch.device) -> torch.Tensor:
    ends = torch.tensor(chunks, dtype=torch.int64, device="cpu").cumsum(0).tolist()
    rows = [ends, [t.data_ptr() for _, t in group], [t.numel() for _, t in group]]
    rows.append([row * SUMS for row, _ in group])
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    # From pinned memory the copy is queued like the launch that reads it; from pageable memory it would wait.
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
