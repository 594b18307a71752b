"""Hands out real memory of weights between forwards, and finds writes to it."""

from __future__ import annotations

import functools
import logging
import sys
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memascend.errors import UsageError
from memascend.params.aliases import FOREIGN, find_foreign
from memascend.params.unit import alive
from memascend.storage import checksum_of
from memascend.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memascend.params.offloaded_param import Place, UnitHooks
    from memascend.params.resident_units import ResidentUnits
    from memascend.params.threads import ProcessLock, Turns
    from memascend.params.unit import Copies, Listener


# What torch calls a tensor with elements that share bytes, as expand() makes it.
_OVERLAPS = 1


class Way(Enum):
    """By which way a weight's memory may be written to."""

    # A view, `.data` or the like, which user code may have: it counts as written to until it was examined.
    VIEW = auto()
    # The same, of a state dict, which later steps do not change.
    STATE_DICT = auto()
    # None: no other code has the memory, so that it stays as it was seen.
    NONE = auto()
    # A view that was kept over a commit: storage has other values by now, which are read before any use.
    KEPT = auto()


class Reached:
    """Real memory of one parameter.

    Attributes:
        way: how it may be written to.
        committed: the checksum of the values on storage.
        seen: the checksum of the values that the model computes with.
    """

    __slots__ = ("committed", "place", "seen", "stand_in", "values", "way")

    def __init__(self, place: Place, values: torch.Tensor) -> None:
        self.place = place
        self.hold(values)
        self.committed = self.seen = self.checksum()
        self.way = Way.VIEW

    def lend(self) -> None:
        """User code gets the memory."""
        assert self.way is not Way.KEPT, f"{self.place.name!r} has values of an earlier step"
        if self.way is not Way.STATE_DICT or not self.is_shared:
            self.way = Way.VIEW

    def lend_to_state_dict(self) -> None:
        """A state dict gets the memory, which no other code has."""
        assert self.way is not Way.KEPT, f"{self.place.name!r} has values of an earlier step"
        self.way = Way.STATE_DICT

    def look(self, now: str, *, shared: bool) -> None:
        """The model computes with the values that have this checksum; whether anybody else has the memory."""
        assert self.way is not Way.KEPT, f"{self.place.name!r} has values of an earlier step"
        self.seen = now
        if not shared:
            self.way = Way.NONE

    def store(self) -> None:
        """The seen values are on storage."""
        self.committed = self.seen

    def keep(self) -> None:
        """Storage has other values, and user code has a view."""
        assert self.way is not Way.STATE_DICT, f"{self.place.name!r} has no view that follows its steps"
        self.way = Way.KEPT

    def hold(self, values: torch.Tensor) -> None:
        """Have this memory from now on."""
        place = self.place
        with torch.inference_mode(mode=False), torch.no_grad():
            # No view of another tensor, which would count as an owner of the memory.
            self.values = torch.empty(0, dtype=place.dtype, device=values.device).set_(
                values.untyped_storage(), values.storage_offset(), tuple(values.shape), values.stride()
            )
            # In the place of the parameter where a function is called on it.
            self.stand_in = torch.Tensor._make_subclass(place.kind, self.values, False)  # noqa: SLF001

    def checksum(self) -> str:
        """Of its values now."""
        return checksum(self.values, self.place)

    def renew(self, values: torch.Tensor) -> None:
        """Have the values that are on storage now, as an update in memory would have written them here."""
        with torch.inference_mode(mode=False), torch.no_grad():
            # Views count it as a write, and so does the parameter: a graph that saved one is not walked any more.
            self.stand_in.copy_(values)
            torch.autograd.graph.increment_version(self.place.parameter)
        self.place.note_version()
        self.committed = self.seen = self.checksum()
        self.way = Way.VIEW

    @property
    def changed(self) -> bool:
        """Whether its values differ from storage, as far as was seen."""
        return self.seen != self.committed

    @property
    def is_shared(self) -> bool:
        """Whether other code has the memory, too."""
        return _uses(self.values) != _uses_of_two()

    @property
    def is_writable(self) -> bool:
        """Whether each element has bytes of its own; torch's optimizers refuse to update any other tensor."""
        return bool(torch._debug_has_internal_overlap(self.values) != _OVERLAPS)  # noqa: SLF001


