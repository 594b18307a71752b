"""Reads units from a store into memory in the background, whole or in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend import _core
from memascend.engine.ffi import place_of, require

if TYPE_CHECKING:
    import torch


class Fetch:
    """A unit on its way into memory; `Store.fetch` makes it. Any thread may use it.

    Until the device is done with it the slots that it reads are not written: the step after the next commit waits for
    that. Dropping it waits for the device.
    """

    __slots__ = ("_core",)

    def __init__(self, core: _core.Fetch) -> None:
        self._core = core

    def wait(self) -> int:
        """Wait for the device, without the GIL, and check every byte. Ctrl-C ends the wait, not the read.

        Returns:
            The newest version among its entries (the generation that wrote it). Waiting again says the same again.

        Raises:
            StorageError: the device failed.
            CorruptionError: what is on storage is not what was written; the message names entry and chunk.
        """
        return self._core.wait()

    def done(self) -> bool:
        """Whether the device is done with it, well or not. Never waits."""
        return self._core.done()


class Checkers:
    """Threads that check parts of units as they come, so that nobody computes checksums who has copies to begin.

    They end when this and every part that they check are gone.
    """

    __slots__ = ("core",)

    def __init__(self, threads: int) -> None:
        """As many threads, or as many as can be had; with none, whoever waits for a part checks it."""
        self.core = _core.Checkers(threads)

    @property
    def threads(self) -> int:
        """Threads that there are."""
        return self.core.threads


class UnitParts:
    """A unit that is read part by part; `Store.parts` makes it. All parts are of one commit.

    Until each was read once, or it and every read of it are gone, the slots that it reads are not written: the step
    after the next commit waits for that.
    """

    __slots__ = ("_checkers", "_core", "_places")

    def __init__(self, core: _core.Parts, checkers: Checkers | None = None) -> None:
        self._core = core
        self._places = core.places()
        self._checkers = None if checkers is None else checkers.core

    def places(self) -> list[tuple[int, int]]:
        """Where each part begins in the unit, and its bytes."""
        return self._places

    def begin(self, index: int, into: torch.Tensor) -> _core.PartFetch:
        """Begin to read a part into a contiguous uint8 CPU tensor of its size, before all other I/O that waits.

        The tensor is held until the end. What comes back has `wait()`, which checks every byte and raises as
        `Fetch.wait` does, and `done()`; dropping it waits for the device.
        """
        require("a part", into, "uint8", [self._places[index][1]], None)
        return self._core.begin(index, *place_of(into), self._checkers)
