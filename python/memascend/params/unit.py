"""Tracks one unit in memory: its parameters, where its bytes are, copies of them, and writes unseen by torch."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memascend.errors import ConfigError, StorageError
from memascend.memory import file_memory
from memascend.storage import checksum_of
from memascend.tensors import bytes_of, memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from memascend.memory import Arena
    from memascend.params.offloaded_param import Place


# The holder of units that are bound for all threads; no thread has this number.
NOBODY = 0


class UnitRead(Protocol):
    """A read of a unit that was begun."""

    def wait(self) -> int:
        """Wait for it, and check it."""


class Bytes(Enum):
    """Where the bytes of a unit are."""

    # On storage. A view may keep the last bytes in memory alive: `Home.adopt` finds them.
    AWAY = auto()
    # Being read into memory of the arena.
    READING = auto()
    # In memory of the arena.
    CACHED = auto()
    # In memory for the whole run, where the engine updates them: the model computes with them where they lie.
    IN_PLACE = auto()
    # The same, but for values that are not on storage: in a file, as all that user code reached.
    COPIED = auto()

    # As in `grads.gradient.State`: asked for many times in a step.
    __hash__ = object.__hash__


Move = Literal["read", "arrive", "adopt", "stand", "copy", "leave"]
_MOVES: dict[Move, dict[Bytes, Bytes]] = {
    "read": {Bytes.AWAY: Bytes.READING},
    "arrive": {Bytes.READING: Bytes.CACHED},
    "adopt": {Bytes.AWAY: Bytes.CACHED},
    "stand": {Bytes.AWAY: Bytes.IN_PLACE},
    "copy": {Bytes.AWAY: Bytes.COPIED},
    "leave": dict.fromkeys(Bytes, Bytes.AWAY),
}


class Home:
    """One unit at run time: its parameters, where its bytes are now, and which threads have bound it.

    Only its methods write its attributes, each of which is one of `_MOVES`, a change of its values or a use. In each
    the state comes last: an interrupt in it leaves the unit as it was, to be brought again.

    Attributes:
        held: its values are in memory for the whole run, so that it has no place in the arena.
        places: its parameters.
        state: where its bytes are.
        base: the bytes in memory; None while they are on storage or being read.
        read: the read that is under way; None in other states.
        weak: the storage that was leased last, which views that others hold may keep alive, and the version there.
        version: counts the values that it had.
        trained: a step has changed its values, so the next one will.
        holders: the threads that have bound it, with how often; `bound` is the sum.
    """

    __slots__ = (
        "_address",
        "_epoch",
        "_file",
        "_into",
        "_views",
        "base",
        "bound",
        "held",
        "holders",
        "index",
        "name",
        "nbytes",
        "pinned",
        "places",
        "read",
        "slot_bytes",
        "state",
        "trained",
        "version",
        "weak",
    )

    def __init__(
        self,
        index: int,
        name: str,
        nbytes: int,
        slot_bytes: int,
        *,
        pinned: bool,
        held: bool = False,
        places: Sequence[Place] = (),
    ) -> None:
        """`slot_bytes` is the size of the arena's places that it may have."""
        self.index = index
        self.name = name
        self.nbytes = nbytes
        self.slot_bytes = slot_bytes
        self.pinned = pinned
        self.held = held
        self.places = places
        self.state = Bytes.AWAY
        self.base: torch.Tensor | None = None
        self.read: UnitRead | None = None
        # What `read` fills, and the values of the parameters in `base`.
        self._into: torch.Tensor | None = None
        self._views: list[torch.Tensor] | None = None
        self.weak: tuple[StorageWeakRef, int] | None = None
        # Where it is held, and of which epoch of the store it was taken; and the file that it was copied to.
        self._address = 0
        self._epoch = -1
        self._file: StorageWeakRef | None = None
        self.version = 0
        self.trained = False
        self.bound = 0
        self.holders: dict[int, int] = {}

    def _move(self, move: Move) -> None:
        after = _MOVES[move].get(self.state)
        assert after is not None, f"{move!r} of unit {self.name!r}, which is {self.state.name}"
        self.state = after

    # --- its bytes ---------------------------------------------------------------------

    def begin_read(self, read: UnitRead, into: torch.Tensor) -> None:
        """Note that the bytes are being read into leased memory."""
        self.weak = None
        self.read, self._into = read, into
        self._move("read")

    def arrive(self, overrides: Mapping[str, torch.Tensor]) -> None:
        """Wait for the read, which verifies it; then `overrides`, values that are not stored, replace parts of it."""
        into = self._into
        assert self.read is not None, f"nothing of unit {self.name!r} is read"
        assert into is not None, "a read has memory"
        try:
            self.read.wait()
        except BaseException:
            # After an error a traceback may hold the memory of the read.
            self.leave()
            raise
        if overrides:
            self.overlay(into, overrides)
        self.weak = (StorageWeakRef(into.untyped_storage()), self.version)
        self.base, self.read, self._into = into, None, None
        self._move("arrive")

    def adopt(self) -> bool:
        """Take living bytes of the current version again; whether there are any."""
        if self.state is not Bytes.AWAY or self.weak is None or self.weak[1] != self.version:
            return False
        storage = alive(self.weak[0])
        if storage is None:
            return False
        with torch.inference_mode(mode=False):
            self.base = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (self.nbytes,), (1,))
        self._move("adopt")
        return True

    def stand(self, base: torch.Tensor, epoch: int) -> None:
        """The bytes are where they are held, as the last commit of this epoch of the store left them."""
        self.base, self._address, self._epoch = base, base.data_ptr(), epoch
        self._move("stand")

    def copy(self, base: torch.Tensor) -> None:
        """The bytes are in a file, and not in the RAM tier."""
        self.base, self._file = base, StorageWeakRef(base.untyped_storage())
        self._move("copy")

    def leave(self) -> None:
        """Release the bytes; views of other code keep them alive."""
        if self.state is Bytes.READING:
            # Dropping a read waits for it; its memory is released after it, and was never verified.
            self.read = None
            self._into = self.weak = None
        self._views = self.base = None
        self._move("leave")

    def is_stale(self, epoch: int) -> bool:
        """Whether a step alone has changed the bytes where they are held, as of an epoch of the store."""
        return self.state is Bytes.IN_PLACE and self._epoch != epoch

    @property
    def is_moved(self) -> bool:
        """Whether user code moved its bytes from where they are held, as `share_memory_()` does."""
        return self.state is Bytes.IN_PLACE and self.base is not None and self.base.data_ptr() != self._address

    def is_at(self, address: int) -> bool:
        """Whether its bytes are at an address where they were, of a unit that is held: other files come there."""
        if self._address == address:
            return True
        storage = None if self._file is None else alive(self._file)
        return storage is not None and storage.data_ptr() == address

    # --- its values --------------------------------------------------------------------

    def train(self) -> None:
        """A commit has changed the values on storage: the bytes in memory are old."""
        self.version += 1
        self.trained = True
        if self.held:
            # They were updated where they lie, as by an optimizer in place: a graph that saved a view is refused.
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                for place in self.places:
                    torch.autograd.graph.increment_version(place.parameter)
                    if place.bound_version is not None:
                        place.note_version()

    def change(self) -> None:
        """The model computes with other values from now on: a graph of the values before is not walked any more."""
        self.version += 1

    def forget(self) -> None:
        """Release bytes that are no step's: they are not adopted again."""
        self.leave()
        self.weak = None

    def overlay(self, base: torch.Tensor, overrides: Mapping[str, torch.Tensor]) -> None:
        """Let bytes that it gets have values that are not on storage, by the names of their parameters."""
        with torch.inference_mode(mode=False), torch.no_grad():
            for place in self.places:
                values = overrides.get(place.name)
                if values is not None:
                    place.view(base).copy_(values)

    @property
    def written(self) -> list[str]:
        """The parameters that were written to in place since they were bound, or unbound: views outlive both."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return [
                place.name
                for place in self.places
                if place.bound_version is not None and place.parameter._version != place.bound_version  # noqa: SLF001
            ]

    def note_written(self) -> None:
        """Writes in place were reported: count from now on."""
        for place in self.places:
            if place.bound_version is not None:
                place.note_version()

    # --- its users ---------------------------------------------------------------------

    def count(self, holder: int, more: int) -> None:
        """Count how often a thread has bound it. An interrupt in here leaves a holder that is found."""
        counted = self.holders.get(holder, 0) + more
        if counted > 0:
            self.holders[holder] = counted
        else:
            self.holders.pop(holder, None)
        self.bound = sum(self.holders.values())

    def bind(self, holder: int, *, guarded: bool) -> None:
        """Let the parameters have their values, for a thread; `guarded`: they ask each thread whether it bound them.

        What an interrupt leaves half bound is counted, and so found.
        """
        assert self.base is not None, f"unit {self.name!r} has no bytes"
        if self._views is None:
            self._views = [place.view(self.base) for place in self.places]
        self.count(holder, 1)
        for place, values in zip(self.places, self._views, strict=True):
            place.bind(values, guarded=guarded)

    def unbind(self) -> None:
        """Make the parameters placeholders; a repeated call after an interrupt completes it."""
        for place in self.places:
            place.unbind()

    def abandon(self) -> None:
        """Forget all holders."""
        self.holders.clear()
        self.bound = 0


def alive(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage of a weak reference, if it lives."""
    if weak.expired():
        return None
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)  # noqa: SLF001


