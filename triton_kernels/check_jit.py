"""The Triton body of `check_and_unscale`. One launch checks all tensors of a dtype.

The kernel adds integers, so the sums are exact in any order: the square of a finite fp32 number is a multiple of
2^-298. A program reads its chunk tile by tile. The first tile determines a grid, which usually contains nearly all
values of the chunk (see [Note: grids] in `squares_jit.py`). Each lane adds the squares of these values as integers. A
tile with a value that is too large for the grid, or with only much smaller values, determines a new grid. If a value of
a tile is too small for the grid or not finite, the program reads the tile again, and uses finer grids for small values.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from memascend.tensors import flat

from .squares_jit import (
    INFINITY,
    NARROW,
    NARROW_COUNT,
    NARROW_TOP,
    WIDE,
    WIDE_COUNT,
    WIDE_TOP,
    add_columns,
    floor_of,
    largest_of,
    smallest_of,
    squares_by_row,
    squares_of,
)
from .sums import DIGIT, DIGITS, INFINITE, NAN, SUMS

if TYPE_CHECKING:
    from collections.abc import Sequence


# The number of elements that a program checks. A program has one warp, so its reductions need no barriers.
CHUNK = 32768
WARPS = 1
# The number of rows of a tile. A lane loads 16 bytes of each row into registers, so 8 loads of a lane are in flight at
# once.
ROWS = 8

_INFINITE: tl.constexpr = tl.constexpr(INFINITE)
_NAN: tl.constexpr = tl.constexpr(NAN)
_DIGIT: tl.constexpr = tl.constexpr(DIGIT)
_DIGIT_MASK: tl.constexpr = tl.constexpr((1 << DIGIT) - 1)
_DIGITS: tl.constexpr = tl.constexpr(DIGITS)
# A tile with small values determines a new grid if this grid is finer than the current grid by more than this number of
# powers of two.
_SLACK: tl.constexpr = tl.constexpr(8)


@triton.jit
def _find(table, count, chunk):  # type: ignore[no-untyped-def]
    """Returns the index of the tensor that contains `chunk`, and the chunk's index within that tensor."""
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
    return low, chunk


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    data, start, numel, factor, UNSCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Reads a tile, multiplies its elements in place if UNSCALE, and returns their magnitudes as fp32 bits."""
    offsets = start + (tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    # A whole tile needs no mask. Without a mask, Triton reads 16 bytes of aligned data at a time.
    if start + ROWS * COLUMNS <= numel:
        stored = tl.load(data + offsets)
        if UNSCALE:
            stored = (stored.to(tl.float32) * factor).to(stored.dtype)
            tl.store(data + offsets, stored)
    else:
        stored = tl.load(data + offsets, mask=offsets < numel, other=0.0)
        if UNSCALE:
            stored = (stored.to(tl.float32) * factor).to(stored.dtype)
            tl.store(data + offsets, stored, mask=offsets < numel)
    return stored.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def check_kernel(  # type: ignore[no-untyped-def]
    data, numel, table, count, sums, factor,
    DTYPE: tl.constexpr, MANY: tl.constexpr, ALIGNED: tl.constexpr, UNSCALE: tl.constexpr,
    GRID: tl.constexpr, LOWEST: tl.constexpr, BITS: tl.constexpr, LEAST: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Checks one chunk of a tensor: of `data`, or, with MANY, of the tensor that `table` assigns to this program.

    `table` has four rows of `count` int64 values. Each row has one entry per tensor. The rows are: the number of chunks
    up to and including the tensor, the tensor's address, its length, and the offset of its row in `sums`. A significand
    has BITS bits. LEAST is the exponent field of the dtype's smallest normal value after a conversion to fp32.
    """
    # Convert to 64 bits before the multiplication, because a tensor may have more than 2^31 elements.
    chunk = tl.program_id(0).to(tl.int64)
    if MANY:
        which, chunk = _find(table, count, chunk)
        numel = tl.load(table + 2 * count + which)
        sums += tl.load(table + 3 * count + which)
        data = tl.load(table + count + which).to(tl.pointer_type(DTYPE))
        if ALIGNED:
            data = tl.multiple_of(data, 16)
    # Triton passes an argument that is 1 as a constant, which has no `.to`. Adding a zero tensor makes `numel` a
    # tensor.
    numel += tl.zeros((), tl.int64)
    start = chunk * CHUNK
    end = tl.minimum(start + CHUNK, numel)
    low = tl.zeros((COLUMNS,), tl.int64)
    middle = low
    high = low
    # Every magnitude is at or above a ceiling of 0, so the first tile determines a grid.
    ceiling = tl.zeros((), tl.int32)
    floor = ceiling
    top = ceiling
    while start < end:
        magnitudes = _read(data, start, numel, factor, UNSCALE, ROWS, COLUMNS)
        largest = largest_of(magnitudes)
        smallest = smallest_of(magnitudes)
        is_bad = largest >= INFINITY
        if is_bad:
            largest = largest_of(tl.where(magnitudes < INFINITY, magnitudes, 0))
        # Keep one power of two in reserve, because later tiles may have larger values.
        wanted = tl.minimum(tl.maximum((largest >> 23) + 1, LOWEST), 254)
        if (largest >= ceiling) | ((largest > 0) & (wanted + _SLACK < top)):
            if top > 0:
                add_columns(sums, top, low, middle, high, GRID)
            low = tl.zeros((COLUMNS,), tl.int64)
            middle = low
            high = low
            top = wanted
            ceiling = (top + 1) << 23
            floor = floor_of(top, GRID, BITS, LEAST)
        # Zeros are on every grid, so ignore zeros when looking for the smallest value.
        if smallest < floor:
            smallest = smallest_of(tl.where(magnitudes > 0, magnitudes, INFINITY))
        if is_bad | (smallest < floor):
            # `squares_by_row` reads the products that other lanes have just stored, so wait for these stores.
            if UNSCALE:
                tl.debug_barrier()
            more_low, more_middle, more_high = squares_by_row(
                data, start, numel, top, floor, sums, GRID, BITS, LEAST, ROWS, COLUMNS
            )
        else:
            more_low, more_middle, more_high = squares_of(magnitudes, top, GRID)
        low += more_low
        middle += more_middle
        high += more_high
        start += ROWS * COLUMNS
    add_columns(sums, top, low, middle, high, GRID)


