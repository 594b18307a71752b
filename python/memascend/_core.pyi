"""Declares and documents the Rust extension `memascend._core`: what `memascend.memory` and its like hand on."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import torch
from typing_extensions import Buffer

__all__ = [
    "Arena",
    "Checkers",
    "Checksum",
    "ChunkRing",
    "Engine",
    "Fetch",
    "FileMemory",
    "Heap",
    "Layout",
    "Lease",
    "LeaseBuffer",
    "LentBuffer",
    "PartFetch",
    "Parts",
    "Region",
    "Store",
    "Ticket",
    "Volume",
    "__version__",
    "dlpack",
    "ignore_captures",
    "io_uring_why_not",
    "kernel_accumulate",
    "kernel_adam",
    "kernel_cast",
    "kernel_check",
    "kernel_join_master",
    "kernel_scalars",
    "kernel_simd",
    "kernel_split_master",
    "layout",
    "limits",
    "regions",
    "state_convert",
    "state_update",
    "store_commits",
    "store_examine",
    "store_log_bytes",
    "store_look",
    "store_sizes",
    "store_state_in",
]

__version__: str

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

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the slots that are taken now, "in_use" of `stats()`."""

    @property
    def table_bytes(self) -> int:
        """Bytes of the arena's own records, "tables" of `stats()`."""

    def stats(self) -> dict[str, Any]:
        """What is held and was waited for.

        "capacity" (bytes planned), "reserved" (with alignment), "in_use" (of the slots taken), "bytes" (asked for by
        the living leases) and its "peak", "leases", "waits", "wait_seconds", "tables" (bytes of the arena's own
        records), "classes" (a list of "bytes", "count", "in_use", "peak") and "owners" (by name: "bytes", "peak",
        "leases", "waits", "wait_seconds").
        """

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
    """The bytes of a file as a writable buffer, for as long as this object lives; see `memascend.memory.file_memory`."""

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
class Heap:
    """The C library's heap while a model is trained: it maps allocations from 1 MiB on, and gives back what is free.

    glibc raises that threshold by itself, and its heap grows with the depth of a model then. A model that was made in
    the heap leaves holes, which gradients would fill one after another: they are taken, and free again after `close()`.
    `MEMASCEND_MALLOC=system` in the environment leaves the heap alone; glibc's own variables, by which somebody chose,
    leave their thresholds and the holes.
    """

    def take_holes(self) -> None:
        """Give back what is free, and take the holes: large memory was freed that does not come again."""

    def trim(self) -> None:
        """Give back to the system what is free."""

    def close(self) -> None:
        """Make the holes free for anybody."""

    def __new__(cls) -> Heap: ...
    def __enter__(self) -> Heap: ...
    def __exit__(self, *_raised: object) -> None: ...

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

def layout(classes: Mapping[int, int]) -> Layout:
    """What an arena of `classes` ({bytes: count}) takes: `Region(layout(classes).reserved)` fits it."""

def limits() -> dict[str, Any]:
    """The limits on this process's memory now, in bytes.

    "available" and what it is "limited_by"; "cgroup_limit" and "cgroup" (None without one); "memlock_soft" and
    "memlock_hard" (None: unlimited); the sizes of a "page" and a "huge_page" (None: switched off).
    """

def regions() -> list[dict[str, Any]]:
    """Every region that is mapped now: its "owner", "bytes" and how it is "pinned"."""

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
# An entry: whether it is a buffer, its unit, its values, its state, the order of its dimensions, the dtype of spills.
_Described: TypeAlias = tuple[bool, int, _Tensor, list[_Tensor], list[int], str | None, str | None, int | None]
_Run: TypeAlias = tuple[bytes, int, bytes, int, int]
# lr, betas, eps, weight decay, decoupled, step, gradient scale, maximize, seed; of momentum: lr, (momentum, dampening),
# None, weight decay, nesterov, and so on.
_Numbers: TypeAlias = tuple[float, tuple[float, float], float | None, float, bool, int, float, bool, int]