class Memory(Protocol):
    """The memory of units, and the way there; see `device.unit_memory`."""

    arena: Arena

    def begin(self, name: str, base: torch.Tensor) -> UnitRead:
        """Begin to read a unit into a lease of the arena."""

    def held(self, name: str) -> torch.Tensor:
        """The bytes of a unit that is held, as the last commit left them."""

    @property
    def held_epoch(self) -> int:
        """While it stays the same, what `held` gave is what the last commit left."""

    def spoil(self, name: str) -> None:
        """User code wrote to a parameter of a unit in the RAM tier."""

    def used(self, base: torch.Tensor) -> None:
        """The caller is about to compute with a unit's bytes."""

    def require_usable(self) -> None:
        """Reject a call, before anything is done, where units must not be computed with."""


class Stages(Protocol):
    """Follows the micro-batches of a step; see `microbatches`, which is in a package above this."""

    def arrive(self, homes: Iterable[Home]) -> None:
        """A module or a backward is about to use units; other micro-batches may be computed before it continues."""


class Listener(Protocol):
    """Is notified of uses of parameters, and knows the state of the run: the session, in a package above this."""

    @property
    def has_updates(self) -> bool:
        """Whether an update has begun of a step that is not committed."""

    @property
    def computes(self) -> bool:
        """Whether this thread is inside of the model's forward."""

    def entered(self, module: torch.nn.Module, *, outermost: bool) -> None:
        """A module is entered; the outermost one begins a forward, or a part of the model that is called alone."""

    def borrowed(self, places: Iterable[Place]) -> None:
        """Parameters are touched outside of their modules."""

    def backward_begins(self) -> None:
        """A backward begins, and nothing of it was taken."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of units in the plan."""

    lookahead: int  # how many units ahead of the one in use are fetched
    slots: dict[int, int]  # the arena's classes, {bytes: count}
    option: str  # what the user sets the budget by
    larger: Callable[[int], int]  # a budget that suffices where a unit of so many bytes finds no memory
    # Takes memory for one more unit of so many bytes, and returns how many; None where a budget was given.
    add: Callable[[int], int] | None