def _uses(values: torch.Tensor) -> tuple[int, int]:
    """How often the memory of a tensor is referred to, from torch and from Python."""
    storage = values.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)  # noqa: SLF001


@functools.cache
def _uses_of_two() -> tuple[int, int]:
    """The references to memory that two tensors have and no other code; they depend on torch's version."""
    with torch.inference_mode(mode=False), torch.no_grad():
        memory = torch.zeros(1, device="cpu")
        other = torch.Tensor._make_subclass(torch.nn.Parameter, memory, False)  # noqa: SLF001
        uses = _uses(memory)
        del other
        return uses


class Outlived:
    """Memory of a state dict that user code kept, and that is no parameter's any more."""

    __slots__ = ("_shape", "_weak", "place", "seen")

    def __init__(self, place: Place, values: torch.Tensor) -> None:
        self.place = place
        self.seen = checksum(values, place)
        self._weak = StorageWeakRef(values.untyped_storage())
        self._shape = (values.dtype, values.storage_offset(), tuple(values.shape), values.stride())

    def checksum(self) -> str | None:
        """Of its values now; None where the memory is gone."""
        storage = alive(self._weak)
        if storage is None:
            return None
        dtype, offset, shape, stride = self._shape
        with torch.inference_mode(mode=False), torch.no_grad():
            values = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
            return checksum(values, self.place)

    def accept(self) -> None:
        """Writes to it are no part of a step any more."""
        self.seen = self.checksum() or self.seen


def laid_out(values: torch.Tensor, place: Place) -> torch.Tensor:
    """Values with the strides that they have on storage."""
    if tuple(values.stride()) == place.stride or values.numel() <= 1:
        return values
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=values.device).copy_(values)


def checksum(values: torch.Tensor, place: Place) -> str:
    """Of a parameter's values, wherever they are and however they are laid out."""
    with torch.no_grad():
        return checksum_of(bytes_of(laid_out(values, place)).cpu())


def span(values: torch.Tensor) -> tuple[int, int]:
    """The addresses between which a tensor lies."""
    if not values.numel():
        return (0, 0)
    last = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    return values.data_ptr(), values.data_ptr() + (last + 1) * values.element_size()


class Bound(Protocol):
    """Binds the units that weights lie in."""

    lock: ProcessLock  # guards all of it
    turns: Turns  # of threads that use parameters
    units: ResidentUnits
    transfers: Transfers
    listener: Listener

    @property
    def hooks(self) -> UnitHooks:
        """The hooks on saved tensors."""

    def copy_of(self, place: Place) -> torch.Tensor:
        """The values of a parameter in an unlinked file."""

    def read_into(self, place: Place, take: Callable[[torch.Tensor], None]) -> None:
        """Let `take` have the values of a parameter, for as long as it runs."""


_log = logging.getLogger("memascend")


_STAGED = "a step is staged, and its updates began from other values: call step() or zero_grad() first"
_SEALED = (
    "micro-batches are computed by layer, and would see different values: write to weights before accumulate(), "
    "between steps, within memascend.materialized(model, modify=True), or leave by_layer=True out"
)


