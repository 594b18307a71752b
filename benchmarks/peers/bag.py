"""Generates the parameters and gradients of `bench_update`. They are equal in every process and torch version.

Programs in DeepSpeed's environment also import this file, so it imports only torch.
"""

from __future__ import annotations

from typing import Any

# The number of parameters. As in models, there are few parameters, and each is large.
PARAMETERS = 8
# The number of values that are compared with DeepSpeed: the first values of the first parameter.
SAMPLE = 4096


def values(numel: int) -> Any:
    """Returns the values of a bf16 parameter before the first step."""
    return _pattern(numel, 127, 64)


def gradient(numel: int) -> Any:
    """Returns the bf16 gradient of a parameter. The gradient is the same in every step."""
    return _pattern(numel, 251, 1000)


def _pattern(numel: int, period: int, divisor: int) -> Any:
    """Returns `numel` bf16 numbers around zero, which repeat after `period` numbers.

    Allocates no other tensor of `numel` numbers.
    """
    import torch

    one = ((torch.arange(period) - period // 2) / divisor).bfloat16()
    whole = torch.empty(numel, dtype=torch.bfloat16)
    rows = numel // period
    whole[: rows * period].view(rows, period).copy_(one)
    whole[rows * period :] = one[: numel - rows * period]
    return whole