@final
class Store:
    def __new__(
        cls,
        paths: Sequence[str],
        entries: Sequence[_Described] | None,
        units: Sequence[str],
        optimizer: str,
        chunk_elements: int,
        existing: str,
        durability: str,
        stripe: int | None,
        backend: str,
    ) -> Store: ...
    @property
    def created(self) -> bool: ...
    def difference(
        self, entries: Sequence[_Described], units: Sequence[str], optimizer: str, chunk_elements: int
    ) -> str | None: ...
    def go_back(self) -> None: ...
    def info(self) -> dict[str, Any]: ...
    def count(self) -> int: ...
    def entry(self, index: int) -> dict[str, Any]: ...
    def stage(self, entry: int, step: int, tensors: Sequence[tuple[int, int]]) -> None: ...
    def read(self, entry: int, tensors: Sequence[tuple[int, int]]) -> int: ...
    def scan(self, entries: list[int], visit: Callable[[int, list[tuple[int, int, LentBuffer]]], object]) -> None: ...
    def hold(self, entries: list[int], registered: bool) -> None: ...
    def refresh(self, entries: list[int], progress: Callable[[int, int], object] | None) -> None: ...
    def keep_log(self, entries: list[int], steps: int) -> int: ...
    def write_applied(self, progress: Callable[[int, int], object] | None) -> None: ...
    def give_up(self) -> None: ...
    def held_unit(self, unit: int) -> LentBuffer | None: ...
    @property
    def held_epoch(self) -> int: ...
    def spoil(self, entry: int) -> None: ...
    def fetch(self, unit: int, address: int, nbytes: int, keep: object) -> Fetch: ...
    def counters(self) -> dict[str, Any]: ...
    def commit(
        self,
        step: int,
        user: str | None,
        hyperparameters: str | None,
        run: _Run | None,
        agree: Callable[[], object] | None,
    ) -> int: ...
    def set_first_elements(self, firsts: Sequence[int]) -> None: ...
    def end(self) -> None: ...
    def discard(self, entry: int | None = None) -> None: ...
    def lost(self) -> tuple[Path, str] | None: ...
    def forsake(self) -> None: ...
    def trace(self, path: str) -> None: ...
    def trace_end(self) -> None: ...
    def check_log(self) -> None: ...
    def verify(self, progress: Callable[[int, int], object] | None) -> tuple[int, int]: ...
    def damaged(self) -> list[str]: ...
    def close(self) -> None: ...

@final
class Checksum:
    def __new__(cls) -> Checksum: ...
    def update(self, address: int, nbytes: int) -> None: ...
    def value(self) -> int: ...

@final
class Fetch:
    def wait(self) -> int: ...
    def done(self) -> bool: ...

@final
class Parts:
    def __new__(cls, store: Store, unit: int, bytes_max: int) -> Parts: ...
    def places(self) -> list[tuple[int, int]]: ...
    def begin(self, index: int, address: int, nbytes: int, keep: object, checkers: Checkers | None) -> PartFetch: ...

@final
class Checkers:
    def __new__(cls, threads: int) -> Checkers: ...
    @property
    def threads(self) -> int: ...

@final
class PartFetch:
    def wait(self) -> None: ...
    def done(self) -> bool: ...

def store_commits(paths: Sequence[str], backend: str) -> tuple[list[tuple[int, _Run, bool]], str | None] | None: ...
def store_examine(
    paths: Sequence[str], backend: str, progress: Callable[[int, int], object] | None
) -> list[dict[str, Any]]: ...
def store_look(paths: Sequence[str], backend: str) -> Store: ...
def store_state_in(
    of_values: str, shape: list[int], of_state: str, momentum: bool
) -> list[tuple[str, str, list[int]]]: ...
def store_log_bytes(
    entries: list[Any], units: list[str], chunk_elements: int, logged: list[int], steps: int
) -> int: ...
def store_sizes(
    entries: Sequence[_Described],
    units: Sequence[str],
    optimizer: str,
    chunk_elements: int,
    devices: int,
    stripe: int | None,
) -> tuple[int, int, int, int, int, int, list[int], list[tuple[int, int]]]: ...