class ReachedWeights:
    """The parameters of one model that were reached since the last commit that changed them."""

    def __init__(self, residency: Bound, copies: Copies) -> None:
        """`copies` is where memory lies."""
        self._residency = residency
        self._copies = copies
        self._now: dict[str, Reached] = {}
        # User code had memory of rows that ranks share.
        self.handed_out = False
        self._outlived: list[Outlived] = []
        self._told = False
        # Parameters that were written to too late for the forward that a step is made of.
        self._late: set[str] = set()
        # The backward that was looked at last.
        self._walked = -1
        # Micro-batches are computed by layer: no weight may change.
        self._sealed = False

    def note_handed_out(self) -> None:
        """User code gets memory of rows that ranks share."""
        self.handed_out = True

    @property
    def computes(self) -> bool:
        """Whether this thread is inside of a forward or a backward."""
        return bool(torch._C._current_graph_task_id() != -1) or self._residency.listener.computes  # noqa: SLF001

    @property
    def is_stored_whole(self) -> bool:
        """Whether storage has the values that the model computes with, as far as was looked."""
        return not any(one.changed for one in self._now.values())

    # --- handing out memory ---------------------------------------------------------------

    def has(self, places: Iterable[Place]) -> bool:
        """Whether one of them has real memory now."""
        self._residency.transfers.settle()
        return bool(self._now) and any(place.name in self._now for place in places)

    def stand_in(self, place: Place) -> torch.Tensor:
        """A plain parameter on real memory, which counts as written to until it was looked at."""
        with self._residency.lock:
            stand_in = self._reach(place).stand_in
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                wanted = place.parameter.requires_grad
            if stand_in.requires_grad != wanted:
                stand_in.requires_grad_(wanted)
            return stand_in

    def for_state_dict(self, place: Place) -> torch.Tensor:
        """Memory for a state dict that is being made: writes to it count, but no later step changes it."""
        with self._residency.lock, torch.inference_mode(mode=False), torch.no_grad():
            one = self._reach(place)
            if one.is_shared and one.way is not Way.STATE_DICT:
                # A view of user code, which follows the steps.
                values = self._copies.of_values(place, laid_out(one.values, place))
                self._outlived.append(Outlived(place, values))
                return values
            one.lend_to_state_dict()
            return one.stand_in

    @contextmanager
    def bound(self, places: list[Place]) -> Iterator[None]:
        """Let parameters have real memory inside, for a function whose graph leads to them."""
        residency = self._residency
        values = [self._reach(place).values for place in places]
        with residency.turns.alone():
            if any(residency.units.home_of[place.name].bound for place in places):
                raise UsageError(
                    "another thread computes the model, which may evict the weights of a view: take views in that "
                    "thread, or afterwards"
                )
            pushed = residency.hooks.push()
            try:
                for place, one in zip(places, values, strict=True):
                    place.bind(one)
                yield
            finally:
                if pushed:
                    residency.hooks.pop()
                for place in places:
                    place.unbind()

    def replace(self, place: Place, values: torch.Tensor) -> None:
        """Let a parameter have other memory, as an assignment to `.data` does."""
        if tuple(values.shape) != place.shape or values.dtype != place.dtype or values.device != place.device:
            raise UsageError(
                f"{place.name!r} is {list(place.shape)} {place.dtype} on {place.device}, and .data was given "
                f"{list(values.shape)} {values.dtype} on {values.device}: close() and offload() anew for another kind"
            )
        with self._residency.lock:
            own, storage = span(values), values.untyped_storage()
            is_foreign = bool(find_foreign({place.name: values}))
            for name, other in self._now.items():
                theirs = span(other.values)
                if own[0] >= theirs[1] or theirs[0] >= own[1]:
                    continue
                if name != place.name:
                    raise UsageError(
                        f"{place.name!r} and {name!r} would share memory, which storage cannot: give clones to .data"
                    )
                # The same memory, on its way through numpy.
                is_foreign |= storage._cdata != other.values.untyped_storage()._cdata  # noqa: SLF001
            if is_foreign:
                raise UsageError(
                    f"{place.name!r} was given {FOREIGN}, and later writes there would be lost: give .data a clone(), "
                    "or write the values within memascend.materialized(model, modify=True)"
                )
            self._reach(place).hold(values)

    def follow(self, place: Place, values: torch.Tensor) -> None:
        """User code keeps memory that a parameter had while it was real, with the values that storage has now.

        Writes to it are writes to the parameter, as in torch; where they cannot be, the next step rejects them.
        """
        one = self._now.get(place.name)
        is_alike = (values.dtype, values.device) == (place.dtype, place.device)
        with self._residency.lock:
            if is_alike and (one is None or not one.is_shared):
                self._reach(place).hold(values)
            else:
                self._outlived.append(Outlived(place, values))

    def duplicate(self, place: Place) -> torch.nn.Parameter:
        """A plain parameter with the same values in a file of its own."""
        self._residency.transfers.settle()
        one = self._now.get(place.name)
        with self._residency.lock, torch.inference_mode(mode=False), torch.no_grad():
            if one is None:
                values = self._copy(place)
            else:
                values = self._copies.of_values(place, laid_out(one.values, place)).to(place.device)
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                wanted = place.parameter.requires_grad
            made: torch.nn.Parameter = torch.Tensor._make_subclass(place.kind, values, wanted)  # noqa: SLF001
            return made

    def _reach(self, place: Place) -> Reached:
        residency = self._residency
        with residency.lock:
            residency.units.require_open()
            residency.transfers.settle()
            self._renew()
            one = self._now.get(place.name)
            if one is None:
                one = self._now[place.name] = Reached(place, self._copy(place))
            else:
                one.lend()
            return one

    def _copy(self, place: Place) -> torch.Tensor:
        values = self._residency.copy_of(place)
        return values if place.device.type == "cpu" else values.to(place.device)

    def require_writable(self, place: Place) -> None:
        """Refuse a write once an update has begun from the values."""
        self._residency.units.require_open()
        if self._sealed or self._residency.listener.has_updates:
            raise UsageError(f"{place.name!r} cannot be changed now: {_SEALED if self._sealed else _STAGED}")

    @contextmanager
    def sealed(self) -> Iterator[None]:
        """Let the model compute with the values that were written before, and reject writes inside."""
        self.look()
        self._sealed = True
        try:
            yield
            self.look()
        finally:
            self._sealed = False

    # --- writes -------------------------------------------------------------------------------

    def look(self) -> bool:
        """Before a forward, or the updates of a step: give the model written values; returns whether there were any."""
        if not self._now:
            return False
        with self._residency.lock:
            # Where an error or an interrupt came between.
            self._renew()
            written = [self._look_at(one) for one in list(self._now.values()) if one.way is not Way.NONE]
            return any(written)

    def _look_at(self, one: Reached) -> bool:
        """Whether it was written since the last look."""
        # Examined first: code that has it now may write to it later.
        shared = one.is_shared
        now = one.checksum()
        written = now != one.seen
        if written:
            if self._sealed:
                raise UsageError(f"{one.place.name!r} was written to while {_SEALED}")
            if self._residency.listener.has_updates:
                self._late.add(one.place.name)
                return True
            # A view in a graph shares the parameter's counter: writes through it are seen.
            one.place.note_version()
            self._residency.units.override(one.place, one.values if now != one.committed else None)
        one.look(now, shared=shared)
        if one.way is Way.NONE and not one.changed:
            del self._now[one.place.name]
        return written

    def note_walk(self) -> None:
        """A graph is walked, or about to be: the step rejects writes after its forward."""
        task = torch._C._current_graph_task_id()  # noqa: SLF001
        if self._now and task != self._walked:
            self._note_late()
        self._walked = task

    def _note_late(self) -> None:
        with self._residency.lock:
            for one in self._now.values():
                if one.way is not Way.NONE and one.checksum() != one.seen:
                    self._late.add(one.place.name)

    def require_seen(self) -> None:
        """Before a step: reject writes after the forward that it is made of."""
        with self._residency.lock:
            self._renew()
            self._note_late()
            outlived, self._outlived = self._outlived, []
            for other in outlived:
                now = other.checksum()
                if now is None:
                    continue
                self._outlived.append(other)
                if now != other.seen:
                    self._late.add(other.place.name)
            if self._late:
                raise UsageError(
                    f"{', '.join(sorted(self._late))} were written to through a view or .data that was taken before "
                    "the model computed, too late for this step: call zero_grad(), take the view again before the "
                    "forward, and write to it there; between backward and step() it counts with gradients='ssd'"
                )

    def give_late(self) -> None:
        """Values that are not on storage came too late for updates that begin now."""
        with self._residency.lock:
            self._late.update(name for name, one in self._now.items() if one.changed)

    def forget_late(self) -> None:
        """Return to the stored values of parameters that were written to too late."""
        if not self._late:
            return
        with self._residency.lock:
            late, self._late = self._late, set()
            self.forget(late)
            for other in self._outlived:
                other.accept()

    # --- what becomes of it -------------------------------------------------------------------

    def unwritten(self) -> list[tuple[Place, torch.Tensor]]:
        """The parameters whose values are not on storage yet, with their values."""
        with self._residency.lock:
            return [(one.place, laid_out(one.values, one.place)) for one in self._now.values() if one.changed]

    def is_stored(self, place: Place, values: torch.Tensor) -> bool | None:
        """Whether storage has these values of a parameter that was reached; None of others."""
        with self._residency.lock:
            one = self._now.get(place.name)
            return None if one is None else checksum(values, place) == one.committed

    def has_values(self, place: Place, values: torch.Tensor) -> bool:
        """Whether a parameter was reached and its memory has these values now."""
        with self._residency.lock:
            one = self._now.get(place.name)
            return one is not None and checksum(values, place) == one.checksum()

    def written(self, names: Iterable[str]) -> None:
        """The unwritten values are on storage now."""
        with self._residency.lock:
            for name in names:
                one = self._now[name]
                one.store()
                self._residency.units.settle_override(one.place)
                if one.way is Way.NONE:
                    del self._now[name]

    def forget(self, names: Iterable[str]) -> None:
        """These parameters have other values on storage, or return to them; so does memory that is kept."""
        with self._residency.lock:
            for name in names:
                one = self._now.get(name)
                if one is None:
                    continue
                if one.changed:
                    self._residency.units.override(one.place, None)
                shared = one.is_shared
                if shared and one.is_writable and one.way is not Way.STATE_DICT:
                    one.keep()
                    continue
                if shared:
                    self._outlived.append(Outlived(one.place, one.values))
                del self._now[name]
            self._renew()

    def _renew(self) -> None:
        """Read stored values into memory that user code kept."""
        for one in self._now.values():
            if one.way is Way.KEPT:
                if not self._told:
                    self._told = True
                    _log.warning(
                        "a view of %r is kept over a step: it is read from storage after each, so that the view has "
                        "the values that it would have in memory; release views (p.detach(), p.data) to avoid this",
                        one.place.name,
                    )
                self._residency.read_into(one.place, one.renew)

    def close(self) -> None:
        """Release all memory."""
        with self._residency.lock:
            self._now.clear()
            self._outlived.clear()


