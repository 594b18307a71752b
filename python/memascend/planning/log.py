"""Decides how many steps of gradients the store's log keeps for held entries: as asked, and as there is room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

# Each entry is written whole once in so many steps: of 12 bytes a parameter, three quarters of one a step. Twice as
# many would save three eighths of a byte, and take twice the room and twice as long to replay.
_STEPS = 16
# Unless it was asked for by a number, a log leaves the rest of what is free to others.
_SHARE = 2


@dataclass(frozen=True, eq=False)
class Log:
    """What a log of gradients could be."""

    names: Collection[str]  # of the entries whose updates can be replayed
    # What it takes for some of these, by the number of its steps, from 1 on.
    nbytes: Callable[[Sequence[str], int], int]
    asked: int | None = None  # how many steps; None: as many as are good
    room: int | None = None  # bytes that there are for it; None where nobody knows
    shares: bool = True  # that room is others', too

    def wanted(self, names: Sequence[str]) -> int:
        """How many steps it would keep of these entries if there was room."""
        return (_STEPS if self.asked is None else self.asked) if names else 0

    def plan(self, names: Sequence[str]) -> tuple[int, int]:
        """How many steps it keeps of these entries, and its bytes; 0 where there is no room for one."""
        wanted = self.wanted(names)
        if not wanted:
            return 0, 0
        first = self.nbytes(names, 1)
        each = self.nbytes(names, 2) - first
        if self.room is not None:
            room = self.room // _SHARE if self.shares and self.asked is None else self.room
            wanted = min(wanted, 1 + (room - first) // each)
        return (wanted, first + (wanted - 1) * each) if wanted > 0 else (0, 0)
