"""Loads the values of parameters for modules, operations and backwards, and offloads the parameters afterwards."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from memascend.errors import UsageError
from memascend.params.cached_units import CachedUnits
from memascend.params.module_hooks import Frames
from memascend.params.saved_tensors import SavedTensorHooks
from memascend.params.threads import ProcessLock, Turns, current
from memascend.params.weight_access import WeightCopies, filed_copy, unseen
from memascend.text import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from memascend.activations.activations import Activations
    from memascend.device.unit_memory import UnitMemory
    from memascend.grads.baton import Recorder
    from memascend.grads.microbatches import PartialSums
    from memascend.params.offloaded_param import Place
    from memascend.params.unit import CachedUnit, Limits
    from memascend.session.session import Session
    from memascend.storage import Engine


_Taken = TypeVar("_Taken")


@dataclass(eq=False, repr=False)
class Residency:
    """Materializes and offloads the parameters of units. A lock guards these actions; modules compute without the lock.

    Attributes:
        units: the units and the cache of their bytes.
        frames: the modules that threads are computing.
        turns: decides which threads may use parameters, and when one thread may change them.
        hooks: the hooks on tensors that autograd saves.
        copies: the copies of weights that user code was given.
        stages: while `accumulate()` records the uses of units or computes by layer, the object that is notified before
            each use of a unit; None at other times.
        session: the session of the run; set by `serve`.
    """

    _memory: UnitMemory
    _limits: Limits
    engine: InitVar[Engine]  # reads units; an update may use a unit's bytes until the update ends
    model: torch.nn.Module
    # The folder for copies of weights; None if the storage is a raw device and the user named no folder.
    _scratch: Path | None
    keeper: InitVar[Activations | None]  # offloads checkpointed activations; None: no activations are offloaded

    def __post_init__(self, engine: Engine, keeper: Activations | None) -> None:
        self.lock = ProcessLock()
        self.turns = Turns(self.lock)
        self.units = CachedUnits(self._memory, self._limits, self.lock, engine)
        self.frames = Frames(self)
        self.hooks = SavedTensorHooks(self, keeper)
        self.copies = WeightCopies(self)
        self.stages: Recorder | PartialSums | None = None
        # The function that takes a parameter's new values while a state dict is being loaded; None at other times.
        self._load: Callable[[Place, torch.Tensor], None] | None = None

    def followed_by(self, stages: Recorder | PartialSums) -> AbstractContextManager[None]:
        """Context manager in which `stages` gets the gradients, and is notified of each unit before its use."""
        return replaced(self, "stages", stages)

    def serve(self, session: Session) -> None:
        """Sets the session, which is created after this object. Call this method before a parameter is used."""
        self.session = session

    # --- materializing ---------------------------------------------------------

    def materialize(self, unit: CachedUnit) -> None:
        """Gives a unit's parameters their values in this thread. `offload` must follow each call."""
        if self._memory.device is not None:
            self._memory.device.require_no_capture()
        here = current()
        with self.lock:
            self.turns.wait_to_materialize(partial(self.units.holders_of_room, unit, here))
            if unit.holders:
                unit.count(here, 1)
                return
            guarded = self.turns.several or self.turns.others_alive()
            # Code may have written to the parameters through views from an earlier forward.
            self.units.find_written((unit,))
            with unseen():
                self.units.use(unit)
                try:
                    unit.materialize(here, guarded=guarded)
                except BaseException:
                    self.offload(unit)
                    raise

    def offload(self, unit: CachedUnit, holder: int | None = None) -> None:
        """Undoes one call of `materialize`; `holder` is the thread that made the call, if not the current thread."""
        here = current() if holder is None else holder
        with self.lock:
            if here not in unit.holders:
                # `close` or `offload_all` has undone the call already.
                return
            is_last = sum(unit.holders.values()) == 1
            if is_last:
                self.units.find_written((unit,))
                unit.offload()
            unit.count(here, -1)
            if is_last:
                self.turns.note_release()

    def offload_all(self, holder: int) -> None:
        """Undoes all calls of `materialize` by the thread `holder`, such as calls that an interrupt left."""
        with self.lock:
            for unit in self.units.all:
                while holder in unit.holders:
                    self.offload(unit, holder)

    def holds(self, place: Place) -> bool:
        """True if this thread has materialized the unit of a parameter."""
        return current() in self.units.unit_of[place.name].holders

    @contextmanager
    def borrowed(self, places: Iterable[Place]) -> Iterator[None]:
        """Context manager that materializes the units of some parameters for one operation."""
        self.units.require_open()
        self.session.run.gradients.touched(places)
        with self.turns.touching(), ExitStack() as undo:
            for unit in self._units_of(places):
                self.materialize(unit)
                undo.callback(self.offload, unit)
            if self.hooks.push():
                undo.callback(self.hooks.pop)
            yield

    def _units_of(self, places: Iterable[Place]) -> list[CachedUnit]:
        """Returns the units of some parameters, each once."""
        return list({unit.index: unit for unit in (self.units.unit_of[place.name] for place in places)}.values())

    def fits(self, places: Iterable[Place]) -> bool:
        """True if the units of some parameters fit into memory together."""
        sizes = [unit.slot_bytes for unit in self._units_of(places) if not unit.in_ram]
        return all(sizes.count(size) <= self._limits.slots.get(size, 0) for size in set(sizes))

    def loading(self, load: Callable[[Place, torch.Tensor], None]) -> AbstractContextManager[None]:
        """Context manager in which `load` gets the values that code copies to a parameter."""
        return replaced(self, "_load", load)

    @property
    def is_loading(self) -> bool:
        """True while a state dict is being loaded."""
        return self._load is not None

    def loaded(self, place: Place, values: torch.Tensor) -> bool:
        """Passes values for a parameter to the running load of a state dict; returns False if no load is running."""
        if self._load is None:
            return False
        self._load(place, values)
        return True

    def copy_of(self, place: Place) -> torch.Tensor:
        """Returns a copy of a parameter's values, as a tensor on an unlinked file that no other code maps."""
        return self.read_into(place, lambda values: self.filed(place, values))

    def filed(self, place: Place, values: torch.Tensor) -> torch.Tensor:
        """Copies `values` to an unlinked file; returns a tensor on this file. `values` have the parameter's strides."""
        return filed_copy(place, values, self._scratch)

    def read_into(self, place: Place, take: Callable[[torch.Tensor], _Taken]) -> _Taken:
        """Returns `take(values)` for a parameter's values; `take` must not keep the tensor."""
        unit = self.units.unit_of[place.name]
        self.materialize(unit)
        try:
            return take(unit.view(place))
        finally:
            self.offload(unit)

    def require_idle(self, call: str) -> None:
        """Raises UsageError if any thread uses a unit; in the message, `call` stands for the call that is rejected."""
        with self.lock:
            used = next((unit.name for unit in self.units.all if unit.holders), None)
        if used is not None:
            raise UsageError(
                f"unit {used!r} is in use: call {call} outside of the model's forward and of materialized()"
            )

    def close(self, why: str) -> None:
        """Offloads and evicts all units; afterwards a use of a parameter raises `UsageError(why)`."""
        with self.lock:
            for holder in {holder for unit in self.units.all for holder in unit.holders}:
                self.offload_all(holder)
            self.units.close(why)
            self.copies.close()

    def storage_of(self, unit: CachedUnit, version: int) -> torch.UntypedStorage:
        """Returns the bytes of a unit; reads them first if they are not cached.

        Raises:
            UsageError: the unit's values have changed since `version`, or the run has been closed.
            MemascendError: the unit cannot be read.
        """
        if self.stages is not None:
            self.stages.arrive((unit,))
        if self._memory.device is not None:
            self._memory.device.require_no_capture()
        with self.lock:
            self.turns.wait_to_read(partial(self.units.holders_of_room, unit, current()))
            if unit.version != version:
                raise UsageError(
                    f"this backward needs the values that unit {unit.name!r} had before step(), or before code changed "
                    "them: call backward() before the values change, or run the forward again"
                )
            return self.units.use(unit).untyped_storage()
