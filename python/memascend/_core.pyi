"""Declares and documents the Rust extension `memascend._core`: what `memascend.memory` and its like hand on."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, final

import torch
from typing_extensions import Buffer, disjoint_base

from memascend.storage.engine import Adam, Momentum
from memascend.storage.records import Lent
from memascend.storage.store import Store as _Store
from memascend.tensors import Squares

__all__ = [
    "PENDING_SUFFIX",
    "Arena",
    "Checkers",
    "Checksum",
    "ChunkRing",
    "Engine",
    "Fetch",
    "FileMemory",
    "HostArena",
    "Layout",
    "Lease",
    "LeaseBuffer",
    "LentBuffer",
    "Region",
    "Store",
    "Ticket",
    "UnitParts",
    "Volume",
    "__version__",
    "begin_heap_backward",
    "checksum_of",
    "dlpack",
    "end_heap_step",
    "ignore_captures",
    "io_uring_why_not",
    "is_file_memory",
    "kernel_adam",
    "kernel_check",
    "kernel_scalars",
    "kernel_simd",
    "layout",
    "limits",
    "regions",
    "settle_heap",
    "state_decode",
    "state_update",
    "store_commits",
    "store_examine",
    "store_log_bytes",
    "store_places_bytes",
    "store_sizes",
    "store_state_in",
]

__version__: str
# What follows the name of a store's file until its first commit.
PENDING_SUFFIX: str

@final
class Region:
    """Page-aligned memory on huge pages, pinned as well as can be had, populated before use.

    Exactly `nbytes`, rounded up to the page and to nothing else. The memory goes back to the system when the region is
    closed and the last tensor in it is gone.
    """

    def __new__(
        cls,
        nbytes: int,
        pin: Literal["auto", "mlock", "cuda", False] = "auto",
        *,
        on_fork: Literal["copy", "wipe"] = "copy",
        owner: str = "region",
    ) -> Region:
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

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped: `nbytes` rounded up to the page."""

    @property
    def pinned(self) -> Literal["mlock", "cuda", False]:
        """How it is pinned."""

    @property
    def why_not(self) -> str | None:
        """Why it is not pinned better, where more was wished for."""

    @property
    def huge_bytes(self) -> int:
        """Bytes that lie on huge pages now. Asks the kernel, which takes milliseconds."""

    @property
    def why_not_huge(self) -> str | None:
        """Why fewer bytes lie on huge pages than could; None where all do."""

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""

    def close(self) -> None:
        """End new leases and every wait for one; unmap now, or with the last tensor. Twice is fine."""
    def __enter__(self) -> Region: ...
    def __exit__(self, *_raised: object) -> None: ...

@final
class Arena:
    """A region divided into exact-size slots, planned once: leasing never allocates, fragments or surprises.

    A lease takes a slot of the smallest class that holds it and never one of a larger class, so leases that the plan
    admits are granted in every order.
    """

    def __new__(cls, region: Region, classes: Mapping[int, int]) -> Arena:
        """Divide `region` into `classes`, given as {bytes: count}. A region belongs to one living arena.

        Raises:
            BudgetError: the region is too small; `smallest` is the region that works.
            UsageError: the region is closed or belongs to an arena that lives.
        """

    def lease(self, nbytes: int, timeout: float | None = None, owner: str = "user") -> Lease:
        """Take `nbytes`, waiting up to `timeout` seconds (None: until there are). Ctrl-C ends the wait.

        Raises:
            ConfigError: no class is large enough: it could never be granted.
            TimeoutExpired: all slots stayed taken; the message says by whom.
            UsageError: the region was closed, also while waiting.
        """

    def free_slots(self, nbytes: int) -> int:
        """How many slots are free that `lease(nbytes)` may take: at 0 it would wait.

        Raises:
            ConfigError: no class is large enough.
        """

    def stats(self) -> dict[str, Any]:
        """What is held and was waited for.

        "capacity" (bytes planned), "reserved" (with alignment), "in_use" (of the slots taken), "bytes" (asked for by
        the living leases) and its "peak", "leases", "waits", "wait_seconds", "tables" (bytes of the arena's own
        records), "classes" (a list of "bytes", "count", "in_use", "peak") and "owners" (by name: "bytes", "peak",
        "leases", "waits", "wait_seconds").
        """

