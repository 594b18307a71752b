"""Allocates host memory that is planned once: regions, arenas, chunk rings, leases; maps files as memory.

Sizes are in bytes and exact; times are in seconds. Errors: `ConfigError` for a wrong argument, `BudgetError` for a
region too small for its plan, `MemoryLimitError` where the machine or its cgroup does not have the memory,
`TimeoutExpired` where a wait ran out, `UsageError` for what was closed, returned or belongs to another process.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Literal

from memascend import _core
from memascend.errors import ConfigError
from memascend.text import Closing

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


__all__ = [
    "UNREGISTERED",
    "Arena",
    "ChunkRing",
    "Heap",
    "Layout",
    "Lease",
    "Region",
    "file_memory",
    "ignore_captures",
    "is_file_memory",
    "layout",
    "limits",
    "regions",
]


# What it costs that CUDA has not registered memory which copies to a device and back go through.
UNREGISTERED = (
    "copies to the device and back go through a buffer of the driver's and are slower for it, and whoever begins one "
    "waits until it is over, so that little is read meanwhile"
)


class Heap(Closing):
    """The C library's heap while a model is trained: it maps allocations from 1 MiB on, and gives back what is free.

    glibc raises that threshold by itself, and its heap grows with the depth of a model then. A model that was made in
    the heap leaves holes, which gradients would fill one after another: they are taken, and free again after `close()`.
    `MEMASCEND_MALLOC=system` in the environment leaves the heap alone; glibc's own variables, by which somebody chose,
    leave their thresholds and the holes.
    """

    __slots__ = ("_core",)

    def __init__(self) -> None:
        self._core = _core.Heap()

    def take_holes(self) -> None:
        """Give back what is free, and take the holes: large memory was freed that does not come again."""
        self._core.take_holes()

    def trim(self) -> None:
        """Give back to the system what is free."""
        self._core.trim()

    def close(self) -> None:
        """Make the holes free for anybody."""
        self._core.close()


class Region(Closing):
    """Page-aligned memory on huge pages, pinned as well as can be had, populated before use.

    Exactly `nbytes`, rounded up to the page and to nothing else. The memory goes back to the system when the region is
    closed and the last tensor in it is gone.
    """

    __slots__ = ("_core",)

    def __init__(
        self,
        nbytes: int,
        pin: Literal["auto", "mlock", "cuda", False] = "auto",
        *,
        on_fork: Literal["copy", "wipe"] = "copy",
        owner: str = "region",
    ) -> None:
        """Map the memory.

        Args:
            nbytes: how much.
            pin: "auto" takes the best that can be had (`pinned` says what, `why_not` why no more); "mlock" or "cuda"
                insists, and is a ConfigError with the reason and the remedy where it cannot be had; False pins nothing.
            on_fork: what a forked child sees of it: "copy" as of all other memory; "wipe" zeros, and this process
                keeps its huge pages and shares nothing with the child.
            owner: the name under which `regions()` lists it.

        Raises:
            MemoryLimitError: the machine or its cgroup does not have the memory. Nothing was taken.
        """
        self._core = _core.Region(nbytes, pin, on_fork, owner)

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return self._core.nbytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped: `nbytes` rounded up to the page."""
        return self._core.mapped_bytes

    @property
    def pinned(self) -> Literal["mlock", "cuda", False]:
        """How it is pinned."""
        return self._core.pinned

    @property
    def why_not(self) -> str | None:
        """Why it is not pinned better, where more was wished for."""
        return self._core.why_not

    @property
    def huge_bytes(self) -> int:
        """Bytes that lie on huge pages now. Asks the kernel, which takes milliseconds."""
        return self._core.huge_bytes

    @property
    def why_not_huge(self) -> str | None:
        """Why fewer bytes lie on huge pages than could; None where all do."""
        return self._core.why_not_huge

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._core.closed

    def close(self) -> None:
        """End new leases and every wait for one; unmap now, or with the last tensor. Twice is fine."""
        self._core.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"pinned={self.pinned!r}"
        return f"Region({self.nbytes} bytes, {state})"


