"""Computes the host memory that four kinds of pools reserve for the same units of published models.

A training step uses the units of a model in order. At any time, a window of consecutive units is in memory. Each of the
four pools can hold every such window:

- "one size": each slot is as large as the largest tensor. The number of slots is the largest number of tensors in any
  window. ZeRO-Infinity uses such a pool. It never offloads tensors below a threshold: these small tensors take no slot,
  and those of the whole model add their exact size.
- "one size, rounded": the same, but the size of all slots together is rounded up to a power of two, as torch's pinned
  allocator does.
- "per shape": slots for each shape of a tensor. For each shape, the number of slots is the largest number of tensors of
  this shape in any window. The MemAscend paper uses such a pool.
- "arena": slots for whole units, in the layout of memascend's arena. `arena_classes` of `memascend.plan.memory_plan`
  chooses their sizes.

The bytes needed are the bytes of the largest window. The bytes that a pool reserves in addition are waste.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend import memory
from memascend.plan.memory_plan import arena_classes

POOLS = ("one size, rounded", "one size", "per shape", "arena")

# The number of bytes in a bf16 or fp16 element.
_ELEMENT_BYTES = 2
# The default threshold of ZeRO-Infinity, in elements. It never offloads smaller tensors.
_PERSISTENT_ELEMENTS = 100_000
# Each tensor of a unit begins at a multiple of a cache line, so that kernels read it at full speed.
_TENSOR_ALIGNMENT = 64

# The sizes in bytes of one unit's tensors.
Unit = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """The bytes that one model needs, and the bytes that each pool reserves for it."""

    needed: int
    reserved: dict[str, int]

    def waste(self, pool: str) -> float:
        """Returns the bytes that the pool reserves beyond the bytes needed, in percent of the bytes needed."""
        return 100 * (self.reserved[pool] / self.needed - 1)


def load_models() -> list[dict[str, Any]]:
    """Returns the models of model_shapes.json.

    Each model has "model" (its name), "parameters" and "units". Each unit has a "count" and the shapes of named
    tensors.
    """
    text = Path(__file__).with_name("model_shapes.json").read_text(encoding="utf-8")
    models: list[dict[str, Any]] = json.loads(text)
    return models


def unit_bytes(model: dict[str, Any]) -> list[Unit]:
    """Returns the units of a model in the order of a step. A unit with a "count" of n is in the list n times."""
    return [
        tuple(math.prod(shape) * _ELEMENT_BYTES for shape in unit["tensors"].values())
        for unit in model["units"]
        for _ in range(unit["count"])
    ]


def reserve(units: list[Unit], window: int) -> Reservation:
    """Returns the bytes that each pool reserves so that any `window` consecutive units fit."""
    windows = [units[first : first + window] for first in range(max(1, len(units) - window + 1))]
    swapped = [[size for unit in held for size in unit if _is_swapped(size)] for held in windows]
    persistent = sum(size for unit in units for size in unit if not _is_swapped(size))
    one_size = max(map(len, swapped)) * max(max(sizes, default=0) for sizes in swapped)
    per_shape = _most_of_each([[size for unit in held for size in unit] for held in windows])
    classes = arena_classes([[_lease_bytes(unit) for unit in held] for held in windows])
    return Reservation(
        needed=max(sum(sum(unit) for unit in held) for held in windows),
        reserved={
            "one size, rounded": (1 << (one_size - 1).bit_length()) + persistent,
            "one size": one_size + persistent,
            "per shape": sum(size * count for size, count in per_shape.items()),
            "arena": _pages(memory.layout(classes).reserved),
        },
    )


def _is_swapped(size: int) -> bool:
    return size >= _PERSISTENT_ELEMENTS * _ELEMENT_BYTES


def _lease_bytes(unit: Unit) -> int:
    return sum(-(-size // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT for size in unit)


def _most_of_each(windows: list[list[int]]) -> dict[int, int]:
    most: Counter[int] = Counter()
    for sizes in windows:
        most |= Counter(sizes)
    return dict(most)


def _pages(nbytes: int) -> int:
    page: int = memory.limits()["page"]
    return -(-nbytes // page) * page
