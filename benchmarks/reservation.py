"""Computes the host memory that four pooling schemes reserve for the same units of published models.

A training step walks the units of a model in order; at any time a window of consecutive units is in memory. Four
pools that can hold every such window:

- one size: as many slots as a window has tensors at most, each as big as the largest tensor (ZeRO-Infinity, whose
  tensors below a threshold stay in memory instead and are counted at their exact size);
- one size, rounded: the same, its pinned allocation rounded up to a power of two (as torch's pinned allocator does);
- per shape: slots of each tensor shape, as many as a window has of it at most (the MemAscend paper);
- arena: slots of unit sizes as `plan.arena_classes` chooses them, laid out by the arena itself.

What is needed is the largest number of bytes that any window holds; what is reserved beyond that is waste.
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

# bf16 and fp16.
_ELEMENT_BYTES = 2
# ZeRO-Infinity's default threshold, in elements, under which a tensor is never swapped out.
_PERSISTENT_ELEMENTS = 100_000
# A unit's tensors begin at cache lines, so that kernels read them at full speed.
_TENSOR_ALIGNMENT = 64

# The sizes in bytes of one unit's tensors.
Unit = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """What one model's pools reserve, in bytes."""

    needed: int
    reserved: dict[str, int]

    def waste(self, pool: str) -> float:
        """What the pool reserves beyond what is needed, in percent of what is needed."""
        return 100 * (self.reserved[pool] / self.needed - 1)


def load_models() -> list[dict[str, Any]]:
    """The models of model_shapes.json: "model", "parameters", and "units" with a "count" and shapes by name."""
    text = Path(__file__).with_name("model_shapes.json").read_text(encoding="utf-8")
    models: list[dict[str, Any]] = json.loads(text)
    return models


def unit_bytes(model: dict[str, Any]) -> list[Unit]:
    """The units of a model in the order of a step, repeated ones as often as they are there."""
    return [
        tuple(math.prod(shape) * _ELEMENT_BYTES for shape in unit["tensors"].values())
        for unit in model["units"]
        for _ in range(unit["count"])
    ]


def reserve(units: list[Unit], window: int) -> Reservation:
    """What each pool reserves so that any `window` consecutive units fit."""
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
