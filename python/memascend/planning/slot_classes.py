"""Finds the cheapest slot sizes for the units that must be in memory at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from memascend import memory
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What an arena keeps on the heap beside its slots: for itself, for each class, for each slot.
_ARENA_BYTES, _CLASS_BYTES, SLOT_BYTES = 16_416, 112, 5


def arena_classes(windows: Sequence[Sequence[int]]) -> dict[int, int]:
    """The cheapest classes ({bytes: count}) of an arena that holds each of `windows`, one after another.

    A window is the sizes in bytes of what must be held at once. Sizes that are near each other and never meet (an
    embedding and a head, say) may share slots of the larger size; what shares slots is chosen so that the arena as a
    whole is smallest. As an arena never lends a larger class than needed, each window is granted in every order.
    """
    # What a window holds, not in which order: a model of a hundred equal blocks has a handful of different windows.
    contents = {tuple(sorted(window)) for window in windows}
    sizes = sorted({size for content in contents for size in content})
    if sizes and sizes[0] < 1:
        raise ConfigError(f"what is held in memory has at least one byte, not {sizes[0]}")
    # best[count]: what the `count` smallest sizes cost; how many of them their largest class leaves; its slots.
    best = [(0, 0, 0)]
    for count in range(1, len(sizes) + 1):
        bound = sizes[count - 1]
        ends = [bisect_right(content, bound) for content in contents]
        options = []
        for first in range(count):
            begins = (bisect_left(content, sizes[first]) for content in contents)
            slots = max(end - begin for begin, end in zip(begins, ends, strict=True))
            options.append((best[first][0] + bound * slots, first, slots))
        best.append(min(options))
    classes = {}
    count = len(sizes)
    while count > 0:
        _, first, slots = best[count]
        classes[sizes[count - 1]] = slots
        count = first
    return classes


def arena_bytes(classes: Mapping[int, int]) -> int:
    """What an arena of these classes takes, with its own tables."""
    if not classes:
        return 0
    tables = _ARENA_BYTES + _CLASS_BYTES * len(classes) + SLOT_BYTES * sum(classes.values())
    return memory.layout(classes).reserved + tables