class Transfers:
    """Replaces detach() and copy_() of a parameter while torch makes or loads a state dict."""

    def __init__(self) -> None:
        """Begin with none."""
        # Of the state dict that is being made, by name: parameters that are tied are one tensor in it.
        self._copies: dict[str, torch.Tensor] | None = None
        self._write: Callable[[Place, torch.Tensor], None] | None = None
        # Commits loaded values that are held back, where there are any.
        self._settle: Callable[[], None] | None = None

    def settle(self) -> None:
        """Commit loaded values that are held back, before values are used."""
        if self._settle is not None:
            self._settle()

    def detached(self, place: Place, copy: Callable[[Place], torch.Tensor]) -> torch.Tensor | None:
        """The result of `copy` for a parameter where a state dict is being made; see `Residency`."""
        if self._copies is None:
            return None
        if place.name not in self._copies:
            self._copies[place.name] = copy(place)
        return self._copies[place.name].detach()

    def assigned(self, place: Place, values: torch.Tensor) -> bool:
        """Write values through to storage where a state dict is being loaded; see `Residency`."""
        if self._write is None:
            return False
        self._write(place, values)
        return True

    def begin_making(self) -> None:
        """From here on a parameter that is detached is copied."""
        self._copies = {}

    def end_making(self) -> None:
        """The state dict is made, or was abandoned."""
        self._copies = None

    def begin_loading(self, write: Callable[[Place, torch.Tensor], None]) -> None:
        """From here on `write` gets values that are copied to a parameter."""
        self._write, self._settle = write, None

    def end_loading(self, settle: Callable[[], None] | None) -> None:
        """The state dict is loaded, or was abandoned; `settle` commits its values that are held back, if any."""
        self._write, self._settle = None, settle
