"""Checksums values in memory to find writes that torch does not count (`MEMASCEND_DEBUG=1`).

A write through `.data` moves no version counter. It would change what is computed until the unit leaves memory, and be
lost then, in silence.
"""

from __future__ import annotations

import ctypes
import logging
import os
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from memascend.residency.unit_slot import Home

__all__ = ["Sums", "wanted"]

_log = logging.getLogger("memascend")


def wanted() -> bool:
    """Whether the environment asks for them: they cost a pass over every unit at each use."""
    return os.environ.get("MEMASCEND_DEBUG", "") not in ("", "0")


class Sums:
    """What the parameters in memory were when they were read."""

    def __init__(self) -> None:
        self._read: dict[str, int] = {}
        self._told: set[str] = set()

    def note(self, home: Home) -> None:
        """A unit was read."""
        base = home.base
        assert base is not None
        for place in home.places:
            self._read[place.name] = _sum(base, place.offset, place.nothing.nbytes)

    def changed(self, home: Home) -> list[str]:
        """The parameters of a unit in memory that are not what was read."""
        base = home.base
        if base is None:
            return []
        names = [
            place.name
            for place in home.places
            if self._read.get(place.name) != _sum(base, place.offset, place.nothing.nbytes)
        ]
        for name in names:
            if name not in self._told:
                _log.warning("the values of %s were changed in memory, past torch's counters (.data?)", name)
                self._told.add(name)
        return names


def _sum(base: torch.Tensor, offset: int, nbytes: int) -> int:
    here = base[offset : offset + nbytes].cpu()
    return zlib.crc32((ctypes.c_char * nbytes).from_address(here.data_ptr()))
