"""Materializes parameters for modules, operations and backwards; notes where saved tensors of autograd lie in them."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from memascend.errors import UsageError
from memascend.params.cached_units import CachedUnits
from memascend.params.module_hooks import Frames
from memascend.params.threads import ProcessLock, Turns, current
from memascend.params.unit import view_of
from memascend.params.weight_access import WeightCopies, filed_copy, unseen
from memascend.text import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from memascend.activations.activations import Activations
    from memascend.device.unit_memory import UnitMemory
    from memascend.grads.baton import Recorder
    from memascend.grads.microbatches import PartialSums
    from memascend.params.offloaded_param import Place
    from memascend.params.unit import Home, Limits
    from memascend.session.session import Session
    from memascend.storage import Engine


_CHECKPOINT = "torch.utils.checkpoint"
_Taken = TypeVar("_Taken")


class Note(NamedTuple):
    """Where a tensor that autograd saved lies: enough to build the same view again."""

    home: Home
    version: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool
    negative: bool


class SavedTensorHooks:
    """One pair of hooks, which are pushed while a unit computes."""

    __slots__ = ("_pair", "_residency", "keeper")

    def __init__(self, residency: Residency, keeper: Activations | None = None) -> None:
        """Where there is a keeper, the hooks are pushed for all of a model's forward."""
        self._residency = residency
        self.keeper = keeper
        # Bound once, so that they can be distinguished from other hooks.
        self._pair = (self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """A note for what lies in a unit; anything else as it is."""
        note = self.note_of(tensor)
        if note is not None:
            return note
        kept = tensor if self.keeper is None else self.keeper.save(tensor, sys._getframe(1))  # noqa: SLF001
        return _Saved(tensor, tensor._version) if kept is tensor else kept  # noqa: SLF001

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again."""
        if isinstance(saved, Note):
            return self.tensor_of(saved)
        tensor: torch.Tensor = saved if isinstance(saved, torch.Tensor) else saved.tensor()
        return tensor

    def push(self) -> bool:
        """Push the hooks where they are needed, which is not where ours are on top; whether they were pushed."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
        if top is None:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._pair)  # noqa: SLF001
            return True
        pack, unpack = top
        if _owner(pack) is self:
            return False
        if isinstance(pack, _OverCheckpoint) or getattr(pack, "__module__", "") == _CHECKPOINT:
            pack = _OverCheckpoint(self, pack)
        else:
            theirs = _Delegating(self, pack, unpack)
            pack, unpack = theirs.pack, theirs.unpack
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)  # noqa: SLF001
        return True

    @staticmethod
    def pop() -> None:
        """Pop the pushed hooks, if there are any: a user's own hooks, left by an interrupt, may have popped them."""
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:  # noqa: SLF001
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001

    def pop_left(self) -> None:
        """Pop what an interrupt left on top, where this thread computes nothing."""
        while torch._C._current_graph_task_id() == -1:  # noqa: SLF001
            top = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
            if top is None or _owner(top[0]) is not self:
                return
            self.pop()

    def note_of(self, tensor: torch.Tensor) -> Note | None:
        """Where in a unit a tensor lies; None: it lies elsewhere."""
        try:
            # A parameter that is materialized beside other threads would give a copy's.
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                address = torch.Tensor.untyped_storage(tensor).data_ptr()
        except (NotImplementedError, RuntimeError):
            # Sparse, or a subclass without memory of its own: no bytes of ours.
            return None
        found, start = self._residency.units.at.get(address), 0
        if found is None and _is_offloaded(tensor):
            # It has a copy for a moment, see `WeightCopies.materialized`: the unit has the same values.
            place: Place = tensor._memascend  # type: ignore[attr-defined] # noqa: SLF001
            home = self._residency.units.home_of[place.name]
            found, start = (home, home.version), place.offset
        if found is None:
            return None
        return Note(
            *found,
            start + int(tensor.storage_offset()) * tensor.element_size(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def tensor_of(self, note: Note) -> torch.Tensor:
        """The tensor again that a note is of."""
        storage = self._residency.storage_of(note.home, note.version)
        tensor = view_of(storage, note.dtype, note.offset // note.dtype.itemsize, note.size, note.stride)
        if not (note.conjugate or note.negative):
            return tensor
        with torch.inference_mode(mode=False), torch.no_grad():
            tensor = tensor.conj() if note.conjugate else tensor
            return torch._neg_view(tensor) if note.negative else tensor  # noqa: SLF001


class _Saved(NamedTuple):
    """A saved tensor that lies in no unit, with its version: torch checks no version of packed tensors."""

    values: torch.Tensor
    version: int

    def tensor(self) -> torch.Tensor:
        values, now = self.values, self.values._version  # noqa: SLF001
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{list(values.shape)} {values.dtype} is at version {now}, and was saved at version {self.version}"
            )
        return values


@dataclass(eq=False, slots=True)
class _Delegating:
    """Ours over hooks of user code (such as `save_on_cpu`): tensors outside of units are passed on."""

    hooks: SavedTensorHooks
    _pack: Callable[..., Any]
    _unpack: Callable[..., Any]

    def pack(self, tensor: torch.Tensor) -> Any:
        note = self.hooks.note_of(tensor)
        if note is not None:
            return (True, note)
        return (False, self._pack(torch.Tensor.detach(tensor) if _is_offloaded(tensor) else tensor))

    def unpack(self, saved: Any) -> torch.Tensor:
        ours, what = saved
        if ours:
            return self.hooks.tensor_of(what)
        tensor: torch.Tensor = self._unpack(what)
        return tensor


@dataclass(eq=False, slots=True)
class _OverCheckpoint:
    """Ours over a checkpoint's, which keeps saved tensors as they are: a view keeps its bytes, a parameter does not.

    Of a tensor that needs a gradient it makes a view itself; a frozen parameter would be offloaded in the backward.
    """

    hooks: SavedTensorHooks
    _pack: Callable[..., Any]

    # So torch finds the hooks of users beneath: tensors that a selective checkpoint caches are not for these.
    _checkpoint_internal = True

    @property
    def _user_hooks(self) -> Any:
        return getattr(self._pack, "_user_hooks", None)

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self._pack(torch.Tensor.detach(tensor) if _is_offloaded(tensor) else tensor)


def _is_offloaded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and "_memascend" in tensor.__dict__


def _owner(pack: Callable[..., Any]) -> SavedTensorHooks | None:
    """Whose a pack hook is, where it is one of this module's."""
    owner = pack if isinstance(pack, _OverCheckpoint) else getattr(pack, "__self__", None)
    if isinstance(owner, (_Delegating, _OverCheckpoint)):
        return owner.hooks
    return owner if isinstance(owner, SavedTensorHooks) else None


@dataclass(eq=False, repr=False)
class Residency:
    """Materializes the parameters of units, and offloads them. All of it runs under one lock; compute does not.

    Attributes:
        units: the units and their bytes.
        frames: the modules that are being computed.
        turns: of the threads that use parameters.
        hooks: on the tensors that autograd saves.
        copies: of weights, which user code was given.
        stages: is notified of each unit before it is used, while micro-batches are computed; None otherwise.
        session: of the run.
    """

    _memory: UnitMemory
    _limits: Limits
    engine: InitVar[Engine]  # has the updates, which may hold units until they are done
    model: torch.nn.Module
    _scratch: Path | None  # the folder for copies of weights; None: none was named
    keeper: InitVar[Activations | None]  # keeps saved tensors that lie in no unit

    def __post_init__(self, engine: Engine, keeper: Activations | None) -> None:
        self.lock = ProcessLock()
        self.turns = Turns(self.lock)
        self.units = CachedUnits(self._memory, self._limits, self.lock, engine)
        self.frames = Frames(self)
        self.hooks = SavedTensorHooks(self, keeper)
        self.copies = WeightCopies(self)
        # While micro-batches are computed.
        self.stages: Recorder | PartialSums | None = None
        # Takes the values that a state dict has for a parameter, while one is being loaded.
        self._load: Callable[[Place, torch.Tensor], None] | None = None

    def followed_by(self, stages: Recorder | PartialSums) -> AbstractContextManager[None]:
        """Inside, `stages` takes the gradients that arrive, and is notified of each unit before it is used."""
        return replaced(self, "stages", stages)

    def serve(self, session: Session) -> None:
        """Belong to a session, before the first use; it is made of this object, and so comes later."""
        self.session = session

    # --- materializing ---------------------------------------------------------

    def materialize(self, home: Home) -> None:
        """Let a unit's parameters have their values in this thread. Every call is ended by `offload`."""
        if self._memory.device is not None:
            self._memory.device.require_no_capture()
        here = current()
        with self.lock:
            self.turns.wait_to_materialize(partial(self.units.holders_of_room, home, here))
            if home.holders:
                home.count(here, 1)
                return
            guarded = self.turns.several or self.turns.others_alive()
            # Through views that were taken while the model computed.
            self.units.find_written((home,))
            with unseen():
                self.units.use(home)
                try:
                    home.materialize(here, guarded=guarded)
                except BaseException:
                    self.offload(home)
                    raise

    def offload(self, home: Home, holder: int | None = None) -> None:
        """Undo `materialize`; `holder`: its thread, where that is another."""
        here = current() if holder is None else holder
        with self.lock:
            if here not in home.holders:
                # close() or `offload_all` have ended it already.
                return
            is_last = sum(home.holders.values()) == 1
            if is_last:
                self.units.find_written((home,))
                home.offload()
            home.count(here, -1)
            if is_last:
                self.turns.note_release()

    def offload_all(self, holder: int) -> None:
        """Offload all units of a thread: it computes nothing, and interrupts may come between any two lines."""
        with self.lock:
            for home in self.units.homes:
                while holder in home.holders:
                    self.offload(home, holder)

    def holds(self, place: Place) -> bool:
        """Whether a parameter that asks is materialized in this thread."""
        return current() in self.units.home_of[place.name].holders

    @contextmanager
    def borrowed(self, places: Iterable[Place]) -> Iterator[None]:
        """Materialize the units of some parameters for one operation."""
        self.units.require_open()
        self.session.run.gradients.touched(places)
        with self.turns.touching(), ExitStack() as undo:
            for home in self._homes(places):
                self.materialize(home)
                undo.callback(self.offload, home)
            if self.hooks.push():
                undo.callback(self.hooks.pop)
            yield

    def _homes(self, places: Iterable[Place]) -> list[Home]:
        """The units of some parameters, each once."""
        return list({home.index: home for home in (self.units.home_of[place.name] for place in places)}.values())

    def fits(self, places: Iterable[Place]) -> bool:
        """Whether the units of some parameters fit into memory together."""
        sizes = [home.slot_bytes for home in self._homes(places) if not home.in_ram]
        return all(sizes.count(size) <= self._limits.slots.get(size, 0) for size in set(sizes))

    def loading(self, load: Callable[[Place, torch.Tensor], None]) -> AbstractContextManager[None]:
        """Inside, `load` gets the values that are copied to a parameter."""
        return replaced(self, "_load", load)

    @property
    def is_loading(self) -> bool:
        """Whether a state dict is being loaded."""
        return self._load is not None

    def loaded(self, place: Place, values: torch.Tensor) -> bool:
        """Take values of a state dict that is being loaded; False elsewhere."""
        if self._load is None:
            return False
        self._load(place, values)
        return True

    def copy_of(self, place: Place) -> torch.Tensor:
        """A parameter's values in an unlinked file, as a tensor that nothing else sees."""
        return self.read_into(place, lambda values: self.filed(place, values))

    def filed(self, place: Place, values: torch.Tensor) -> torch.Tensor:
        """A copy of such values, which are laid out as the parameter's, in an unlinked file."""
        return filed_copy(place, values, self._scratch)

    def read_into(self, place: Place, take: Callable[[torch.Tensor], _Taken]) -> _Taken:
        """What `take` makes of a parameter's values, which it has for as long as it runs."""
        home = self.units.home_of[place.name]
        self.materialize(home)
        try:
            return take(home.view(place))
        finally:
            self.offload(home)

    def require_idle(self, call: str) -> None:
        """Refuse a call that may not come while units are in use, in whichever thread."""
        with self.lock:
            used = next((home.name for home in self.units.homes if home.holders), None)
        if used is not None:
            raise UsageError(
                f"unit {used!r} is in use: call {call} outside of the model's forward and of materialized()"
            )

    def close(self, why: str) -> None:
        """Release everything; afterwards a use of a parameter raises `UsageError(why)`."""
        with self.lock:
            for holder in {holder for home in self.units.homes for holder in home.holders}:
                self.offload_all(holder)
            self.units.close(why)
            self.copies.close()

    def storage_of(self, home: Home, version: int) -> torch.UntypedStorage:
        """The bytes of a unit as they were at `version`."""
        if self.stages is not None:
            self.stages.arrive((home,))
        if self._memory.device is not None:
            self._memory.device.require_no_capture()
        with self.lock:
            self.turns.wait_to_read(partial(self.units.holders_of_room, home, current()))
            if home.version != version:
                raise UsageError(
                    f"a graph needs unit {home.name!r} as it was before step(), or before its values were changed: "
                    "call backward() before that, or run the forward again"
                )
            return self.units.use(home).untyped_storage()
