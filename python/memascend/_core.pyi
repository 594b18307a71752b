"""Declares and documents the Rust extension `memascend._core`; `memascend.memory` and others re-export its classes."""

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
# The suffix of a store's file name until its first commit.
PENDING_SUFFIX: str

@final
class Region:
    """Page-aligned memory on huge pages, pinned as well as the system allows, populated before use.

    The region has `nbytes` bytes, rounded up to whole pages. The memory returns to the system once the region is closed
    and the last tensor in it is gone.
    """

    def __new__(
        cls,
        nbytes: int,
        pin: Literal["auto", "mlock", "cuda", False] = "auto",
        *,
        on_fork: Literal["copy", "wipe"] = "copy",
        owner: str = "region",
    ) -> Region:
        """Maps the memory.

        Args:
            nbytes: bytes to map.
            pin: "auto" pins as well as the system allows. `pinned` then tells how the memory is pinned, and `why_not`
                tells why the memory is not registered with CUDA. "mlock" and "cuda" pin in exactly the named way; if
                that is impossible, a ConfigError gives the reason and the remedy. False pins nothing.
            on_fork: what a forked child sees in the memory. "copy": a copy of the contents, as with ordinary memory.
                "wipe": zeros; this process then keeps its huge pages and shares none of the memory with the child.
            owner: the name under which `regions()` lists the region.

        Raises:
            MemoryLimitError: the machine or its cgroup does not have the memory. Nothing was mapped.
        """

    @property
    def nbytes(self) -> int:
        """The number of bytes that were requested."""

    @property
    def mapped_bytes(self) -> int:
        """The number of bytes that are mapped: `nbytes`, rounded up to whole pages."""

    @property
    def pinned(self) -> Literal["mlock", "cuda", False]:
        """How the memory is pinned."""

    @property
    def why_not(self) -> str | None:
        """The reason why `pin="auto"` did not register the memory with CUDA; None in all other cases."""

    @property
    def huge_bytes(self) -> int:
        """The number of bytes that are on huge pages now. Reading the property takes milliseconds."""

    @property
    def why_not_huge(self) -> str | None:
        """Why the system has no huge pages, or why the region has fewer huge pages than fit into it; else None."""

    @property
    def closed(self) -> bool:
        """True once `close()` was called."""

    def close(self) -> None:
        """Rejects new leases, and ends every wait for a lease. A second call does nothing.

        Unmaps the memory now, or once the last tensor in it is gone.
        """
    def __enter__(self) -> Region: ...
    def __exit__(self, *_raised: object) -> None: ...

@final
class Arena:
    """A region that is divided once, as planned, into slots of exact sizes.

    Leasing never allocates or fragments memory. A lease takes a slot of the smallest class that is large enough, and
    never a slot of a larger class. So the planned leases can be granted in any order.
    """

    def __new__(cls, region: Region, classes: Mapping[int, int]) -> Arena:
        """Divides `region` into `classes`, given as {bytes: count}. A region belongs to one arena at a time.

        Raises:
            BudgetError: the region is too small; `smallest` is the smallest size of a region that works.
            UsageError: the region is closed, or still belongs to another arena.
        """

    def lease(self, nbytes: int, timeout: float | None = None, owner: str = "user") -> Lease:
        """Takes a slot of `nbytes`; waits up to `timeout` seconds (None: without limit) until such a slot is free.

        Ctrl-C ends the wait.

        Raises:
            ConfigError: no class is large enough, so the lease could never be granted.
            TimeoutExpired: all slots stayed taken; the message names the owners that hold them.
            UsageError: the region was closed, before or during the wait.
        """

    def free_slots(self, nbytes: int) -> int:
        """Returns how many free slots `lease(nbytes)` may take; at 0 `lease` would wait.

        Raises:
            ConfigError: no class is large enough.
        """

    def stats(self) -> dict[str, Any]:
        """Returns the arena's counters.

        The keys are "capacity" (planned bytes), "reserved" (planned bytes with alignment), "in_use" (bytes of the taken
        slots), "bytes" (bytes that the present leases requested), "peak" (the largest value of "bytes" so far),
        "leases" (number of present leases), "waits" (number of leases that had to wait), "wait_seconds" (total time of
        these waits), "tables" (bytes of the arena's own tables), "classes" (for each class: "bytes", "count", "in_use",
        "peak") and "owners" (by name: "bytes", "peak", "leases", "waits", "wait_seconds").
        """

