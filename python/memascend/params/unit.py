"""Tracks one unit: its parameters, where its bytes are, and which threads have it materialized."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend.device.transfer import Staged
    from memascend.params.offloaded_param import Place
    from memascend.storage import Fetch


# The holder of units that are materialized for all threads; no thread has this number.
NOBODY = 0


class Bytes(Enum):
    """Where the bytes of a unit are."""

    # On storage. A view may keep the last bytes in memory alive: `Home.adopt` finds them.
    OFFLOADED = auto()
    # Being read into memory of the arena.
    READING = auto()
    # In memory of the arena.
    CACHED = auto()
    # In memory for the whole run, where the engine updates them: the model computes with them where they lie.
    IN_PLACE = auto()

    # As in `GradientState`: asked for many times in a step.
    __hash__ = object.__hash__


Move = Literal["read", "arrive", "adopt", "stand", "leave"]
_MOVES: dict[Move, dict[Bytes, Bytes]] = {
    "read": {Bytes.OFFLOADED: Bytes.READING},
    "arrive": {Bytes.READING: Bytes.CACHED},
    "adopt": {Bytes.OFFLOADED: Bytes.CACHED},
    "stand": {Bytes.OFFLOADED: Bytes.IN_PLACE},
    "leave": dict.fromkeys(Bytes, Bytes.OFFLOADED),
}


@dataclass(eq=False, slots=True)
class Home:
    """One unit at run time: its parameters, where its bytes are now, and which threads have it materialized.

    Only its methods write its attributes, each of which is one of `_MOVES`, a change of its values or a use. In each
    the state comes last: an interrupt in it leaves the unit as it was, to be brought again.
    """

    index: int
    name: str
    nbytes: int
    # The size of the arena's places that it may have.
    slot_bytes: int
    _: KW_ONLY
    pinned: bool
    # Its values are in memory for the whole run, so that it has no place in the arena.
    in_ram: bool = False
    # Its parameters.
    places: Sequence[Place] = ()
    # Where its bytes are.
    state: Bytes = Bytes.OFFLOADED
    # The bytes in memory; None while they are on storage or being read.
    base: torch.Tensor | None = None
    # The read that is under way, None in other states; and what it fills.
    read: Fetch | Staged | None = None
    _into: torch.Tensor | None = None
    # The values of the parameters in `base`.
    _views: list[torch.Tensor] | None = None
    # The storage that was leased last, which views that others hold may keep alive, and the version there.
    weak: tuple[StorageWeakRef, int] | None = None
    # The epoch of the store from which it was taken, where it is in the RAM tier.
    _epoch: int = -1
    # Counts the values that it had.
    version: int = 0
    # Reads that were begun of these.
    fetched: int = 0
    # A step has changed its values, so the next one will.
    trained: bool = False
    # The threads that have it materialized, with how often.
    holders: dict[int, int] = field(default_factory=dict)

    def _move(self, move: Move) -> None:
        after = _MOVES[move].get(self.state)
        assert after is not None, f"{move!r} of unit {self.name!r}, which is {self.state.name}"
        self.state = after

    # --- its bytes ---------------------------------------------------------------------

    def begin_read(self, read: Fetch | Staged, into: torch.Tensor) -> None:
        """Note that the bytes are being read into leased memory."""
        self.weak = None
        self.read, self._into = read, into
        self.fetched += 1
        self._move("read")

    def arrive(self) -> None:
        """Wait for the read, which verifies it."""
        into = self._into
        assert self.read is not None, f"nothing of unit {self.name!r} is read"
        assert into is not None, "a read has memory"
        try:
            self.read.wait()
        except BaseException:
            # After an error a traceback may hold the memory of the read.
            self.leave()
            raise
        self.weak = (StorageWeakRef(into.untyped_storage()), self.version)
        self.base, self.read, self._into = into, None, None
        self._move("arrive")

    def adopt(self) -> bool:
        """Take living bytes of the current version again; whether there are any."""
        if self.state is not Bytes.OFFLOADED or self.weak is None or self.weak[1] != self.version:
            return False
        storage = alive(self.weak[0])
        if storage is None:
            return False
        self.base = view_of(storage, torch.uint8, 0, (self.nbytes,), (1,))
        self._move("adopt")
        return True

    def stand(self, base: torch.Tensor, epoch: int) -> None:
        """The bytes are where they are in RAM, as the last commit of this epoch of the store left them."""
        self.base, self._epoch = base, epoch
        self._move("stand")

    def leave(self) -> None:
        """Release the bytes; views of other code keep them alive."""
        if self.state is Bytes.READING:
            # Dropping a read waits for it; its memory is released after it, and was never verified.
            self.read = None
            self._into = self.weak = None
        self._views = self.base = None
        self._move("leave")

    def is_stale(self, epoch: int) -> bool:
        """Whether a step alone has changed the bytes where they are in RAM, as of an epoch of the store."""
        return self.state is Bytes.IN_PLACE and self._epoch != epoch

    # --- its values --------------------------------------------------------------------

    def view(self, place: Place) -> torch.Tensor:
        """The values of one of its parameters, in its bytes."""
        assert self.base is not None, f"unit {self.name!r} has no bytes"
        storage, size = self.base.untyped_storage(), place.dtype.itemsize
        return view_of(storage, place.dtype, place.offset // size, place.shape, place.stride)

    def train(self) -> None:
        """A commit has changed the values on storage: the bytes in memory are old."""
        self.version += 1
        self.fetched = 0
        self.trained = True

    def forget(self) -> None:
        """Release bytes that are no step's: they are not adopted again."""
        self.leave()
        self.weak = None

    @property
    def written(self) -> list[str]:
        """The parameters written to in place since they were last given memory, or none: views outlive both."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return [
                place.name
                for place in self.places
                if place.parameter._version != place.known_version  # noqa: SLF001
            ]

    def note_written(self) -> None:
        """Writes in place were reported: count from now on."""
        for place in self.places:
            place.note_version()

    # --- its users ---------------------------------------------------------------------

    def count(self, holder: int, more: int) -> None:
        """Count how often a thread has it materialized. An interrupt in here leaves a holder that is found."""
        counted = self.holders.get(holder, 0) + more
        if counted > 0:
            self.holders[holder] = counted
        else:
            self.holders.pop(holder, None)

    def materialize(self, holder: int, *, guarded: bool) -> None:
        """Let the parameters have their values, for a thread; `guarded`: they ask each thread whether it holds them.

        What an interrupt leaves half done is counted, and so found.
        """
        if self._views is None:
            self._views = [self.view(place) for place in self.places]
        self.count(holder, 1)
        for place, values in zip(self.places, self._views, strict=True):
            place.materialize(values, guarded=guarded)

    def offload(self) -> None:
        """Make the parameters placeholders; a repeated call after an interrupt completes it."""
        for place in self.places:
            place.offload()


def alive(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage of a weak reference, if it lives."""
    if weak.expired():
        return None
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)  # noqa: SLF001


def view_of(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor on memory, which is a view of no other tensor; `offset` counts elements."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of units in the plan."""

    lookahead: int  # how many units ahead of the one in use are fetched
    slots: dict[int, int]  # the arena's classes, {bytes: count}
    option: str  # what the user sets the budget by
    larger: Callable[[int], int]  # a budget that suffices where a unit of so many bytes finds no memory
    # Takes memory for one more unit of so many bytes, and returns how many; None where a budget was given.
    add: Callable[[int], int] | None
