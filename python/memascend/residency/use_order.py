"""Learns in which order a step uses units and predicts the next one."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

_NEVER = 1 << 60
# A step that uses more units than this (a long generate()) is not learnt beyond it.
_RECORDED_MAX = 1 << 16


class Order:
    """The order in which units are used: recorded in one step, expected in the next."""

    __slots__ = ("_expected", "_position", "_recorded", "_uses")

    def __init__(self) -> None:
        self._expected: list[int] = []
        self._uses: dict[int, list[int]] = {}
        self._recorded: list[int] = []
        self._position = 0

    def expect(self, indices: Iterable[int]) -> None:
        """Expect this order, until a step has shown the true one."""
        self._expected = list(indices)
        self._uses = {}
        for position, index in enumerate(self._expected):
            self._uses.setdefault(index, []).append(position)
        self._position = 0

    def went_to(self, index: int) -> None:
        """A unit is used now."""
        if self._recorded and self._recorded[-1] == index:
            return
        if len(self._recorded) < _RECORDED_MAX:
            self._recorded.append(index)
        uses = self._uses.get(index, [])
        at = bisect_left(uses, self._position)
        # Another path than the last step's: go on where this unit is used next, or was used at all.
        if at < len(uses):
            self._position = uses[at] + 1
        elif uses:
            self._position = uses[0] + 1

    def ahead(self, count: int, beside: Container[int] = ()) -> list[int]:
        """The next units that are used, `beside` some, this many at most."""
        total = len(self._expected)
        found: list[int] = []
        looked = 0
        for step in range(total):
            index = self._expected[(self._position + step) % total]
            if index in beside:
                continue
            looked += 1
            if index not in found:
                found.append(index)
            if len(found) >= count or looked >= 4 * count:
                break
        return found

    def next_use(self, index: int) -> int:
        """How many uses from now a unit is used again."""
        uses = self._uses.get(index)
        if not uses:
            return _NEVER
        at = bisect_left(uses, self._position)
        if at < len(uses):
            return uses[at] - self._position
        return uses[0] + len(self._expected) - self._position

    def is_used_again(self, index: int) -> bool:
        """Whether what is left of the step uses a unit."""
        uses = self._uses.get(index, [])
        return bisect_left(uses, self._position) < len(uses)

    def end(self) -> None:
        """The step is over."""
        if self._recorded:
            self.expect(self._recorded)
        self._recorded = []
        self._position = 0