@final
class HostArena:
    """An arena of planned classes, {bytes: count}. Each slot that is added later has its own region."""

    def __new__(cls, classes: Mapping[int, int]) -> HostArena:
        """Allocates the planned slots.

        Raises:
            MemoryLimitError: the machine or its cgroup does not have the memory.
        """

    def add(self, nbytes: int) -> int:
        """Adds a slot for a lease of `nbytes`, and returns the bytes that it takes.

        Raises:
            MemoryLimitError: the machine or its cgroup does not have the memory.
        """

    @property
    def added(self) -> dict[int, int]:
        """The number of added slots, {bytes: count}."""

    @property
    def added_bytes(self) -> int:
        """The bytes that the added slots take beyond the plan."""

    def lease(self, nbytes: int, timeout: float | None = None, owner: str = "user") -> Lease:
        """Takes a slot as `Arena.lease` does: a planned slot if one is free, else an added slot.

        If neither is free, waits for a planned slot.
        """

    def free_slots(self, nbytes: int) -> int:
        """Returns how many free slots `lease(nbytes)` may take."""

    @property
    def held_bytes(self) -> int:
        """The bytes of all memory that the arena holds; 0 once it is closed."""

    def close(self) -> None:
        """Rejects new leases, and ends every wait for a lease.

        Each region returns to the system once its last lease is gone.
        """

@final
class ChunkRing:
    """Staging chunks of equal size, which threads pass to each other."""

    def __new__(cls, chunk_bytes: int, count: int, pin: Literal["auto", "mlock", "cuda", False] = "auto") -> ChunkRing:
        """Makes `count` chunks of `chunk_bytes` in the ring's own region, which is pinned as `Region` describes.

        A forked child sees zeros in the chunks, because staged data is not for the child.
        """

    def lease(self, timeout: float | None = None, owner: str = "user") -> Lease:
        """Takes a chunk; waits and raises as `Arena.lease` does."""

    def stats(self) -> dict[str, Any]:
        """Returns the counters, as `Arena.stats` does."""

    def close(self) -> None:
        """Closes the ring's region; see `Region.close`."""
    def __enter__(self) -> ChunkRing: ...
    def __exit__(self, *_raised: object) -> None: ...
    @property
    def region(self) -> Region:
        """The region of the chunks."""

