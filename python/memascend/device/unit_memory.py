"""Allocates and fills the memory of units: host memory, or a device reached through a few host chunks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend import memory
from memascend.device.arena import DeviceArena
from memascend.device.transfer import CHECKERS, CHUNKS, WINDOWS, DeviceEngine, Staging
from memascend.memory import HostArena
from memascend.params.unit import Memory
from memascend.storage import Checkers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from memascend.device.device import Device
    from memascend.storage import Engine, Store, UnitParts

_log = logging.getLogger("memascend")


class UnitMemory(Memory, Protocol):
    """The memory of units as residency knows it, and what a run does with it beside."""

    arena: Any

    def engine(self, engine: Engine) -> Any:
        """The engine, for gradients that lie where units do."""

    @property
    def host(self) -> dict[str, int]:
        """Host memory that is held, by owner."""

    @property
    def wait_seconds(self) -> float:
        """What callers waited for units beside what the store counts."""

    def stop(self) -> None:
        """End what reads from the store."""

    def close(self) -> None:
        """Let the memory go."""

    @property
    def device(self) -> Device | None:
        """What computes, where that is not the host."""

    @property
    def unregistered(self) -> str | None:
        """Why memory for copies could not be registered with the device's driver, and what that costs."""


class HostUnits:
    """Units in host memory, which the store reads into."""

    device = None
    unregistered = None

    def __init__(self, store: Store, classes: Mapping[int, int]) -> None:
        """Take the memory."""
        self.arena = HostArena(classes)
        self.begin = store.fetch
        self._store = store
        self._held: dict[str, torch.Tensor] = {}
        self.spoil = store.spoil

    def held(self, name: str) -> torch.Tensor:
        """See `Memory`."""
        with torch.inference_mode(mode=False):
            found = self._store.held_unit(name)
        assert found is not None, f"unit {name!r} is not held"
        # Tensors are found by their storage: it is one for as long as the unit is held, unless somebody moves it
        # (share_memory_()).
        kept = self._held.setdefault(name, found)
        if kept.data_ptr() != found.data_ptr():
            kept = self._held[name] = found
        return kept

    @property
    def held_epoch(self) -> int:
        """See `Memory`."""
        return self._store.held_epoch

    def used(self, base: torch.Tensor) -> None:
        """See `Memory`."""

    def require_usable(self) -> None:
        """See `Memory`."""

    def engine(self, engine: Engine) -> Any:
        """See `Memory`."""
        return engine

    @property
    def host(self) -> dict[str, int]:
        """See `Memory`."""
        return {"units": self.arena.held_bytes}

    @property
    def wait_seconds(self) -> float:
        """See `Memory`."""
        return 0.0

    def stop(self) -> None:
        """See `UnitMemory`: reads belong to their tickets, which the store drains."""

    def close(self) -> None:
        """See `Memory`."""
        self._held.clear()
        self.arena.close()


class DeviceUnits:
    """Units in an arena on a device. Host memory has the chunks that they and their gradients pass through."""

    # What is held is in host memory, and passes through the chunks from there.
    held_epoch = 0

    def __init__(self, store: Store, device: Device, classes: Mapping[int, int], held: Collection[str] = ()) -> None:
        """Take the memory on both sides, and start the thread that copies; gradients of `held` entries wait here."""
        self.device = device
        self._held = held
        self.arena = DeviceArena(device, classes)
        ((chunk_bytes, count),) = CHUNKS.items()
        self._ring = memory.ChunkRing(chunk_bytes, count)
        ((window_bytes, windows),) = WINDOWS.items()
        self._windows = memory.ChunkRing(window_bytes, windows)
        if self.unregistered:
            _log.warning("%s", self.unregistered)
        checkers = Checkers(CHECKERS)

        def parts_of(name: str, bytes_max: int) -> UnitParts:
            return store.parts(name, bytes_max, checkers)

        self._staging = Staging(device, _all(self._ring, chunk_bytes, count), parts_of, self.arena.after)
        self.begin = self._staging.begin
        # What copies into the windows.
        self._lending: DeviceEngine | None = None

    def used(self, base: torch.Tensor) -> None:
        """See `Memory`."""
        if self.arena.used(base):
            # Whoever waited for it may have been on another stream.
            self._staging.order(base)

    def held(self, name: str) -> torch.Tensor:
        """See `Memory`."""
        raise AssertionError(f"unit {name!r} is computed with on the device")

    def spoil(self, name: str) -> None:
        """See `Memory`."""

    def require_usable(self) -> None:
        """See `Memory`."""
        self.device.require_no_capture()

    def engine(self, engine: Engine) -> DeviceEngine:
        """See `Memory`."""
        ((window_bytes, count),) = WINDOWS.items()
        self._lending = DeviceEngine(engine, self.device, _all(self._windows, window_bytes, count), self._held)
        return self._lending

    @property
    def host(self) -> dict[str, int]:
        """See `Memory`."""
        held = {"unit staging": self._ring, "gradient windows": self._windows}
        return {
            name: 0 if ring.region.closed else ring.region.mapped_bytes + int(ring.stats()["tables"])
            for name, ring in held.items()
        }

    @property
    def unregistered(self) -> str | None:
        """See `Memory`."""
        if self.device.torch_device.type != "cuda":
            return None
        regions = (self._ring.region, self._windows.region)
        why = next((region.why_not for region in regions if region.pinned != "cuda"), None)
        return None if why is None else f"{why}; {memory.UNREGISTERED}"

    @property
    def wait_seconds(self) -> float:
        """See `Memory`."""
        return self._staging.wait_seconds

    def stop(self) -> None:
        """See `Memory`."""
        self._staging.close()

    def close(self) -> None:
        """See `Memory`."""
        if self._lending is not None:
            self._lending.end()
        self._ring.close()
        self._windows.close()


def _all(ring: memory.ChunkRing, nbytes: int, count: int) -> list[torch.Tensor]:
    return [ring.lease(0, "staging").tensor(nbytes, torch.uint8) for _ in range(count)]
