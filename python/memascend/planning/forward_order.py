"""Orders units as a step uses them, and counts how often a step reads each of them."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.planning.units import Unit


def forward_order(units: Sequence[Unit]) -> list[Unit]:
    """The units that are not pinned as a forward uses them, tied ones more than once; a backward goes the other way."""
    after: dict[str, list[Unit]] = {}
    for unit in units:
        for before in unit.again:
            after.setdefault(before, []).append(unit)
    order: list[Unit] = []
    for unit in units:
        if not unit.pinned:
            order += [unit, *after.get(unit.name, ())]
    return order


def list_windows(units: Sequence[Unit], length: int) -> list[dict[str, Unit]]:
    """What must be in memory at once where `length` units that follow each other are, by name; pinned ones always.

    A backward holds the same sets as the forward, and a step begins where the last one ended.
    """
    order, named = forward_order(units), {unit.name: unit for unit in units}
    pinned = {unit.name: unit for unit in units if unit.pinned}
    met: set[str] = set()
    uses: list[dict[str, Unit]] = []
    for unit in order:
        around = unit.around_again if unit.name in met else unit.around
        uses.append({name: named[name] for name in (unit.name, *around)})
        met.add(unit.name)
    sets = []
    for first in range(max(1, len(order) - length + 1)):
        held = dict(pinned)
        for use in uses[first : first + length]:
            held.update(use)
        sets.append(held)
    return sets


def count_reads(order: Sequence[Unit], slots: int) -> tuple[dict[str, int], dict[str, int]]:
    """How often one step reads each unit, in its forward and in its backward, with `slots` for all of them.

    What is used farthest from now makes room, and a commit makes what was trained useless. `order` is the forward's.
    """
    names = [unit.name for unit in order]
    frozen = {unit.name for unit in order if unit.frozen_bytes >= unit.nbytes}
    step = names + names[::-1]
    first = {name: names.index(name) for name in frozen}
    # The first step begins with nothing in memory; the second is like all that follow.
    uses = step * 2
    following: list[float] = [math.inf] * len(uses)
    seen: dict[str, int] = {}
    for at in range(len(uses) - 1, -1, -1):
        name = uses[at]
        if name in frozen:
            # After the last use that is looked at comes that of the next step.
            following[at] = seen.get(name, len(uses) + first[name])
        elif name in seen and seen[name] // len(step) == at // len(step):
            following[at] = seen[name]
        seen[name] = at
    count: tuple[dict[str, int], dict[str, int]] = (dict.fromkeys(names, 0), dict.fromkeys(names, 0))
    held: dict[str, float] = {}
    heap: list[tuple[float, str]] = []
    for at, name in enumerate(uses):
        if at == len(step):
            held = {kept: use for kept, use in held.items() if kept in frozen}
        if name not in held:
            if at >= len(step):
                count[at - len(step) >= len(names)][name] += 1
            while len(held) >= max(slots, 1):
                use, out = heapq.heappop(heap)
                if held.get(out) == -use:
                    del held[out]
        held[name] = following[at]
        heapq.heappush(heap, (-following[at], name))
    return count