@final
class HostArena:
    """An arena of the planned classes, {bytes: count}; each slot that is added has a region of its own."""

    def __new__(cls, classes: Mapping[int, int]) -> HostArena:
        """Take the planned memory.

        Raises:
            MemoryLimitError: the machine or its cgroup does not have it.
        """

    def add(self, nbytes: int) -> int:
        """Take memory for one more lease of `nbytes`; how many bytes that took.

        Raises:
            MemoryLimitError: the machine or its cgroup does not have it.
        """

    @property
    def added(self) -> dict[int, int]:
        """The slots beyond the planned ones, {bytes: count}."""

    @property
    def added_bytes(self) -> int:
        """The memory that they took: what the plan did not have."""

    def lease(self, nbytes: int, timeout: float | None = None, owner: str = "user") -> Lease:
        """As `Arena.lease`; only for a planned slot is waited."""

    def free_slots(self, nbytes: int) -> int:
        """How many slots are free that `lease(nbytes)` may take."""

    @property
    def held_bytes(self) -> int:
        """All memory that is held, 0 once it was closed."""

    def close(self) -> None:
        """Let the memory go."""

@final
class ChunkRing:
    """Equal chunks for staging, handed between threads."""

    def __new__(cls, chunk_bytes: int, count: int, pin: Literal["auto", "mlock", "cuda", False] = "auto") -> ChunkRing:
        """Make `count` chunks of `chunk_bytes` in a region of their own, pinned as `Region` says.

        A forked child sees zeros in them: what is being staged is no business of a child's.
        """

    def lease(self, timeout: float | None = None, owner: str = "user") -> Lease:
        """Take a chunk; waiting and errors as `Arena.lease`."""

    def stats(self) -> dict[str, Any]:
        """As `Arena.stats`."""

    def close(self) -> None:
        """Close the ring's region; see `Region.close`."""
    def __enter__(self) -> ChunkRing: ...
    def __exit__(self, *_raised: object) -> None: ...
    @property
    def region(self) -> Region:
        """The region that the chunks lie in."""

