"""Checksums values in memory to find writes that torch does not count.

A write through `.data` moves no version counter. It would change what is computed until the unit leaves memory, and be
lost then, in silence. So a parameter whose `.data` is taken while it is bound is compared from then on. With
`MEMASCEND_DEBUG=1` all are, which finds what comes by other ways (`detach().numpy()`, a kernel of one's own).
"""

from __future__ import annotations

import logging
import os
import zlib
from typing import TYPE_CHECKING

from memascend.tensors import memory_of

if TYPE_CHECKING:
    import torch

    from memascend.residency.placeholder import Place
    from memascend.residency.unit_slot import Home

_log = logging.getLogger("memascend")


def wanted() -> bool:
    """Whether the environment asks for all of them: they cost a pass over every unit at each use."""
    return os.environ.get("MEMASCEND_DEBUG", "") not in ("", "0")


class Sums:
    """What the parameters in memory were when they were read, or when their `.data` was taken."""

    def __init__(self, *, everything: bool) -> None:
        """`everything`: compare all parameters, and not only those that somebody took the data of."""
        self._everything = everything
        self._read: dict[str, int] = {}
        self._told: set[str] = set()

    def note(self, home: Home) -> None:
        """A unit was read."""
        self.forget(home)
        if self._everything:
            for place in home.places:
                self.take(home, place)

    def forget(self, home: Home) -> None:
        """What was read is not compared any more."""
        for place in home.places:
            self._read.pop(place.name, None)

    def take(self, home: Home, place: Place) -> None:
        """Somebody is about to have a parameter's memory."""
        if home.base is not None and place.name not in self._read:
            self._read[place.name] = _sum(home.base, place.offset, place.nothing.nbytes)

    def changed(self, home: Home) -> list[str]:
        """The parameters of a unit in memory that are not what was read."""
        base = home.base
        if base is None or not self._read:
            return []
        names = [
            place.name
            for place in home.places
            if place.name in self._read and self._read[place.name] != _sum(base, place.offset, place.nothing.nbytes)
        ]
        for name in names:
            if name not in self._told:
                _log.warning("the values of %s were changed in memory, past torch's counters (.data?)", name)
                self._told.add(name)
        return names


def _sum(base: torch.Tensor, offset: int, nbytes: int) -> int:
    return zlib.crc32(memory_of(base[offset : offset + nbytes].cpu()))
