"""What is decided before the run. So far: the classes of an arena, from what must be in memory together."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["arena_classes"]


def arena_classes(windows: Sequence[Sequence[int]]) -> dict[int, int]:
    """The cheapest classes ({bytes: count}) of an arena that holds each of `windows`, one after another.

    A window is the sizes in bytes of what must be held at once. Sizes that are near each other and never meet (an
    embedding and a head, say) may share slots of the larger size; what shares slots is chosen so that the arena as a
    whole is smallest. As an arena never lends a larger class than needed, each window is granted in every order.
    """
    sizes = sorted({size for window in windows for size in window})

    def slots(first: int, last: int) -> int:
        return max(sum(sizes[first] <= size <= sizes[last] for size in window) for window in windows)

    @cache
    def cheapest(count: int) -> tuple[int, dict[int, int]]:
        """The cost in bytes and the classes of the `count` smallest sizes."""
        if count == 0:
            return 0, {}
        options = []
        for first in range(count):
            below, classes = cheapest(first)
            shared = slots(first, count - 1)
            options.append((below + sizes[count - 1] * shared, {**classes, sizes[count - 1]: shared}))
        return min(options, key=lambda option: option[0])

    return cheapest(len(sizes))[1]