@final
class FileMemory:
    """The bytes of a file as a writable buffer, valid while this object lives; see `memascend.memory.file_memory`."""

    def __new__(cls, descriptor: int, nbytes: int) -> FileMemory: ...
    # Python shows the buffer protocol as `__buffer__` since 3.12.
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Lease:
    """The right to use bytes of an arena or a ring.

    The slot is free again once the lease was released or deleted, and every tensor in it is gone.
    """

    @property
    def nbytes(self) -> int:
        """The number of bytes that were requested."""

    def tensor(self, shape: int | tuple[int, ...] | list[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor in the leased bytes, without a copy. Its values are the bytes that the slot contains now.

        The slot stays leased until the last view of the tensor is gone, even if this `Lease` is gone before.

        Raises:
            ConfigError: the tensor does not fit.
            UsageError: the lease was returned.
        """

    def release(self) -> None:
        """Returns the lease at once, if no tensor uses it.

        Raises:
            UsageError: a tensor in the leased bytes still exists, or the lease was returned before.
        """

    def close(self) -> None:
        """Returns the lease as `release` does, unless it was returned before."""
    def __enter__(self) -> Lease: ...
    def __exit__(self, *_raised: object) -> None: ...
    @property
    def returned(self) -> bool:
        """True once the lease was returned."""

    def buffer(self) -> LeaseBuffer:
        """Returns the leased bytes as a writable buffer, which keeps the lease alive as a tensor does."""

@final
class LeaseBuffer:
    # Python shows the buffer protocol as `__buffer__` since 3.12.
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Layout:
    """The memory that an arena's classes take, without and with the bytes that align its slots.

    The slots of a class are aligned for direct I/O only if this adds at most 1 % to their bytes. Other classes get a
    smaller alignment.
    """

    @property
    def asked(self) -> int:
        """The number of bytes that were requested."""

    @property
    def reserved(self) -> int:
        """The number of bytes with the alignment.

        An arena also fits into a smaller region, down to `asked` bytes, with smaller alignments.
        """

def ignore_captures() -> bool:
    """Makes CUDA calls of this thread safe while other threads capture CUDA graphs.

    In CUDA's default capture mode, a capture in another thread fails if this thread queries whether a copy has ended.
    This function changes the capture mode of this thread. It returns False if the mode could not be changed, for
    example because the process has not loaded the CUDA driver; without the driver, no thread captures a graph.
    """

def is_file_memory(address: int) -> bool:
    """True if memory of `file_memory` begins at this address."""

def layout(classes: Mapping[int, int]) -> Layout:
    """Returns the memory that an arena of `classes` ({bytes: count}) takes.

    `Region(layout(classes).reserved)` fits such an arena.
    """

def limits() -> dict[str, Any]:
    """Returns the limits on this process's memory now, in bytes.

    The dict has "available" and the limit that determines it ("limited_by"); "cgroup_limit" and "cgroup" (both None
    if no cgroup limits the memory); "memlock_soft" and "memlock_hard" (None: unlimited); "page" and "huge_page", the
    sizes of a page and of a huge page ("huge_page" is None if huge pages are switched off).
    """

def regions() -> list[dict[str, Any]]:
    """Returns every region that is mapped now: its "owner", "bytes" and how it is "pinned"."""

def settle_heap() -> None:
    """Makes the C library serve large allocations by mmap, until `end_heap_step` makes the heap keep freed memory.

    The function also occupies the holes of the C library's heap, and returns free heap memory to the system. With
    `MEMASCEND_MALLOC=system` in the environment, the function does nothing. If the environment sets glibc's own
    variables, the function only returns free heap memory to the system.
    """

def begin_heap_backward() -> None:
    """Marks the start of a backward; call this function before each backward.

    The first call after `settle_heap` notes how many bytes the process has touched. The next `end_heap_step` counts
    only bytes touched later.
    """

def end_heap_step(backwards: int, model_bytes: int) -> None:
    """Ends a step that ran `backwards` backward passes.

    The function returns free heap memory to the system. But if a backward pass touched far more than `model_bytes` on
    average, and enough memory is available, the heap keeps freed memory from now on. The environment variables that
    limit `settle_heap` limit this function in the same way.
    """

@final
class Volume:
    """One address space over one or several devices; `memascend.nvme.open()` makes it. Any thread may use it.

    Operations on different bytes never disturb each other, even inside one block of the device. Wait for an operation
    before you begin another one on the same bytes. `close()`, dropping the volume, and the end of the interpreter wait
    for operations in flight.
    """

    def read(self, into: torch.Tensor | Buffer, offset: int) -> Ticket:
        """Begins to fill `into`, a contiguous CPU tensor or a writable buffer, with the bytes from `offset` on.

        If offset, length and address are multiples of `alignment`, memascend copies no bytes; otherwise it copies at
        least some of the bytes.

        Raises:
            ConfigError: the range exceeds the volume, or the memory cannot be read into.
        """

    def write(self, data: torch.Tensor | Buffer, offset: int) -> Ticket:
        """Begins to write `data`, a contiguous CPU tensor or a buffer, to `offset`.

        Once the write is done, the device has the bytes; `flush()` makes them survive a loss of power.

        Raises:
            ConfigError: the range exceeds the volume, or the memory cannot be written from.
        """

    def flush(self, timeout: float | None = None) -> None:
        """Waits for all writes that have begun, and makes them survive a loss of power, on every device.

        Raises:
            StorageError: a device failed to flush. Every later flush fails, too, because the system has dropped data
                that it could not write. `flush` also raises a StorageError, once, if a write failed after its ticket
                was dropped.
            TimeoutExpired: the flush did not end in time; it continues.
        """

    def close(self) -> None:
        """Waits for operations in flight, then closes the devices. A second call does nothing. Does not flush.

        Raises:
            StorageError: a write failed after its ticket was dropped. The volume is closed nevertheless.
        """

    @property
    def closed(self) -> bool:
        """True once `close()` has closed the devices, and in a forked child.

        False after an interrupted `close()`; call `close()` again.
        """

    @property
    def size(self) -> int:
        """The size of the address space in bytes."""

    @property
    def alignment(self) -> int:
        """A transfer copies its bytes unless its offset, length and address are multiples of this number.

        If the number is 1, no transfer copies bytes.
        """

    @property
    def backend(self) -> str:
        """The backend that submits the requests: "io_uring" or "threads"."""

    @property
    def why_not(self) -> str | None:
        """The reason why `backend` is "threads" although the caller allowed io_uring; None in all other cases."""

    @property
    def direct(self) -> bool:
        """True if every device bypasses the page cache; `devices()` gives the reason if a device does not."""

    @property
    def queue_depth(self) -> int:
        """The number of requests per device, as in `memascend.nvme.open()`.

        n devices share at most n times this number at once: one device may get more requests while another gets fewer.
        A request has at most 1 MiB. The backend "threads" has at most 4 requests at once, or 8 for several devices.
        """

    def devices(self) -> list[dict[str, Any]]:
        """Returns for each device: "path", "kind" ("file" or "raw"), "bytes", "why_buffered" (None if direct)."""

    def stats(self) -> dict[str, Any]:
        """Returns the counts since the volume was opened.

        The keys are "read" and "written" (each with "bytes", "operations" and "requests"), "flushes", "failed" (failed
        operations), "continued" (continuations of transfers that the system ended early), "retried" (repeated
        requests), "bounced_bytes" (bytes that were copied because they were not aligned), and "in_flight" (operations
        that have not ended).
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
        """The paths of the devices, as they were given."""

@final
class Ticket:
    """An operation in flight.

    Dropping the ticket does not cancel the operation: the operation continues to its end, and keeps its memory alive
    until then. If a write fails after its ticket was dropped, the next `Volume.flush()` or `Volume.close()` raises the
    error of the write, once.
    """

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the operation, without the GIL; Ctrl-C ends the wait, not the operation.

        Args:
            timeout: seconds; None waits for ever.

        Returns:
            The number of bytes moved, which is the whole length. A second call returns the same number.

        Raises:
            StorageError: the device failed the operation.
            TimeoutExpired: the operation did not end in time; it continues.
        """

    def done(self) -> bool:
        """True once the operation has ended, successfully or not; `wait()` then returns or raises at once."""

def dlpack(address: int, nbytes: int, kind: int, index: int, owner: object) -> object: ...
def io_uring_why_not() -> str | None:
    """Returns why this process cannot use io_uring; None if it can."""

# The description of a tensor: name, dtype, shape.
_Tensor: TypeAlias = tuple[str, str, list[int]]
# The description of a record: whether it is a buffer, the index of its unit, its values, its state, the order of its
# dimensions, the dtype of its spilled gradients, the format of its state. The last item is an index if the record has
# only some rows of a parameter: the index of the record's first element in the whole parameter.
_Described: TypeAlias = tuple[bool, int, _Tensor, list[_Tensor], list[int], str | None, str | None, int | None]
# The description of a commit of several ranks: the run's id, the number and the identity of the commit, the number of
# this rank, the number of ranks.
_Run: TypeAlias = tuple[bytes, int, bytes, int, int]
# The numbers of one update. Adam: lr, betas, eps, weight decay, decoupled, step, gradient scale, maximize, seed.
# Momentum: lr, (momentum, dampening), None, weight decay, nesterov, step, gradient scale, maximize, seed.
_Numbers: TypeAlias = tuple[float, tuple[float, float], float | None, float, bool, int, float, bool, int]

@disjoint_base
class Store:
    """Creates or opens a store of training state; `memascend.engine.Store` reads and writes tensors with it."""

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
        """True if this object created the store."""

    @property
    def step(self) -> int:
        """The number of committed steps."""

    def difference_of(
        self, records: Sequence[_Described], units: Sequence[str], optimizer: str, chunk_elements: int
    ) -> str | None: ...
    def go_back(self) -> None:
        """Drops the newest commit for good, if the store was opened with `existing="previous"`."""

    def info(self) -> dict[str, Any]:
        """Returns the store's identity, last commit and sizes in bytes.

        The dict has "uuid", "generation", "step", "optimizer", "units", "devices" and more.

        A store of several ranks also has "run" (the run's id), "common" (the commit's number), "identity" (an id of the
        commit, which differs between commits of the same number if the run was continued twice from an earlier commit),
        "rank" and "ranks". All of these except "rank" are equal on all ranks.
        """

    def index(self, name: str) -> int:
        """Returns the number of the record with this name."""

    def record(self, name: str) -> dict[str, Any]:
        """Returns a record as a dict. `memascend.engine.Store.records` describes the keys."""

    def record_at(self, index: int) -> dict[str, Any]:
        """Returns the dict of `record` for a record's number."""

    def count(self) -> int:
        """Returns the number of records."""

    def read_at(self, record: int, tensors: Sequence[tuple[int, int]]) -> int: ...
    def scan_at(
        self, records: list[int], visit: Callable[[int, list[tuple[int, int, LentBuffer]]], object]
    ) -> None: ...
    def hold(self, names: Sequence[str], *, registered: bool = False) -> None:
        """Keeps these records, and no other records, in RAM from now on. Only `refresh` reads the records into RAM.

        Each record takes the memory that `Sizes.record_bytes` gives, until the store is closed. With `registered`, the
        memory is registered with CUDA for copies, if that is possible.

        Raises:
            ConfigError: the store has no such record.
            MemoryLimitError: the machine or its cgroup does not have the memory; no record is in RAM.
        """

    def refresh(self, names: Sequence[str], progress: Callable[[int, int], object] | None = None) -> None:
        """Reads stale or missing values and state of these records into RAM. Calls `progress(done, all)` with bytes.

        Raises:
            CorruptionError: the bytes on storage differ from the bytes that were written.
        """

    def keep_log(self, names: Sequence[str], steps: int) -> int:
        """Logs the gradients of records in RAM from now on, instead of writing the records in each step.

        Each record that is logged is then written whole once every `steps` steps. If the files have too little space
        for the log, they grow. The description of each record must have `spill`, the dtype of its gradients, and the
        engine's own kernels must update it.

        Returns:
            How many steps the log holds: at most `steps`, fewer if space is short, 0 if there is no space.

        Raises:
            UsageError: the store has durability "none", with which a store cannot have a log.
        """

    def keep_places(self, names: Sequence[str]) -> bool:
        """Makes room on storage, so that updates of these records can be deferred (`Engine.defer`).

        Each record that may spill gets a second place for its gradient. The files grow by these second places, and by
        some space for the log. Call this method once, before `keep_log` and after `Engine.replay`.

        Returns:
            False if `names` is empty, there is no space, the log is not empty, or second places exist already. Nothing
            was changed then.
        """

    def write_applied(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Writes each record in RAM whose newest values and state are not yet on storage.

        The writes become a part of the last committed step. Afterwards the gradient log is empty, because it had the
        gradients of these records only.
        """

    def give_up(self) -> None:
        """Gives up state that only memory has, if there is such state.

        Afterwards nothing can be committed. The store counts as unclosed, and the next opening reports this.
        """

    def ram_tier_unit(self, unit: str) -> torch.Tensor | None:
        """Returns the values of a unit in RAM, as the last commit left them; None unless the whole unit is in RAM.

        Each record begins at its "unit_offset". An update changes the bytes in place.
        """

    @property
    def ram_tier_epoch(self) -> int:
        """A count that changes when values in RAM become stale.

        While the count stays the same, the memory of `ram_tier_unit` has the values of the last commit.
        """

    def spoil(self, name: str) -> None:
        """Marks the values of a record in RAM as overwritten: `refresh` reads them again."""

    def counters(self) -> dict[str, Any]:
        """Returns counts since the store was opened.

        "fetches" (units whose read began), "fetched_bytes" (bytes of units that were read from storage),
        "ram_tier_bytes" (bytes that were taken from the RAM tier instead of storage), "wait_seconds" (time in
        `Fetch.wait`), and "read_bytes" and "written_bytes" of all transfers of the volume, fetches and updates
        included.
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
        """Selects the records, by number, that `digest` covers. Only the first call has an effect."""

    def digest(self) -> int:
        """Returns a digest of the staged bytes and deferred updates of the records that `compare` selected.

        Two stores of the same records have the same digest if these bytes and updates are equal. The digest leaves out
        the bytes of snapshots, and includes deferred updates only while a commit is in progress.
        """

    def end(self) -> None:
        """Ends all writing: from now on nothing, not even `close()`, changes the committed state on storage."""

    def check_log(self) -> None:
        """Verifies the data that `Engine.replay` reads.

        `replay` does this itself; call `check_log` if all ranks must know the result before any rank writes.

        Raises:
            CorruptionError: a gradient of the log, or the state that the gradient updates, is damaged: the bytes on
                storage differ from the bytes that were written.
        """

    def verify(self, progress: Callable[[int, int], object] | None = None) -> tuple[int, int]:
        """Reads and verifies all live extents; returns their number and bytes. Calls `progress(done, all)` with bytes.

        Raises:
            CorruptionError: an extent is damaged; the message names the first damaged extent.
        """

    def damaged(self) -> list[str]:
        """Returns a text for each damaged copy of a label or of the description.

        The first commit after an open repairs these copies.
        """

    def forsake(self) -> None:
        """Makes `close()` remove the files that were created for the store.

        `close()` removes the files while they are still locked, so that no other process can open them.
        """

    def become_temporary(self) -> None:
        """Makes the store accept that the caller removes the store's file.

        A new store then does not give the file its final name, and `lost_file` does not report the file.
        """

    def lost_file(self) -> tuple[Path, str] | None: ...
    def close(self) -> None:
        """Keeps committed state, drops staged state, and closes the devices. A second call does nothing."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_raised: object) -> None: ...

@final
class Checksum:
    """XXH3-64 of consecutive bytes; `str()` formats it as `xxhsum -H3` does."""

    def __new__(cls) -> Checksum: ...
    def update(self, tensor: torch.Tensor) -> None:
        """Adds the bytes of a contiguous CPU tensor."""

def checksum_of(tensor: torch.Tensor) -> str:
    """Returns the checksum of the bytes of a contiguous CPU tensor, which may be empty."""

@final
class Fetch:
    """A read of a unit, or of a part of a unit, into memory; `Engine.fetch` and `UnitParts.begin` make it.

    Any thread may use this object. The store does not write to the slots that are being read until the device has ended
    the read. If necessary, the step after the next commit waits until the read has ended. Dropping this object waits
    for the device, too.
    """

    def wait(self) -> None:
        """Waits, without the GIL, until the read has ended and every byte is verified.

        Ctrl-C ends the wait, not the read. A second call has the same result.

        Raises:
            StorageError: the device failed.
            CorruptionError: the bytes on storage differ from the bytes that were written; the message names record and
                chunk.
        """

    def done(self) -> bool:
        """True once the device has ended the read, all values are computed, and `Checkers` have verified their bytes.

        Also True if one of these failed. May be False while another thread is in `wait`. Never waits.
        """

@final
class UnitParts:
    """A unit that is read part by part; `Engine.parts` makes it. All parts are of one commit.

    If a later commit has overwritten values that are not read yet, `begin` or `Fetch.wait` raises an error.

    The store does not write to the slots that the parts read until each part was read once, or until this object and
    all its reads are gone. If necessary, the step after the next commit waits until then.
    """

    def places(self) -> list[tuple[int, int]]:
        """Returns for each part its first byte in the unit, and its number of bytes."""

    def begin(self, index: int, into: torch.Tensor) -> Fetch:
        """Begins to read a part, ahead of all waiting I/O. `into` is a contiguous uint8 CPU tensor of the part's size.

        The tensor stays alive until the read has ended.
        """

@final
class Checkers:
    """Threads that verify the checksums of parts of units when the parts arrive.

    Then the thread that copies the parts to a device need not compute checksums.

    When this object is deleted, the threads verify all queued parts, and then end.
    """

    def __new__(cls, threads: int) -> Checkers:
        """Starts `threads` threads, or fewer if the system allows fewer. Without threads, `Fetch.wait` verifies."""

    @property
    def threads(self) -> int:
        """The number of threads."""

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

# The address of a tensor, its number of bytes, and an object that keeps the memory valid.
_RamTier: TypeAlias = tuple[int, int, object]
# The arguments of an adapter: values, gradient, state, start, count, last.
_Adapter: TypeAlias = Callable[[LentBuffer, LentBuffer | None, list[LentBuffer], int, int, bool], None]

@final
class LentBuffer:
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@disjoint_base
class Engine:
    """Updates the state of a store in a pipeline: reads, computes and writes the state in chunks.

    The caller's threads continue meanwhile.
    """

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
        """Starts an engine on a store.

        Args:
            store: the store to update.
            chunks: number of staging chunks (2 to 64). Twelve chunks keep a disk about as busy as pure I/O does; four
                chunks reach only 0.8 of the speed of pure I/O.
            queue: bytes of gradients that the queue holds; a larger gradient waits until the queue is empty.
            whole: bytes of memory for one whole record, for `apply(whole=True)`.
            whole_next: bytes of memory for a second whole record, which the engine reads or writes while a function
                computes on the first; at most `whole`. A larger record waits until the first record's memory is free;
                with 0, every record waits.
            threads: threads that update records in RAM after a commit.
        """

    @property
    def store(self) -> _Store:
        """The store that the engine updates."""

    def replay(self, progress: Callable[[int, int], object] | None = None) -> bool:
        """Replays the log with which the store was opened: applies its gradients, and commits the results.

        Call this before anything else is done with the store. Afterwards the store has the state of its last step. An
        interrupted replay leaves the store as it was.

        Args:
            progress: called as `progress(done, all)` with bytes of gradients; an exception of `progress` ends the
                replay.

        Returns:
            False if the store had no log.

        Raises:
            CorruptionError: a gradient of the log, or the state that the gradient updates, is damaged: the bytes on
                storage differ from the bytes that were written.
            ConfigError: another version wrote the log, with arithmetic that this version does not know.
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
        """Queues the update of a parameter, and returns once the queue has room for its gradient.

        The engine holds the gradient until the update has used it; do not change the gradient meanwhile.

        `values` are the parameter's values in memory, as the last commit left them. If the update needs the parameter's
        values (because they are float32, or the master is compact), the update uses `values` instead of reading
        storage, and verifies the checksums of `values`. The engine holds `values` as long as the gradient, and does not
        write to them.

        With `spills` the update also spills the gradient, as `spill` does; `take_back` then discards the update and
        leaves the gradient for another update.

        Raises:
            ConfigError: the gradient, the values or a number do not fit; or with `spills`, the record is in RAM or was
                described without `spill`. Nothing was queued.
            UsageError: the values of an update of this step were not those of the last commit; the step can only be
                discarded.
            StorageError: an update of this step failed; the step can only be discarded.
        """

    def spill(self, name: str, gradient: torch.Tensor | Lent, *, add: bool = False) -> None:
        """Queues a job that spills a gradient to storage.

        With `add`, the job adds the gradient to the spilled gradient, bit-identically to torch's `add_`. Returns once
        the queue has room for the gradient. The engine holds the gradient until the job ends; do not change the
        gradient meanwhile. A spilled gradient is not part of a step: a commit does not change it, and closing the store
        drops it. A spill that fails or is discarded leaves no spilled gradient.

        Raises:
            ConfigError: the record was described without `spill`, or the gradient's dtype or shape differs from the
                record's.
            UsageError: with `add`, no gradient is spilled.
            StorageError: a job of this step failed; the step can only be discarded.
        """

    def spilled(self, name: str) -> tuple[bool, Squares]:
        """Returns whether the spilled gradient has a non-finite element, and the exact sum of the gradient's squares.

        Waits for the record's queued jobs, unless the gradient is in memory. The spill computed both results as it
        wrote the gradient.

        Raises:
            UsageError: no gradient of the record is spilled.
        """

    def read_spilled(self, name: str, into: torch.Tensor) -> None:
        """Reads the spilled gradient into `into`, which has the shape and dtype of the gradient.

        If the gradient is not in memory, first waits for the record's queued jobs.

        Raises:
            UsageError: no gradient of the record is spilled.
            CorruptionError: the bytes on storage differ from the bytes that were written; the step can only be
                discarded.
        """

    def update_spilled(
        self, name: str, numbers: Adam | Momentum, *, factors: Sequence[float] = (), values: torch.Tensor | None = None
    ) -> None:
        """Queues an update like `update`, but with the spilled gradient. The spilled gradient does not change.

        Args:
            name: the parameter.
            numbers: as in `update`.
            factors: numbers by which the gradient is multiplied, one after the other, before the update,
                bit-identically to torch's `mul_`.
            values: as in `update`.

        Raises:
            UsageError: no gradient of the record is spilled.
        """

    def drop_spilled(self, name: str) -> None:
        """Drops the record's spilled gradient, if it has one, after the record's queued jobs."""

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
        """Defers an update to the next step. The update uses the spilled gradient, multiplied by each of `factors`.

        The commit of this step refers to the gradient, so this step is durable without the update. `settle_later`, or a
        `fetch` with `settle`, writes the update. The engine writes the update earlier if a reader needs more of the
        record than `fetch` gives, and at the latest before the next commit.

        Returns:
            False if the update cannot be deferred and has to be made now: the record is in RAM, or has no second place
            (`Store.keep_places`).
        """

    def settle_later(self, name: str) -> None:
        """Queues a job that writes the record's deferred update; does nothing if the update is written already."""

    @property
    def is_behind(self) -> bool:
        """True if deferred updates are not written yet.

        A record with a deferred update can be staged only after `catch_up()`.
        """

    def catch_up(self) -> bool:
        """Makes the updates that the last commit deferred, and commits them as a part of the last step.

        Returns:
            False if the last commit deferred no update.

        Raises:
            UsageError: a change of another step is staged.
        """

    def fetch(self, unit: str, into: torch.Tensor, *, settle: bool = False) -> Fetch:
        """Begins to fetch the values of a unit, as the last commit left them.

        The fetch goes before all waiting work that is not urgent. `into` is a contiguous uint8 CPU tensor of
        `Sizes.unit_bytes` bytes that begins at a page boundary. Each record begins at its "unit_offset". The tensor
        stays alive until the fetch has ended; do not use the tensor before. The fetch applies updates that the last
        commit deferred (`defer`) to the values in `into`; with `settle`, it also writes these updates to storage.

        Raises:
            ConfigError: the store has no such unit, or the memory does not fit.
            StorageError: the device failed.
            UsageError: the store is closed.
        """

    def parts(self, unit: str, bytes_max: int, checkers: Checkers | None = None, *, settle: bool = False) -> UnitParts:
        """Returns an object that fetches a unit in parts of at most `bytes_max` bytes. Reads nothing yet.

        The threads of `checkers` verify the parts as they arrive; without `checkers`, `Fetch.wait` does.

        Raises:
            ConfigError: the store has no such unit, or an extent of the unit exceeds `bytes_max`.
        """

    def finish(self) -> None:
        """Waits until every update is staged."""

    def drain(self) -> None:
        """Waits until the queue is empty.

        Unlike `finish` and `commit()`, `drain` does not start updates of records in RAM.
        """

    def commit_as(
        self,
        step: int,
        user: str | None,
        hyperparameters: str | None,
        run: _Run | None,
        agree: Callable[[], object] | None,
    ) -> int: ...
    def discard(self, name: str | None = None) -> None:
        """Drops queued jobs, except urgent jobs such as those of fetches; waits for all others; drops the staged step.

        With `name`, it does so only for jobs and changes of that record. After a failure, only `discard()` without
        `name` makes the engine accept jobs again.
        """

    def take_back(self, name: str) -> None:
        """Waits for a record's jobs, then drops its staged update.

        Unlike `discard`, `take_back` keeps a gradient that these jobs spilled.
        """

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that the engine holds, except gradients in its queue."""

    @property
    def queued_bytes(self) -> int:
        """Bytes of gradients in queued and running jobs, as "queued" of `counters()`."""

    def counters(self) -> dict[str, Any]:
        """Returns counts of jobs and chunks, bytes by kind, "queued" bytes and their peak, "seconds" by activity."""

    def close(self) -> None:
        """Waits for running jobs, ends the engine's thread, drops uncommitted updates.

        A call by a function that the engine runs does not wait. A second call does nothing, nor does a call in a
        forked child.
        """
    def __enter__(self) -> Self: ...
    def __exit__(self, *_raised: object) -> None: ...

# An address, and the index of its dtype in memascend.kernels.arguments.FLOATS.
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
