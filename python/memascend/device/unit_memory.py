"""Allocates and fills the memory of units: host memory, or a device reached through a few host chunks."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memascend import memory
from memascend.device.arena import DeviceArena
from memascend.device.transfer import CHECKERS, DeviceEngine, Staging
from memascend.memory import HostArena
from memascend.plan.decision import GRADIENT_WINDOWS, UNIT_CHUNKS
from memascend.storage import Checkers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from memascend.device.device import Device
    from memascend.storage import Engine

_log = logging.getLogger("memascend")


class HostUnits:
    """Units in host memory, which the store reads into. A device needs more care: see `DeviceUnits`."""

    device = None
    unregistered = None
    # The store itself counts the time for which callers waited.
    wait_seconds = 0.0

    def __init__(self, engine: Engine, classes: Mapping[int, int]) -> None:
        self.arena: Any = HostArena(classes)
        self.begin = engine.fetch

    def take(self, nbytes: int, timeout: float) -> torch.Tensor:
        """Memory for the bytes of a unit, which its last view releases; see `DeviceArena.lease`."""
        lease = self.arena.lease(nbytes, timeout=timeout, owner="units")
        with torch.inference_mode(mode=False):
            taken: torch.Tensor = lease.tensor((nbytes,), torch.uint8)
            return taken

    def engine(self, engine: Engine) -> Any:
        """The engine, for gradients that lie where units do."""
        return engine

    @property
    def host(self) -> dict[str, int]:
        """Host memory that is taken, by owner."""
        return {"units": self.arena.held_bytes}

    def stop(self) -> None:
        """Nothing to end: reads belong to their tickets, which the store drains."""

    def close(self) -> None:
        """Release the memory."""
        self.arena.close()


class DeviceUnits:
    """Units in an arena on a device. They and their gradients pass through chunks of host memory."""

    def __init__(
        self, engine: Engine, device: Device, classes: Mapping[int, int], ram_tier: Collection[str] = ()
    ) -> None:
        """Take the memory on both sides, and start the thread that copies; gradients of the `ram_tier` wait here."""
        self.device = device
        self._ram_tier = ram_tier
        self.arena = DeviceArena(device, classes)
        self.take = self.arena.lease
        ((chunk_bytes, count),) = UNIT_CHUNKS.items()
        self._ring = memory.ChunkRing(chunk_bytes, count)
        ((window_bytes, windows),) = GRADIENT_WINDOWS.items()
        self._windows = memory.ChunkRing(window_bytes, windows)
        if self.unregistered:
            _log.warning("%s", self.unregistered)
        parts_of = partial(engine.parts, checkers=Checkers(CHECKERS))
        self._staging = Staging(device, _all(self._ring, chunk_bytes, count), parts_of, self.arena.after)
        self.begin = self._staging.begin
        # What copies into the windows.
        self._lending: DeviceEngine | None = None

    def used(self, base: torch.Tensor) -> None:
        """The caller is about to compute with the bytes of a unit."""
        if self.arena.used(base):
            # The wait for it may have been on another stream.
            self._staging.order(base)

    def engine(self, engine: Engine) -> Any:
        """The engine, for gradients on the device."""
        ((window_bytes, count),) = GRADIENT_WINDOWS.items()
        self._lending = DeviceEngine(engine, self.device, _all(self._windows, window_bytes, count), self._ram_tier)
        return self._lending

    @property
    def host(self) -> dict[str, int]:
        """Host memory that is taken, by owner."""
        rings = {"unit staging": self._ring, "gradient windows": self._windows}
        return {
            name: 0 if ring.region.closed else ring.region.mapped_bytes + int(ring.stats()["tables"])
            for name, ring in rings.items()
        }

    @property
    def unregistered(self) -> str | None:
        """Why memory for copies could not be registered with the device's driver, and the cost of that."""
        regions = (self._ring.region, self._windows.region)
        why = next((region.why_not for region in regions if region.pinned != "cuda"), None)
        return None if why is None else f"{why}; {memory.UNREGISTERED}"

    @property
    def wait_seconds(self) -> float:
        """Time for which callers waited for units, beside the store's own count."""
        return self._staging.wait_seconds

    def stop(self) -> None:
        """End the thread that reads from the store."""
        self._staging.close()

    def close(self) -> None:
        """Release the memory."""
        if self._lending is not None:
            self._lending.end()
        self._ring.close()
        self._windows.close()


def _all(ring: memory.ChunkRing, nbytes: int, count: int) -> list[torch.Tensor]:
    return [ring.lease(0, "staging").tensor(nbytes, torch.uint8) for _ in range(count)]


UnitMemory = HostUnits | DeviceUnits