class Lease(Closing):
    """A hold on bytes of an arena or a ring. It goes back when it and every tensor in it are gone."""

    __slots__ = ("_core",)

    def __init__(self, core: _core.Lease) -> None:
        self._core = core

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return self._core.nbytes

    def tensor(self, shape: int | tuple[int, ...] | list[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the leased bytes, without a copy; its contents are what was there before.

        The lease lives exactly as long as the last view of the tensor, whatever becomes of this object.

        Raises:
            ConfigError: the tensor does not fit.
            UsageError: the lease was returned.
        """
        import torch

        shape = _sizes(shape)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype must be a torch.dtype, not {dtype!r}")
        if str(dtype).startswith("torch.q"):
            # torch crashes on a quantized view of plain bytes.
            raise ConfigError(f"a lease cannot hold the quantized type {dtype}; take the integers underneath")
        elements = math.prod(shape)
        needed = elements * dtype.itemsize
        if needed > self.nbytes:
            raise ConfigError(
                f"a tensor of shape {shape} and {dtype} needs {needed} bytes; the lease holds {self.nbytes}"
            )
        buffer = self._core.buffer()
        if elements == 0:
            # torch makes no empty tensor of a buffer; it would hold nothing anyway.
            return torch.empty(shape, dtype=dtype, device="cpu")
        if torch.is_inference_mode_enabled():
            # A tensor that is made inside inference_mode could never be written outside of it.
            with torch.inference_mode(mode=False):
                tensor = torch.frombuffer(buffer, dtype=dtype, count=elements)
        else:
            tensor = torch.frombuffer(buffer, dtype=dtype, count=elements)
        if tensor.data_ptr() % dtype.itemsize:
            raise ConfigError(
                f"this slot is not aligned for {dtype}: plan its class as a multiple of {dtype.itemsize} bytes"
            )
        # In place, so that it is a tensor of its own and no view, as one that torch allocates.
        return tensor.resize_(shape)

    def release(self) -> None:
        """Return an unused lease at once.

        Raises:
            UsageError: a tensor still lives in it, or it was returned before.
        """
        self._core.release()

    def close(self) -> None:
        """As `release`, unless it was returned before."""
        if not self._core.returned:
            self.release()

    def __repr__(self) -> str:
        return f"Lease({self.nbytes} bytes{', returned' if self._core.returned else ''})"


def _sizes(shape: int | tuple[int, ...] | list[int]) -> tuple[int, ...]:
    try:
        sizes = (shape,) if isinstance(shape, int) else tuple(operator.index(size) for size in shape)
    except TypeError as error:
        raise ConfigError(f"a tensor's shape is an integer or a sequence of integers, not {shape!r}") from error
    if any(size < 0 for size in sizes):
        raise ConfigError(f"a tensor's sizes are 0 or more, not {sizes}")
    return sizes


class Arena:
    """A region divided into exact-size slots, planned once: leasing never allocates, fragments or surprises.

    A lease takes a slot of the smallest class that holds it and never one of a larger class, so leases that the plan
    admits are granted in every order.
    """

    __slots__ = ("_core",)

    def __init__(self, region: Region, classes: Mapping[int, int]) -> None:
        """Divide `region` into `classes`, given as {bytes: count}. A region belongs to one living arena.

        Raises:
            BudgetError: the region is too small; `smallest` is the region that works.
            UsageError: the region is closed or belongs to an arena that lives.
        """
        self._core = _core.Arena(region._core, dict(classes))  # noqa: SLF001

    def lease(self, nbytes: int, timeout: float | None = None, owner: str = "user") -> Lease:
        """Take `nbytes`, waiting up to `timeout` seconds (None: until there are). Ctrl-C ends the wait.

        Raises:
            ConfigError: no class is large enough: it could never be granted.
            TimeoutExpired: all slots stayed taken; the message says by whom.
            UsageError: the region was closed, also while waiting.
        """
        return Lease(self._core.lease(nbytes, timeout, owner))

    def free_slots(self, nbytes: int) -> int:
        """How many slots are free that `lease(nbytes)` may take: at 0 it would wait.

        Raises:
            ConfigError: no class is large enough.
        """
        return self._core.free_slots(nbytes)

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the slots that are taken now, "in_use" of `stats()`."""
        return self._core.in_use_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the arena's own records, "tables" of `stats()`."""
        return self._core.table_bytes

    def stats(self) -> dict[str, Any]:
        """What is held and was waited for.

        "capacity" (bytes planned), "reserved" (with alignment), "in_use" (of the slots taken), "bytes" (asked for by
        the living leases) and its "peak", "leases", "waits", "wait_seconds", "tables" (bytes of the arena's own
        records), "classes" (a list of "bytes", "count", "in_use", "peak") and "owners" (by name: "bytes", "peak",
        "leases", "waits", "wait_seconds").
        """
        return self._core.stats()


class ChunkRing(Closing):
    """Equal chunks for staging, handed between threads."""

    __slots__ = ("_core", "region")

    def __init__(self, chunk_bytes: int, count: int, pin: Literal["auto", "mlock", "cuda", False] = "auto") -> None:
        """Make `count` chunks of `chunk_bytes` in a region of their own, pinned as `Region` says.

        A forked child sees zeros in them: what is being staged is no business of a child's.
        """
        chunks = {chunk_bytes: count}
        self.region = Region(layout(chunks).reserved, pin, on_fork="wipe", owner="chunk ring")
        self._core = _core.ChunkRing(self.region._core, chunk_bytes, count)  # noqa: SLF001

    def lease(self, timeout: float | None = None, owner: str = "user") -> Lease:
        """Take a chunk; waiting and errors as `Arena.lease`."""
        return Lease(self._core.lease(timeout, owner))

    def stats(self) -> dict[str, Any]:
        """As `Arena.stats`."""
        return self._core.stats()

    def close(self) -> None:
        """Close the ring's region; see `Region.close`."""
        self.region.close()


def file_memory(descriptor: int, nbytes: int) -> torch.Tensor:
    """The first bytes of a file that is open for reading and writing, as memory; the descriptor may be closed then.

    What is written there goes to the file and leaves memory as the kernel likes. In a child that is forked off, it is
    the child's alone; what the parent writes later the child may read, unless it wrote to the same page before.
    """
    import torch

    with torch.inference_mode(mode=False):
        return torch.frombuffer(_core.FileMemory(descriptor, nbytes), dtype=torch.uint8)


def is_file_memory(address: int) -> bool:
    """Whether what `file_memory` made begins at this address."""
    return _core.is_file_memory(address)


class Layout:
    """What a plan takes: bytes asked for, and bytes reserved once every slot is aligned for I/O."""

    __slots__ = ("asked", "reserved")

    def __init__(self, asked: int, reserved: int) -> None:
        self.asked = asked
        self.reserved = reserved

    def __repr__(self) -> str:
        return f"Layout(asked={self.asked}, reserved={self.reserved})"


def ignore_captures() -> bool:
    """Let what this thread does from now on leave alone what other threads capture into CUDA graphs.

    Else a capture fails as soon as this one asks whether a copy is over. Whether that could be said to the driver;
    where the process has not loaded it, nobody captures.
    """
    return _core.ignore_captures()


def layout(classes: Mapping[int, int]) -> Layout:
    """What an arena of `classes` ({bytes: count}) takes: `Region(layout(classes).reserved)` fits it."""
    return Layout(*_core.memory_layout(dict(classes)))


def limits() -> dict[str, Any]:
    """The limits on this process's memory now, in bytes.

    "available" and what it is "limited_by"; "cgroup_limit" and "cgroup" (None without one); "memlock_soft" and
    "memlock_hard" (None: unlimited); the sizes of a "page" and a "huge_page" (None: switched off).
    """
    return _core.memory_limits()


def regions() -> list[dict[str, Any]]:
    """Every region that is mapped now: its "owner", "bytes" and how it is "pinned"."""
    return _core.memory_regions()


PAGE_BYTES = 4096


def whole_pages(nbytes: int) -> int:
    """So many bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class HostArena:
    """An arena of the planned classes, {bytes: count}; each slot that is added has a region of its own."""

    def __init__(self, classes: Mapping[int, int]) -> None:
        """Take the planned memory.

        Raises:
            MemoryLimitError: the machine or its cgroup does not have it.
        """
        self._bounds = sorted(classes)
        self._parts: list[tuple[Region, Arena]] = []
        self._planned = self._taken(classes)
        self._added: dict[int, list[Arena]] = {}
        # What the plan did not have.
        self.added_bytes = 0

    def _taken(self, classes: Mapping[int, int]) -> Arena:
        region = Region(layout(classes).reserved, pin=False, on_fork="wipe", owner="units")
        arena = Arena(region, classes)
        self._parts.append((region, arena))
        return arena

    def add(self, nbytes: int) -> int:
        """Take memory for one more lease of `nbytes`; how many bytes that took.

        Raises:
            MemoryLimitError: the machine or its cgroup does not have it.
        """
        bound = self._bound(nbytes)
        self._added.setdefault(bound, []).append(self._taken({bound: 1}))
        region, arena = self._parts[-1]
        nbytes = region.mapped_bytes + arena.table_bytes
        self.added_bytes += nbytes
        return nbytes

    @property
    def added(self) -> dict[int, int]:
        """The slots beyond the planned ones, {bytes: count}."""
        return {bound: len(arenas) for bound, arenas in self._added.items()}

    def _bound(self, nbytes: int) -> int:
        return self._bounds[bisect_left(self._bounds, nbytes)]

    def lease(self, nbytes: int, timeout: float | None = None, owner: str = "user") -> Lease:
        """As `memory.Arena.lease`; only for a planned slot is waited."""
        if not self._planned.free_slots(nbytes):
            for arena in self._added.get(self._bound(nbytes), ()):
                if arena.free_slots(nbytes):
                    return arena.lease(nbytes, 0.0, owner)
        return self._planned.lease(nbytes, timeout, owner)

    def free_slots(self, nbytes: int) -> int:
        """How many slots are free that `lease(nbytes)` may take."""
        planned = self._planned.free_slots(nbytes)
        return planned + sum(arena.free_slots(nbytes) for arena in self._added.get(self._bound(nbytes), ()))

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the slots that are taken now."""
        return sum(arena.in_use_bytes for _, arena in self._parts)

    @property
    def table_bytes(self) -> int:
        """Bytes of the arenas' own records."""
        return sum(arena.table_bytes for _, arena in self._parts)

    @property
    def held_bytes(self) -> int:
        """All memory that is held, 0 once it was closed."""
        return sum(region.mapped_bytes + arena.table_bytes for region, arena in self._parts if not region.closed)

    def close(self) -> None:
        """Let the memory go."""
        for region, _ in self._parts:
            region.close()
