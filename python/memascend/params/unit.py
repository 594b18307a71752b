"""Tracks one unit (parameters that are read together): where its bytes are, and which threads have materialized it.

[Note: interrupts] Ctrl-C may raise between any two lines. So a method of `CachedUnit` that changes `state` changes it
last: an interrupted change leaves the old state, and the change can be made again. `holders` is changed before
parameters are materialized, and after they are offloaded, so that a cleanup finds every thread that may have
materialized a unit.
"""

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


# The holder of all units within materialized(), where all parameters are plain. No thread has this identifier.
NOBODY = 0


class Bytes(Enum):
    """Where the bytes of a unit are."""

    # The bytes are on storage, or in the RAM tier before `CachedUnit.stand`. Views may keep the last bytes in memory,
    # too; `CachedUnit.adopt` finds them.
    OFFLOADED = auto()
    # A read fills a slot of the arena with the bytes.
    READING = auto()
    # The bytes are in a slot of the arena.
    CACHED = auto()
    # The bytes are in the RAM tier for the whole run. The engine updates the bytes in the RAM tier, and the model
    # computes with the same memory.
    IN_PLACE = auto()

    # The hash method of `Enum` is Python code, which is slow for a dict key that each step looks up many times.
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
class CachedUnit:
    """One unit at run time: its parameters, the state of its bytes, and the threads that have materialized it.

    Only methods of `CachedUnit` write the attributes; see [Note: interrupts].
    """

    index: int
    name: str
    nbytes: int
    # The size of the arena's slots for this unit; 0 in the RAM tier.
    slot_bytes: int
    _: KW_ONLY
    pinned: bool  # True for a small unit that is never evicted to make room
    # True if the unit's values are in the RAM tier, so that the unit needs no slot.
    in_ram: bool = False
    places: Sequence[Place] = ()  # the unit's parameters
    state: Bytes = Bytes.OFFLOADED
    # The bytes in memory; None in the states OFFLOADED and READING.
    base: torch.Tensor | None = None
    # The read that is under way, and the memory that it fills; None in states other than READING.
    read: Fetch | Staged | None = None
    _into: torch.Tensor | None = None
    # A view into `base` for each parameter, made at the first `materialize`.
    _views: list[torch.Tensor] | None = None
    # A weak reference to the slot that the unit leased last, and the version of the bytes in the slot. Views may keep
    # the slot alive after an eviction.
    weak: tuple[StorageWeakRef, int] | None = None
    # In state IN_PLACE: the store's `ram_tier_epoch` when `base` was taken.
    _epoch: int = -1
    # How often a commit has changed the values.
    version: int = 0
    # How many reads of the current version were begun.
    fetched: int = 0
    # True once a commit has changed the values: the next commit is then expected to change the values again.
    trained: bool = False
    # How often each thread has materialized the unit, by thread identifier.
    holders: dict[int, int] = field(default_factory=dict)

    def _move(self, move: Move) -> None:
        after = _MOVES[move].get(self.state)
        assert after is not None, f"the move {move!r} is not possible for unit {self.name!r} in state {self.state.name}"
        self.state = after

    # --- its bytes ---------------------------------------------------------------------

    def begin_read(self, read: Fetch | Staged, into: torch.Tensor) -> None:
        """Records that `read` reads the bytes into the leased memory `into`."""
        self.weak = None
        self.read, self._into = read, into
        self.fetched += 1
        self._move("read")

    def arrive(self) -> None:
        """Waits for the read, which verifies the bytes, and caches the bytes."""
        into = self._into
        assert self.read is not None, f"unit {self.name!r} has no read to wait for"
        assert into is not None, "a unit that is being read has memory"
        try:
            self.read.wait()
        except BaseException:
            # The traceback of this error may refer to the memory: release all other references.
            self.leave()
            raise
        self.weak = (StorageWeakRef(into.untyped_storage()), self.version)
        self.base, self.read, self._into = into, None, None
        self._move("arrive")

    def adopt(self) -> bool:
        """Caches bytes of the current version that views kept alive; returns False if there are no such bytes."""
        if self.state is not Bytes.OFFLOADED or self.weak is None or self.weak[1] != self.version:
            return False
        storage = alive(self.weak[0])
        if storage is None:
            return False
        self.base = view_of(storage, torch.uint8, 0, (self.nbytes,), (1,))
        self._move("adopt")
        return True

    def stand(self, base: torch.Tensor, epoch: int) -> None:
        """Records that the bytes are `base`, which is in the RAM tier; `epoch` is the store's `ram_tier_epoch`."""
        self.base, self._epoch = base, epoch
        self._move("stand")

    def leave(self) -> None:
        """Releases the unit's references to its bytes. The memory stays as long as other code has views of it."""
        if self.state is Bytes.READING:
            # `read` is deleted first: its deletion waits until the read has ended, and only then may the memory be
            # released. `weak` must not refer to bytes that were never verified.
            self.read = None
            self._into = self.weak = None
        self._views = self.base = None
        self._move("leave")

    def is_stale(self, epoch: int) -> bool:
        """True if the bytes are in the RAM tier, but `stand` recorded them with another epoch than `epoch`."""
        return self.state is Bytes.IN_PLACE and self._epoch != epoch

    # --- its values --------------------------------------------------------------------

    def view(self, place: Place) -> torch.Tensor:
        """Returns the values of a parameter of this unit, as a view into `base`."""
        assert self.base is not None, f"unit {self.name!r} has no bytes"
        storage, size = self.base.untyped_storage(), place.dtype.itemsize
        return view_of(storage, place.dtype, place.offset // size, place.shape, place.stride)

    def train(self) -> None:
        """Begins the next version of the values, because a commit has changed them; sets `trained`."""
        self.version += 1
        self.fetched = 0
        self.trained = True

    def forget(self) -> None:
        """Releases bytes that may differ from the last commit, so that `adopt` does not use them."""
        self.leave()
        self.weak = None

    @property
    def written(self) -> list[str]:
        """The names of parameters that code wrote to in place, or through a view, since the last `note_written`.

        Setting a parameter's data also counts as `note_written` for this parameter.
        """
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return [
                place.name
                for place in self.places
                if place.parameter._version != place.known_version  # noqa: SLF001
            ]

    def note_written(self) -> None:
        """Makes `written` empty until code writes to a parameter again."""
        for place in self.places:
            place.note_version()

    # --- its users ---------------------------------------------------------------------

    def count(self, holder: int, more: int) -> None:
        """Adds `more`, which may be negative, to the number of times that a thread has materialized the unit."""
        counted = self.holders.get(holder, 0) + more
        if counted > 0:
            self.holders[holder] = counted
        else:
            self.holders.pop(holder, None)

    def materialize(self, holder: int, *, guarded: bool) -> None:
        """Gives the parameters their values, for the thread `holder`.

        With `guarded`, the parameters keep their placeholder class, so that each use checks whether its thread is a
        holder.
        """
        # The holder is counted before any parameter is materialized; see [Note: interrupts].
        if self._views is None:
            self._views = [self.view(place) for place in self.places]
        self.count(holder, 1)
        for place, values in zip(self.places, self._views, strict=True):
            place.materialize(values, guarded=guarded)

    def offload(self) -> None:
        """Makes the parameters placeholders; call it again after an interrupt."""
        for place in self.places:
            place.offload()


def alive(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """Returns the storage of a weak reference; None if the storage was freed."""
    if weak.expired():
        return None
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)  # noqa: SLF001


def view_of(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Returns a tensor on `storage` that is a view of no other tensor; `offset` is in elements."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits that the plan sets for units in memory."""

    lookahead: int  # how many units are fetched ahead of the unit in use
    slots: dict[int, int]  # the number of slots of each size in the arena, {bytes: count}
    option: str  # the user's option for the budget, "host_memory" or "device_memory"
    larger: Callable[[int], int]  # returns a larger budget, given the bytes of a unit that found no memory
    # Takes memory for one more unit, given the size of the unit in bytes, and returns the number of bytes taken. `add`
    # is None if the user gave a budget.
    add: Callable[[int], int] | None