@final
class FileMemory:
    """The bytes of a file as a writable buffer, as long as this object lives; see `memascend.memory.file_memory`."""

    def __new__(cls, descriptor: int, nbytes: int) -> FileMemory: ...
    # The buffer protocol has been visible from Python since 3.12.
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Lease:
    """A hold on bytes of an arena or a ring. It goes back when it and every tensor in it are gone."""

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""

    def tensor(self, shape: int | tuple[int, ...] | list[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the leased bytes, without a copy; its contents are what was there before.

        The lease lives exactly as long as the last view of the tensor, whatever becomes of this object.

        Raises:
            ConfigError: the tensor does not fit.
            UsageError: the lease was returned.
        """

    def release(self) -> None:
        """Return an unused lease at once.

        Raises:
            UsageError: a tensor still lives in it, or it was returned before.
        """

    def close(self) -> None:
        """As `release`, unless it was returned before."""
    def __enter__(self) -> Lease: ...
    def __exit__(self, *_raised: object) -> None: ...
    @property
    def returned(self) -> bool:
        """Whether it was returned."""

    def buffer(self) -> LeaseBuffer:
        """The leased bytes as a writable buffer, which holds the lease as a tensor does."""

@final
class LeaseBuffer:
    # The buffer protocol has been visible from Python since 3.12.
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Layout:
    """What a plan takes: bytes asked for, and bytes reserved once every slot is aligned for I/O."""

    @property
    def asked(self) -> int:
        """Bytes asked for."""

    @property
    def reserved(self) -> int:
        """Bytes that a region needs for it."""

def ignore_captures() -> bool:
    """Let what this thread does from now on leave alone what other threads capture into CUDA graphs.

    Else a capture fails as soon as this one asks whether a copy is over. Whether that could be said to the driver;
    where the process has not loaded it, nobody captures.
    """

def is_file_memory(address: int) -> bool:
    """Whether what `file_memory` made begins at this address."""

def layout(classes: Mapping[int, int]) -> Layout:
    """What an arena of `classes` ({bytes: count}) takes: `Region(layout(classes).reserved)` fits it."""

def limits() -> dict[str, Any]:
    """The limits on this process's memory now, in bytes.

    "available" and what it is "limited_by"; "cgroup_limit" and "cgroup" (None without one); "memlock_soft" and
    "memlock_hard" (None: unlimited); the sizes of a "page" and a "huge_page" (None: switched off).
    """

def regions() -> list[dict[str, Any]]:
    """Every region that is mapped now: its "owner", "bytes" and how it is "pinned"."""

def settle_heap() -> None:
    """Map large allocations from now on, in this process, and occupy the holes of the C library's heap.

    `MEMASCEND_MALLOC=system` in the environment leaves the heap alone; with glibc's own variables, it is only trimmed.
    """

def begin_heap_backward() -> None:
    """Before each backward: the first one's step is measured from here on."""

def end_heap_step(backwards: int, model_bytes: int) -> None:
    """After a step of so many backwards: give free heap back, or keep it for good once the batch was large."""

@final
class Volume:
    """One address space over one or several devices; `open()` makes it. Any thread may use it.

    Operations on different bytes never disturb each other, also inside one block of the device. Of operations on the
    same bytes, wait for one before beginning the next. Closing, dropping and the end of the interpreter wait for what
    is in flight.
    """

    def read(self, into: torch.Tensor | Buffer, offset: int) -> Ticket:
        """Begin to fill `into`, a contiguous CPU tensor or a writable buffer, with the bytes from `offset` on.

        Offset, length and address that are multiples of `alignment` go straight; others are right, and are copied.

        Raises:
            ConfigError: the range does not lie in the volume, or the memory cannot be read into.
        """

    def write(self, data: torch.Tensor | Buffer, offset: int) -> Ticket:
        """Begin to write `data`, a contiguous CPU tensor or a buffer, to `offset`.

        Done means that the device has the bytes; `flush()` makes them survive a loss of power.

        Raises:
            ConfigError: the range does not lie in the volume, or the memory cannot be written from.
        """

    def flush(self, timeout: float | None = None) -> None:
        """Make every write that was begun before survive a loss of power, on every device. Waits for them first.

        Raises:
            StorageError: a device failed to. It stays so: every later flush fails too, because the system has dropped
                what it could not write. Or a write failed whose ticket was dropped; that is raised once.
            TimeoutExpired: it was not done in time; it goes on.
        """

    def close(self) -> None:
        """Wait for what is in flight, then let go of the devices. Twice is fine. Does not flush.

        Raises:
            StorageError: a write failed whose ticket was dropped. The volume is closed all the same.
        """

    @property
    def closed(self) -> bool:
        """Whether it was closed."""

    @property
    def size(self) -> int:
        """Bytes that it holds."""

    @property
    def alignment(self) -> int:
        """What offset, length and address must be multiples of to go straight to the device; 1: all do."""

    @property
    def backend(self) -> str:
        """Who carries the requests: "io_uring" or "threads"."""

    @property
    def why_not(self) -> str | None:
        """Why the backend is no better; None where it is the best or was asked for."""

    @property
    def direct(self) -> bool:
        """Whether every device bypasses the page cache; `devices()` says why one does not."""

    @property
    def queue_depth(self) -> int:
        """Requests of at most 1 MiB that the kernel has at once, for each device."""

    def devices(self) -> list[dict[str, Any]]:
        """Its devices: "path", "kind" ("file" or "raw"), "bytes", "why_buffered" (None where it is direct)."""

    def stats(self) -> dict[str, Any]:
        """What it has done since it was opened.

        "read" and "written" (each "bytes", "operations", "requests"), "flushes", "failed" operations, transfers that
        were "continued" after stopping short, requests "retried", "bounced_bytes" (copied because they were not
        aligned), operations "in_flight".
        """
    def __enter__(self) -> Volume: ...
    def __exit__(self, *_raised: object) -> None: ...
    def __new__(
        cls,
        paths: Sequence[str],
        size: int | None,
        queue_depth: int | None,
        stripe: int | None,
        backend: str,
    ) -> Volume: ...
    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of its devices, as they were given."""

@final
class Ticket:
    """One operation in flight. Dropping it cancels nothing: the operation goes on and its memory lives until the end.

    If a write fails after its ticket was dropped, the next `Volume.flush()` or `Volume.close()` raises its error, once.
    """

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, without the GIL; Ctrl-C ends the wait, not the operation.

        Args:
            timeout: seconds; None waits for ever.

        Returns:
            The bytes moved, which is all of them. Waiting again says the same again.

        Raises:
            StorageError: the device failed it.
            TimeoutExpired: it was not done in time; it goes on.
        """

    def done(self) -> bool:
        """Whether it has ended, well or not; `wait()` then returns or raises at once."""

def dlpack(address: int, nbytes: int, kind: int, index: int, owner: object) -> object: ...
def io_uring_why_not() -> str | None:
    """Why there is no io_uring for this process; None where there is."""

# A tensor of a description: name, dtype, shape.
_Tensor: TypeAlias = tuple[str, str, list[int]]
# A record: whether it is a buffer, its unit, its values, its state, the order of its dimensions, the dtype of spills.
_Described: TypeAlias = tuple[bool, int, _Tensor, list[_Tensor], list[int], str | None, str | None, int | None]
_Run: TypeAlias = tuple[bytes, int, bytes, int, int]
# lr, betas, eps, weight decay, decoupled, step, gradient scale, maximize, seed; of momentum: lr, (momentum, dampening),
# None, weight decay, nesterov, and so on.
_Numbers: TypeAlias = tuple[float, tuple[float, float], float | None, float, bool, int, float, bool, int]

@disjoint_base
class Store:
    """Makes or opens a store of training state; `memascend.engine.Store` adds what reads and writes tensors."""

    def __new__(
        cls,
        paths: Sequence[str],
        records: Sequence[_Described] | None,
        units: Sequence[str],
        optimizer: str,
        chunk_elements: int,
        existing: str,
        durability: str,
    ) -> Self: ...
    @property
    def created(self) -> bool:
        """Whether it was made now."""

    @property
    def step(self) -> int:
        """Committed steps."""

    def difference_of(
        self, records: Sequence[_Described], units: Sequence[str], optimizer: str, chunk_elements: int
    ) -> str | None: ...
    def go_back(self) -> None:
        """Give the newest commit up for good, where the one before it was opened without that."""

    def info(self) -> dict[str, Any]:
        """Identity, last commit, sizes in bytes: "uuid", "generation", "step", "optimizer", "units", "devices", more.

        Of a store of several ranks also "run", "common" and "identity": the run's id, the commit's number and what
        tells it from that of another continuation, the same on all ranks; and "rank" of "ranks".
        """

    def index(self, name: str) -> int:
        """The number of a record."""

    def record(self, name: str) -> dict[str, Any]:
        """One of them."""

    def record_at(self, index: int) -> dict[str, Any]:
        """The same by its number."""

    def count(self) -> int:
        """How many records there are."""

    def read_at(self, record: int, tensors: Sequence[tuple[int, int]]) -> int: ...
    def scan_at(
        self, records: list[int], visit: Callable[[int, list[tuple[int, int, LentBuffer]]], object]
    ) -> None: ...
    def hold(self, names: Sequence[str], *, registered: bool = False) -> None:
        """Hold records in memory from now on; what was in RAM before is not any more. Nothing is read before `refresh`.

        It takes "record_bytes" of `sizes` for each, until the store is closed: `registered`, in memory that a device
        copies from, where that can be had.

        Raises:
            ConfigError: there is no such record.
            MemoryLimitError: the machine or its cgroup does not have the memory; nothing is in RAM.
        """

    def refresh(self, names: Sequence[str], progress: Callable[[int, int], object] | None = None) -> None:
        """Read what is in RAM of some records where it is not in memory; `progress(done, all)` hears of bytes.

        Raises:
            CorruptionError: what is on storage is not what was written.
        """

    def keep_log(self, names: Sequence[str], steps: int) -> int:
        """Log the gradients of records in RAM from now on, instead of writing them each step; how many steps find room.

        Each of these records is then written whole once in so many steps. Files grow by what the log lacks; with less
        room there are fewer steps, and 0 means that there is none. The records have `spill`, gradients of that dtype,
        and updates of the engine's own kernels.

        Raises:
            UsageError: with durability "none" a store keeps no log.
        """

    def keep_places(self, names: Sequence[str]) -> bool:
        """Make room in which updates of these records are left to the next step (`Engine.defer`); whether there is any.

        Each record that may spill gets a second place for its gradient. Files grow by that, and by what heads of the
        log take. To be called once, before `keep_log` and after `Engine.replay`.
        """

    def write_applied(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Write what only memory and the log have of the RAM tier, as a part of the last step: the log ends with it."""

    def give_up(self) -> None:
        """Give up what only memory has, where it has something: the store stays unclosed, which opening it says."""

    def ram_tier_unit(self, unit: str) -> torch.Tensor | None:
        """The values of a unit where they are in RAM, as the last commit left them; None where not all of it is in RAM.

        Each record is at its "unit_offset" of the bytes. An update changes them where they lie.
        """

    @property
    def ram_tier_epoch(self) -> int:
        """While it stays the same, what `ram_tier_unit` gave is what the last commit left."""

    def spoil(self, name: str) -> None:
        """Say that somebody wrote to the values of a record in RAM: `refresh` reads them again."""

    def counters(self) -> dict[str, Any]:
        """Since it was opened: "fetches", "fetched_bytes", "ram_tier_bytes", "wait_seconds" in `Fetch.wait`, all I/O.

        "ram_tier_bytes" were taken from the RAM tier, and not read from storage. "read_bytes" and "written_bytes" count
        every transfer of the volume, those of fetches and updates too.
        """

    def commit_as(
        self,
        step: int,
        user: str | None,
        hyperparameters: str | None,
        run: _Run | None,
        agree: Callable[[], object] | None,
    ) -> int: ...
    def compare(self, records: Sequence[int]) -> None:
        """Have `digest` be of what is staged of these records, by their numbers. Only the first call counts."""

    def digest(self) -> int:
        """A number that is the same in stores of the same records, if the same bytes of those compared are staged."""

    def end(self) -> None:
        """Have nothing written any more, by `close()` either: what is committed stays as it is."""

    def check_log(self) -> None:
        """Check what `Engine.replay` reads, which does it too: where others have to know it before any of them writes.

        Raises:
            CorruptionError: a gradient of the log, or the state that it is applied to, is not what was written.
        """

    def verify(self, progress: Callable[[int, int], object] | None = None) -> tuple[int, int]:
        """Read and check everything that is live: extents and bytes. `progress(done, all)` hears of bytes.

        Raises:
            CorruptionError: the first extent that is not.
        """

    def damaged(self) -> list[str]:
        """Damaged copies of labels and description, in words; the first commit after an open repairs them."""

    def forsake(self) -> None:
        """Have what was made for it, where there was nothing, removed by `close()`, before anybody else can have it."""

    def become_temporary(self) -> None:
        """Note that its file is removed on purpose: a new store takes no name, and its file is not reported as lost."""

    def lost_file(self) -> tuple[Path, str] | None: ...
    def close(self) -> None:
        """Keep what was committed, drop what is only staged, and let go of the devices. Twice is fine."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_raised: object) -> None: ...

@final
class Checksum:
    """XXH3-64 of bytes that come one after the other, as `xxhsum -H3` gives it."""

    def __new__(cls) -> Checksum: ...
    def update(self, tensor: torch.Tensor) -> None:
        """Take the bytes of a contiguous CPU tensor."""

def checksum_of(tensor: torch.Tensor) -> str:
    """The checksum of the bytes of one contiguous CPU tensor, which may have none."""

@final
class Fetch:
    """A unit, or a part of one, on its way into memory: `Engine.fetch` and `UnitParts.begin` make it.

    Any thread may use it.

    Until the device is done with it the slots that it reads are not written: the step after the next commit waits for
    that. Dropping it waits for the device.
    """

    def wait(self) -> None:
        """Wait for the device, without the GIL, and check every byte. Ctrl-C ends the wait, not the read.

        Waiting again says the same again.

        Raises:
            StorageError: the device failed.
            CorruptionError: what is on storage is not what was written; the message names record and chunk.
        """

    def done(self) -> bool:
        """Whether the device is done with it, well or not. Never waits."""

@final
class UnitParts:
    """A unit that is read part by part; `Engine.parts` makes it. All parts are of one commit.

    Until each was read once, or it and every read of it are gone, the slots that it reads are not written: the step
    after the next commit waits for that.
    """

    def places(self) -> list[tuple[int, int]]:
        """Where each part begins in the unit, and its bytes."""

    def begin(self, index: int, into: torch.Tensor) -> Fetch:
        """Begin to read a part into a contiguous uint8 CPU tensor of its size, before all other I/O that waits.

        The tensor is held until the end. What comes back has `wait()`, which checks every byte and raises as
        `Fetch.wait` does, and `done()`; dropping it waits for the device.
        """

@final
class Checkers:
    """Threads that check parts of units as they come, so that nobody computes checksums who has copies to begin.

    They end when this and every part that they check are gone.
    """

    def __new__(cls, threads: int) -> Checkers:
        """As many threads, or as many as can be had; with none, whoever waits for a part checks it."""

    @property
    def threads(self) -> int:
        """Threads that there are."""

def store_commits(paths: Sequence[str]) -> tuple[list[tuple[int, _Run, bool]], str | None] | None: ...
def store_examine(paths: Sequence[str], progress: Callable[[int, int], object] | None) -> list[dict[str, Any]]: ...
def store_state_in(
    of_values: str, shape: list[int], of_state: str, momentum: bool
) -> list[tuple[str, str, list[int]]]: ...
def store_log_bytes(
    records: list[Any], units: list[str], chunk_elements: int, logged: list[int], steps: int
) -> int: ...
def store_places_bytes(records: list[Any], units: list[str], chunk_elements: int, deferred: list[int]) -> int: ...
def store_sizes(
    records: Sequence[_Described],
    units: Sequence[str],
    optimizer: str,
    chunk_elements: int,
    devices: int,
) -> tuple[int, int, int, int, int, int, list[int], list[tuple[int, int]]]: ...

# Address and bytes of a tensor, and what keeps them valid.
_RamTier: TypeAlias = tuple[int, int, object]
# Values, gradient, state, start, count, last.
_Adapter: TypeAlias = Callable[[LentBuffer, LentBuffer | None, list[LentBuffer], int, int, bool], None]

@final
class LentBuffer:
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@disjoint_base
class Engine:
    """The pipelined update: state is read, computed and written in chunks, beside whatever else runs."""

    def __new__(
        cls,
        store: Store,
        *,
        chunks: int = 12,
        queue: int = 268435456,
        whole: int = 0,
        whole_next: int = 0,
        threads: int = 1,
    ) -> Self:
        """Start one on a store.

        Args:
            store: what it updates.
            chunks: staging chunks (2 to 64). Twelve keep a disk as busy as I/O alone does; four reach 0.8 of it.
            queue: bytes of gradients that may wait; a larger one is let in alone.
            whole: bytes for a record in one piece, for `apply(whole=True)`.
            whole_next: bytes for a second one, which is read or written while a function computes on the other; at most
                as many. A record that does not fit waits for the memory of the first, as all do without.
            threads: that the updates of records in RAM run on at the end of a step.
        """

    @property
    def store(self) -> _Store:
        """What it updates."""

    def replay(self, progress: Callable[[int, int], object] | None = None) -> bool:
        """End the log that a store has which was not closed: apply its gradients, and write and commit their records.

        Before anything else is done with the store. It is the state of its last step then, as it was in memory, and
        interrupting it leaves the store as it was.

        Args:
            progress: called with bytes of gradients done and of all; what it raises ends the work.

        Returns:
            Whether there was a log.

        Raises:
            CorruptionError: a gradient of the log, or the state that it is applied to, is not what was written.
            ConfigError: another version wrote the log, with arithmetic that is not known here.
        """

    def fill_at(
        self,
        record: int,
        values: _RamTier,
        state: list[_RamTier | None],
        wide: tuple[_RamTier | None, _RamTier | None, _RamTier | None],
        step: int,
    ) -> None: ...
    def update(
        self,
        name: str,
        gradient: torch.Tensor | Lent,
        numbers: Adam | Momentum,
        *,
        values: torch.Tensor | None = None,
        spills: bool = False,
    ) -> None:
        """Begin the update of a parameter, and return when its gradient has room in the queue.

        The gradient is held until it was used, and must not change meanwhile.

        `values` may be given where the parameter is resident, as the last commit left it: where the update starts from
        them (float32 or compact), they are then not read. They are held like the gradient and checked like what is
        read; nothing writes to them.

        With `spills` the gradient is written as it is used, as by `spill`; `take_back` then discards the update and
        leaves the gradient, for another one.

        Raises:
            ConfigError: the gradient, the values or a number do not fit; or with `spills` the record is in RAM, or was
                described without `spill`; nothing was begun.
            UsageError: the values of an update of this step were not those of the last commit; the step can only be
                discarded.
            StorageError: an update of this step failed; the step can only be discarded.
        """

    def spill(self, name: str, gradient: torch.Tensor | Lent, *, add: bool = False) -> None:
        """Queue a gradient to wait on storage; with `add`, add it to the one that is there, with the bits of `add_`.

        Returns when the gradient has room in the queue. It is held until it was used, and must not change meanwhile.
        What is spilled is no part of a step: commits leave it, and it is forgotten when the store is closed.
        A job of this kind that fails or is discarded leaves nothing there.

        Raises:
            ConfigError: the record was described without `spill`, or the gradient has another dtype or shape.
            UsageError: nothing is there to add to.
            StorageError: a job of this step failed; the step can only be discarded.
        """

    def spilled(self, name: str) -> tuple[bool, Squares]:
        """Of the spilled gradient: whether a non-finite is in it, and the sum of its squares, not rounded.

        Waits for what is queued of the record; both were computed as the gradient was written.

        Raises:
            UsageError: nothing is spilled of it.
        """

    def read_spilled(self, name: str, into: torch.Tensor) -> None:
        """Read the spilled gradient into a tensor of its shape and dtype, after what is queued of the record.

        Raises:
            UsageError: nothing is spilled of it.
            CorruptionError: what is on storage is not what was written; the step can only be discarded.
        """

    def update_spilled(
        self, name: str, numbers: Adam | Momentum, *, factors: Sequence[float] = (), values: torch.Tensor | None = None
    ) -> None:
        """As `update`, by the gradient that is spilled, which stays there.

        Args:
            name: of which parameter.
            numbers: as in `update`.
            factors: the gradient is multiplied by each in turn first, with the bits of torch's `mul_`.
            values: as in `update`.

        Raises:
            UsageError: nothing is spilled of it.
        """

    def drop_spilled(self, name: str) -> None:
        """Forget the spilled gradient, after what is queued of the record. Fine where there is none."""

    def apply_at(
        self,
        name: str,
        adapter: _Adapter,
        gradient: torch.Tensor | Lent | None,
        step: int,
        values: torch.Tensor | None,
        how: tuple[bool, bool, bool],
    ) -> None: ...
    def defer(self, name: str, numbers: Adam | Momentum, *, factors: Sequence[float] = ()) -> bool:
        """Leave the update by the spilled gradient, multiplied by each of `factors`, to the next step.

        The commit names the gradient, which makes the step durable. What the slot lacks is written before the next
        commit (`settle_later`, `fetch`), and by whoever reads more of the record than `fetch` gives.

        Returns:
            False where it has to be made now: the record is in RAM, or has no second place (`Store.keep_places`).
        """

    def settle_later(self, name: str) -> None:
        """Queue what the last commit left of a record's update, if it was not made yet."""

    @property
    def is_behind(self) -> bool:
        """Whether the last commit left updates: before one of these records is staged, `catch_up()` is called."""

    def catch_up(self) -> bool:
        """Make the updates that the last commit left, and commit them as a part of its step; whether there were any.

        Raises:
            UsageError: something of another step is staged.
        """

    def fetch(self, unit: str, into: torch.Tensor, *, settle: bool = False) -> Fetch:
        """Begin to fetch the values of a unit, as the last commit left them, before all other work that waits.

        They go `into` a contiguous uint8 CPU tensor of as many bytes as `sizes` says, which begins on a page. Each
        record is at its "unit_offset". It is held until the end, and must not be touched before. Updates that the last
        commit left (`defer`) are computed on the way; with `settle` they are written, too.

        Raises:
            ConfigError: there is no such unit, or the memory does not fit.
            StorageError: the device refused; or the store is closed (UsageError).
        """

    def parts(self, unit: str, bytes_max: int, checkers: Checkers | None = None, *, settle: bool = False) -> UnitParts:
        """The same in parts of at most so many bytes; reads nothing yet.

        `checkers` check them as they come; without, whoever waits for one does.

        Raises:
            ConfigError: there is no such unit, or an extent of it is larger than a part may be.
        """

    def finish(self) -> None:
        """Wait until every update is staged."""

    def drain(self) -> None:
        """As `finish`, but for updates of records in RAM, which begin with that or with `commit()`."""

    def commit_as(
        self,
        step: int,
        user: str | None,
        hyperparameters: str | None,
        run: _Run | None,
        agree: Callable[[], object] | None,
    ) -> int: ...
    def discard(self, name: str | None = None) -> None:
        """Drop what waits, drain what is in flight, forget what was staged: all of it, or of one record alone.

        A step that failed is over when all of it was discarded, and not before.
        """

    def take_back(self, name: str) -> None:
        """Forget what was staged of a record once it has ended: unlike after `discard`, what it spilled is there."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that it holds, beside the gradients in its queue."""

    @property
    def queued_bytes(self) -> int:
        """Bytes of gradients that wait or are being used now, "queued" of `counters()`."""

    def counters(self) -> dict[str, Any]:
        """Jobs and chunks, bytes by kind, bytes "queued" and the most of them, and "seconds" by what its thread did."""

    def close(self) -> None:
        """Drain what is in flight and end its thread; what was not committed is lost. Twice is fine."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_raised: object) -> None: ...

# An address and the place of its dtype in memascend.kernels.arguments.FLOATS.
_TypedAddress: TypeAlias = tuple[int, int]
# The fields of memascend.kernels.scalars.Scalars, in order.
_Scalars: TypeAlias = tuple[float, float, float, float, bool, float, float, float, float, float]

def kernel_simd() -> str: ...
def kernel_scalars(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: int,
    grad_scale: float,
    maximize: bool,
) -> _Scalars: ...
def kernel_check(grads: list[tuple[int, int, int]], inv_scale: float, threads: int) -> tuple[bool, Squares]: ...
def kernel_adam(
    master: int,
    grad: _TypedAddress,
    exp_avg: int,
    exp_avg_sq: int,
    out16: _TypedAddress | None,
    numel: int,
    scalars: _Scalars,
    threads: int,
) -> None: ...
def state_decode(
    of_state: str,
    of_values: str,
    momentum: bool,
    values: int,
    state: list[int],
    wide: list[int | None],
    numel: int,
    threads: int,
) -> None: ...
def state_update(
    of_state: str,
    of_values: str,
    momentum: bool,
    values: int,
    state: list[int],
    grad: _TypedAddress,
    numbers: _Numbers,
    name: str,
    first: int,
    numel: int,
    threads: int,
) -> None: ...
