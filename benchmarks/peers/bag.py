"""Generates the parameters and gradients of `bench_update`: equal numbers in every process and torch version.

DeepSpeed's environment imports this file, too, so it imports nothing of ours.
"""

from __future__ import annotations

from typing import Any

# Few large parameters, as models have.
PARAMETERS = 8
# So many values at the beginning of the first parameter are compared.
SAMPLE = 4096


def values(numel: int) -> Any:
    """A bf16 parameter before the first step."""
    return _pattern(numel, 127, 64)


def gradient(numel: int) -> Any:
    """Its bf16 gradient in every step."""
    return _pattern(numel, 251, 1000)


def _pattern(numel: int, period: int, divisor: int) -> Any:
    """A period of numbers around zero, again and again; without a temporary of another size."""
    import torch

    one = ((torch.arange(period) - period // 2) / divisor).bfloat16()
    whole = torch.empty(numel, dtype=torch.bfloat16)
    rows = numel // period
    whole[: rows * period].view(rows, period).copy_(one)
    whole[rows * period :] = one[: numel - rows * period]
    return whole
