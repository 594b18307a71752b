"""Quantises blocks of 256 numbers to 8 bits as bitsandbytes does on a CPU, in plain torch operations."""

from __future__ import annotations

import functools

import torch

__all__ = ["BLOCK", "dequantized", "dynamic_map", "fma", "quantized"]

BLOCK = 256
_POINTS = 1 << 16


def dynamic_map(*, signed: bool) -> torch.Tensor:
    """Returns the 256 code values, sorted: 0, 1, and the midpoints of equal intervals in each of seven decades.

    Each decade has twice as many intervals as the decade below it. With `signed`, each decade has half as many
    intervals as without, and the negated midpoints are code values, too.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        items = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, items + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2.0
        scaled = (10 ** (decade - 6) * middles).tolist()
        numbers += scaled
        if signed:
            numbers += [-number for number in scaled]
    return torch.tensor(sorted(numbers), dtype=torch.float32)


# The map is computed at the first call instead of at import. Computing the map starts torch's threads, and a process
# must fork its children before it starts torch's threads.
@functools.cache
def _numbers(*, signed: bool) -> torch.Tensor:
    return dynamic_map(signed=signed)


@functools.cache
def _codes_of_points(*, signed: bool) -> torch.Tensor:
    numbers = _numbers(signed=signed)
    middles = 0.5 * (numbers[:-1] + numbers[1:])
    points = torch.arange(_POINTS, dtype=torch.float32)
    shares = (points + points) / float(_POINTS - 1) - 1.0
    # bucketize() counts the midpoints below each share. This count is the code of the value nearest to the share.
    return torch.bucketize(shares, middles, right=False).to(torch.uint8)


def _blocks(flat: torch.Tensor) -> torch.Tensor:
    missing = -flat.numel() % BLOCK
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, BLOCK)


def quantized(flat: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the code of each element, and the absolute maximum of each block of 256 elements."""
    blocks = _blocks(flat)
    magnitudes = blocks.abs()
    absmax = torch.where(magnitudes.isnan(), 0.0, magnitudes).amax(1)
    shares = blocks * (1.0 / absmax)[:, None]
    places = fma(((shares.clamp(-1.0, 1.0) + 1.0) * 0.5), 65_535.0, 0.5)
    points = torch.where(places.isnan(), 0.0, places).long()
    codes = torch.where(absmax[:, None] == 0, 0, _codes_of_points(signed=signed)[points])
    return codes.flatten()[: flat.numel()].to(torch.uint8), absmax


def dequantized(codes: torch.Tensor, absmax: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Returns the float32 values that `codes` stand for, scaled by each block's absolute maximum."""
    numbers = _numbers(signed=signed)[codes.long()]
    return numbers * absmax.repeat_interleave(BLOCK)[: codes.numel()]


def fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """Returns `a * b + c`, rounded once to float32.

    The product is exact in float64. The float64 sum is rounded to odd, so that rounding this sum to float32 gives the
    correctly rounded result.
    """
    of_b, of_c = (torch.as_tensor(x, dtype=torch.float32).double() for x in (b, c))
    product = a.double() * of_b
    total = product + of_c
    back = total - product
    error = (product - (total - back)) + (of_c - back)
    bits = total.view(torch.int64)
    adjust = (error != 0) & (bits & 1 == 0) & torch.isfinite(total) & (total != 0)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(adjust, bits + toward, bits).view(torch.float64).float()