@triton.jit
def fold_kernel(sums, squares_out, found_out):  # type: ignore[no-untyped-def]
    """Writes the sum in one row, rounded to float64 with ties to even, and whether an element was not finite.

    If an element was not finite, writes inf or NaN instead of the sum.
    """
    zero = tl.zeros((), tl.int64)
    carry = zero
    # `high` is the highest digit that is not zero, and `top` is the index of `high`. `middle` and `low` are the two
    # digits below `high`. `more` is not zero if any digit below `low` is not zero.
    high, middle, low, more, top = zero, zero, zero, zero, zero
    # `before` and `second` are the two digits below `digit`. `rest` is not zero if any digit below `second` is not
    # zero.
    before, second, rest = zero, zero, zero
    for digit in tl.static_range(_DIGITS):
        value = carry + tl.load(sums + digit)
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
    # `significand` has at most 62 bits. Its last bit is set if any lower bit of the sum is set, so that the conversion
    # rounds correctly.
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


# Maps a dtype to its Triton type, and to BITS and LEAST of `check_kernel`.
_FORMATS = {
    torch.float32: (tl.float32, 24, 1),
    torch.bfloat16: (tl.bfloat16, 8, 1),
    torch.float16: (tl.float16, 11, 113),
}


def constants(dtype: torch.dtype) -> dict[str, object]:
    """Returns the compile-time arguments of `check_kernel` for `dtype`, except MANY, ALIGNED and UNSCALE."""
    stored, bits, least = _FORMATS[dtype]
    is_narrow = dtype.itemsize == 2
    grid, lowest = (NARROW.value, NARROW_TOP.value) if is_narrow else (WIDE.value, WIDE_TOP.value)
    # Each lane has 16 bytes of each row. It sums the columns in these bytes.
    columns = WARPS * 32 * 16 // dtype.itemsize
    assert CHUNK // columns <= (NARROW_COUNT if is_narrow else WIDE_COUNT)
    return {
        "DTYPE": stored, "GRID": grid, "BITS": bits, "LEAST": least, "CHUNK": CHUNK, "ROWS": ROWS, "COLUMNS": columns,
        # For fp16 and fp32, the lowest grid contains the smallest values of the dtype. For bf16, such a grid would need
        # a scale above 2^127.
        "LOWEST": max(lowest, least + grid - bits),
    }  # fmt: skip


def begin(placed: Sequence[tuple[int, torch.Tensor]], factor: float, sums: torch.Tensor) -> None:
    """Queues the check of dense, non-empty tensors. Does not wait for the device.

    `placed` has pairs of the index of a row in `sums`, and a tensor.
    """
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
                MANY=many, ALIGNED=all(t.data_ptr() % 16 == 0 for _, t in group),
                UNSCALE=factor != 1.0, **constants(dtype),
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip


def fold(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queues the rounding of the sum in one row.

    Returns two tensors on the device: whether an element was not finite, and the rounded sum.
    """
    squares = torch.empty((), dtype=torch.float64, device=sums.device)
    found = torch.empty((), dtype=torch.uint8, device=sums.device)
    with _on(sums.device):
        fold_kernel[(1,)](sums, squares, found, num_warps=1, enable_fp_fusion=False)
    return found.view(torch.bool), squares


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    # Entering a device takes microseconds. `device` is usually the current device, which need not be entered.
    is_current = device.type != "cuda" or device.index in (None, torch.cuda.current_device())
    return contextlib.nullcontext() if is_current else torch.cuda.device(device)


def _table(group: Sequence[tuple[int, torch.Tensor]], chunks: Sequence[int], device: torch.device) -> torch.Tensor:
    ends = torch.tensor(chunks, dtype=torch.int64, device="cpu").cumsum(0).tolist()
    rows = [ends, [t.data_ptr() for _, t in group], [t.numel() for _, t in group]]
    rows.append([row * SUMS for row, _ in group])
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    # Copy from pinned memory: the copy is then queued before the launch, but a copy from pageable memory would
    # synchronise.
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