# Address and bytes of a tensor, and what keeps them valid.
_Held: TypeAlias = tuple[int, int, object]
# Values, gradient, state, start, count, last.
_Adapter: TypeAlias = Callable[[LentBuffer, LentBuffer | None, list[LentBuffer], int, int, bool], None]

@final
class LentBuffer:
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Engine:
    def __new__(cls, store: Store, chunks: int, queue_bytes: int, whole_bytes: int, threads: int) -> Engine: ...
    def replay(self, progress: Callable[[int, int], object] | None) -> bool: ...
    def update(
        self, entry: int, gradient: _Held, of_gradient: str, values: _Held | None, numbers: _Numbers
    ) -> None: ...
    def update_spilling(
        self, entry: int, gradient: _Held, of_gradient: str, values: _Held | None, numbers: _Numbers
    ) -> None: ...
    def update_spilled(self, entry: int, factors: list[float], values: _Held | None, numbers: _Numbers) -> None: ...
    def spill(self, entry: int, gradient: _Held, of_gradient: str, add: bool) -> None: ...
    def spilled(self, entry: int) -> tuple[bool, _Summed]: ...
    def read_spilled(self, entry: int, into: _Held) -> None: ...
    def drop_spilled(self, entry: int) -> None: ...
    def apply(
        self, entry: int, adapter: _Adapter, nbytes: int, step: int, spilled: bool, how: tuple[bool, bool, bool]
    ) -> None: ...
    def fill(
        self,
        entry: int,
        values: _Held,
        state: list[_Held | None],
        wide: tuple[_Held | None, _Held | None, _Held | None],
        step: int,
    ) -> None: ...
    def probe(self, nbytes: int, seconds: float) -> tuple[int, float]: ...
    def finish(self) -> None: ...
    def settle(self) -> None: ...
    def commit(
        self,
        step: int,
        user: str | None,
        hyperparameters: str | None,
        run: _Run | None,
        agree: Callable[[], object] | None,
    ) -> int: ...
    def take_back(self, entry: int) -> None: ...
    def discard(self, entry: int | None) -> None: ...
    @property
    def staging_bytes(self) -> int: ...
    @property
    def queued_bytes(self) -> int: ...
    @property
    def waiting_bytes(self) -> int: ...
    def counters(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

# An address and the place of its dtype in memascend.kernels.arguments.FLOATS.
_Place: TypeAlias = tuple[int, int]
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

# Of a sum of squares: whole units, and the nearest float.
_Summed: TypeAlias = tuple[bytes | None, float]

def kernel_check(grads: list[tuple[int, int, int]], inv_scale: float, threads: int) -> tuple[bool, _Summed]: ...
def kernel_adam(
    master: int,
    grad: _Place,
    exp_avg: int,
    exp_avg_sq: int,
    out16: _Place | None,
    numel: int,
    scalars: _Scalars,
    threads: int,
) -> None: ...
def kernel_cast(source: _Place, out: _Place, numel: int, threads: int) -> None: ...
def kernel_accumulate(grad: _Place, total: _Place, numel: int, threads: int) -> None: ...
def kernel_split_master(master: int, values: int, rest: int, exp_avg_sq: int, numel: int, threads: int) -> None: ...
def kernel_join_master(values: int, rest: int, exp_avg_sq: int, master: int, numel: int, threads: int) -> None: ...
def state_convert(
    of_state: str,
    of_values: str,
    momentum: bool,
    values: int,
    state: list[int],
    wide: list[int | None],
    back: bool,
    numel: int,
    threads: int,
) -> None: ...
def state_update(
    of_state: str,
    of_values: str,
    momentum: bool,
    values: int,
    state: list[int],
    grad: _Place,
    numbers: _Numbers,
    name: str,
    first: int,
    numel: int,
    threads: int,
) -> None: ...