_WRITE_BYTES = 8 << 20


class Copies:
    """Where copies lie: a file for each parameter, which nothing else sees and which is gone with its tensor."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is where they lie; None where none was named and the storage is no folder."""
        self._given = folder

    def of_values(self, place: Place, values: torch.Tensor) -> torch.Tensor:
        """A copy of values of a parameter, which have its strides."""
        nbytes, folder = place.nothing.nbytes, self._folder
        with _unlinked(folder) as descriptor:
            try:
                _write(descriptor, bytes_of(values), folder)
            finally:
                # The traceback of an error would hold them, and with them their unit's place in memory.
                del values
            if nbytes == 0:
                return torch.empty(place.shape, dtype=place.dtype, device="cpu")
            return file_memory(descriptor, nbytes).view(place.dtype).as_strided(place.shape, place.stride)

    def of_bytes(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of bytes."""
        folder = self._folder
        with _unlinked(folder) as descriptor:
            _write(descriptor, values, folder)
            return file_memory(descriptor, values.nbytes)

    @property
    def _folder(self) -> Path:
        if self._given is None:
            raise ConfigError("the storage is a raw device: give offload(scratch=) a folder for copies of the weights")
        return self._given


@contextlib.contextmanager
def _unlinked(folder: Path) -> Iterator[int]:
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        descriptor = _named_for_a_moment(folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _named_for_a_moment(folder: Path) -> int:
    """For file systems without O_TMPFILE."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".memascend-copy-", dir=folder)
    except OSError as error:
        raise _no_copy(folder, error) from error
    os.unlink(name)  # noqa: PTH108
    return descriptor


def _no_copy(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{folder}: no disk space for a copy of the weights: {error.strerror}; give offload(scratch=) another folder",
        errno=error.errno,
        path=str(folder),
    )


def _write(descriptor: int, values: torch.Tensor, folder: Path) -> None:
    """Write bytes to a file, and let the page cache go behind it."""
    nbytes = values.nbytes
    for start in range(0, nbytes, _WRITE_BYTES):
        length = min(_WRITE_BYTES, nbytes - start)
        # A piece at a time is in host memory where they lie on a device.
        piece = values[start : start + length].cpu()
        part = memory_of(piece)
        at = 0
        while at < length:
            try:
                at += os.pwrite(descriptor, part[at:], start + at)
            except OSError as error:
                # The traceback would hold the values, and with them their place in memory.
                del values, piece, part
                raise _no_copy(folder, error) from error
    if nbytes > _WRITE_BYTES:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


# Methods that hand out the memory of all of the unit, directly or after detach() or ravel().
STORAGES = frozenset({"_typed_storage", "detach", "ravel", "storage", "untyped_storage"})


_log = logging.getLogger("memascend")


def wanted() -> bool:
    """Whether the environment asks for all of them: they cost a pass over every unit at each use."""
    return os.environ.get("MEMASCEND_DEBUG", "") not in ("", "0")


@dataclass(frozen=True)
class Left:
    """Bytes that a unit has released, and the checksums of parameters in them."""

    home: Home
    weak: StorageWeakRef
    sums: dict[str, str]


class Sums:
    """Checksums of parameters in memory, as of their read or of the access to their `.data`."""

    def __init__(self, *, everything: bool) -> None:
        """`everything`: compare all parameters, and not only ones whose `.data` was taken."""
        self._everything = everything
        # Some parameter is compared, or was: without one nothing else is called.
        self.compares = everything
        self._read: dict[str, str] = {}
        # Bytes that units have no more, and that views may keep.
        self._left: dict[int, Left] = {}
        self._told: set[str] = set()

    def note(self, home: Home) -> None:
        """A unit was read, or has the bytes again that it had."""
        self.forget(home)
        left = None if home.base is None else self._left.pop(home.base.untyped_storage()._cdata, None)  # noqa: SLF001
        if left is not None:
            self._read.update(left.sums)
        if self._everything:
            for place in home.places:
                self.take(home, place)

    def forget(self, home: Home) -> None:
        """Stop comparing the parameters of a unit."""
        for place in home.places:
            self._read.pop(place.name, None)

    def take(self, home: Home, place: Place) -> None:
        """User code is about to take a parameter's memory."""
        self.compares = True
        if home.base is not None and place.name not in self._read:
            self._read[place.name] = _sum(home.base, place.offset, place.nothing.nbytes)

    def leave(self, home: Home) -> None:
        """The unit releases its bytes: parameters whose memory was taken are compared for as long as it lives."""
        sums = {place.name: self._read[place.name] for place in home.places if place.name in self._read}
        # Where it is held, the store has its memory, and checks it.
        if sums and home.base is not None and home.state is not Bytes.IN_PLACE:
            weak = StorageWeakRef(home.base.untyped_storage())
            self._left = {key: left for key, left in self._left.items() if not left.weak.expired()}
            self._left[weak.cdata] = Left(home, weak, sums)

    def changed_since(self) -> list[str]:
        """The parameters whose bytes were written to since their unit released them; each is reported once."""
        names = []
        for key, left in list(self._left.items()):
            storage = alive(left.weak)
            if storage is None:
                del self._left[key]
                continue
            base = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for place in left.home.places:
                if place.name in left.sums:
                    now = _sum(base, place.offset, place.nothing.nbytes)
                    if now != left.sums[place.name]:
                        names.append(place.name)
                        left.sums[place.name] = now
        return names

    def changed(self, home: Home) -> list[str]:
        """The parameters of a unit in memory that differ from the read values."""
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
                _log.warning("the values of %s were changed in memory, past torch's counters (.data, numpy?)", name)
                self._told.add(name)
        return names


def _sum(base: torch.Tensor, offset: int, nbytes: int) -> str:
    return checksum_of(base[offset : offset + nbytes].cpu())
