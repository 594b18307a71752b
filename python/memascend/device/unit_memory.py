"""Allocates memory for units of parameters, on the host or on a device, and begins reads into this memory."""

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
    """Host memory for units. `begin` makes the engine read a unit directly into this memory."""

    device = None
    unregistered = None
    # Always 0: the store itself counts the time for which callers wait.
    wait_seconds = 0.0

    def __init__(self, engine: Engine, classes: Mapping[int, int]) -> None:
        self.arena: Any = HostArena(classes)
        self.begin = engine.fetch

    def take(self, nbytes: int, timeout: float) -> torch.Tensor:
        """Leases memory for a unit. The lease ends when the last view of the returned tensor is deleted."""
        lease = self.arena.lease(nbytes, timeout=timeout, owner="units")
        with torch.inference_mode(mode=False):
            taken: torch.Tensor = lease.tensor((nbytes,), torch.uint8)
            return taken

    def engine(self, engine: Engine) -> Any:
        """Returns `engine` itself, since gradients are in host memory."""
        return engine

    @property
    def host(self) -> dict[str, int]:
        """The bytes of host memory that this object has, by owner."""
        return {"units": self.arena.held_bytes}

    def stop(self) -> None:
        """Does nothing: this class has no thread, and the store waits for its own reads."""

    def close(self) -> None:
        """Releases the memory."""
        self.arena.close()


class DeviceUnits:
    """Device memory for units. Units are copied to the device, and gradients from it, through chunks of host memory."""

    def __init__(
        self, engine: Engine, device: Device, classes: Mapping[int, int], ram_tier: Collection[str] = ()
    ) -> None:
        """Allocates the memory on host and device, and starts the staging thread.

        Gradients of records in `ram_tier` do not pass through chunks: they are copied whole to host memory.
        """
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
        # Copies gradients into the windows; None until `engine` is called.
        self._lending: DeviceEngine | None = None

    def used(self, base: torch.Tensor) -> None:
        """Prepares the caller's stream to compute with the bytes of a unit."""
        if self.arena.used(base):
            # `Staged.wait` may have made only another stream wait for the copies, so make this stream wait, too.
            self._staging.order(base)

    def engine(self, engine: Engine) -> Any:
        """Returns a wrapper of the engine for gradients on the device."""
        ((window_bytes, count),) = GRADIENT_WINDOWS.items()
        self._lending = DeviceEngine(engine, self.device, _all(self._windows, window_bytes, count), self._ram_tier)
        return self._lending

    @property
    def host(self) -> dict[str, int]:
        """The bytes of host memory that this object has, by owner."""
        rings = {"unit staging": self._ring, "gradient windows": self._windows}
        return {
            name: 0 if ring.region.closed else ring.region.mapped_bytes + int(ring.stats()["tables"])
            for name, ring in rings.items()
        }

    @property
    def unregistered(self) -> str | None:
        """Why some host chunks are not registered with CUDA, and what this costs; None if all chunks are registered."""
        regions = (self._ring.region, self._windows.region)
        why = next((region.why_not for region in regions if region.pinned != "cuda"), None)
        return None if why is None else f"{why}; {memory.UNREGISTERED}"

    @property
    def wait_seconds(self) -> float:
        """The seconds for which callers waited for uploads. The store does not count these seconds."""
        return self._staging.wait_seconds

    def stop(self) -> None:
        """Ends the staging thread, which reads from the store."""
        self._staging.close()

    def close(self) -> None:
        """Waits for copies of gradients, and releases the host memory."""
        if self._lending is not None:
            self._lending.end()
        self._ring.close()
        self._windows.close()


def _all(ring: memory.ChunkRing, nbytes: int, count: int) -> list[torch.Tensor]:
    """Leases all chunks of a ring."""
    return [ring.lease(0, "staging").tensor(nbytes, torch.uint8) for _ in range(count)]


UnitMemory = HostUnits | DeviceUnits
