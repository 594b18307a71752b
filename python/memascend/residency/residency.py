"""Binds parameters to their bytes for modules, single operations and backwards, and takes them away again."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from memascend.errors import UsageError
from memascend.residency.access import ProcessLock, Turns
from memascend.residency.away import said
from memascend.residency.reached_weights import ReachedWeights
from memascend.residency.resident_units import ResidentUnits
from memascend.residency.saved_tensors import SavedTensorHooks
from memascend.residency.threads import current, others_alive
from memascend.residency.transfers import Transfers
from memascend.residency.unit_slot import view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from memascend.residency.copies import Copies
    from memascend.residency.environment import Limits, Listener, Memory, Moment, Stages
    from memascend.residency.placeholder import Place
    from memascend.residency.saved_tensors import Keeper
    from memascend.residency.unit_slot import Home
    from memascend.residency.unseen_writes import Sums


class Residency:
    """Makes the parameters of units real and lets them be away. All of it runs under one lock; compute does not.

    Attributes:
        units: the units and their bytes.
        turns: of the threads that use parameters.
        hooks: what keeps what autograd saves of units.
        transfers: state dicts that are being made or loaded.
        reached: weights that have memory of their own between forwards.
        stages: hears of each unit before it is used, while micro-batches are computed; None otherwise.
    """

    def __init__(
        self,
        memory: Memory,
        limits: Limits,
        listener: Listener,
        copies: Copies,
        moment: Moment,
        *,
        keeper: Keeper | None = None,
        sums: Sums,
    ) -> None:
        """Begin with nothing resident.

        `keeper` keeps what autograd saves and lies in no unit; `sums` finds what was written to past torch's counters.
        """
        self._memory = memory
        self._limits = limits
        self._listener = listener
        self._copies = copies
        self.lock = ProcessLock()
        self.turns = Turns(self.lock)
        self.units = ResidentUnits(memory, limits, copies, self.turns, moment.busy, sums)
        self.hooks = SavedTensorHooks(self, keeper)
        self.transfers = Transfers()
        self.reached = ReachedWeights(self, copies, moment)
        self.stages: Stages | None = None

    # --- binding ---------------------------------------------------------------

    def bind(self, home: Home) -> None:
        """Make a unit's parameters real. Every call is ended by `unbind`."""
        self._memory.require_usable()
        here = current()
        with self.lock:
            self.turns.wait_to_bind()
            if home.bound == 0:
                # Through views that were taken while the model computed.
                self.units.find_written_in(home, [place.name for place in home.places if place.written])
                base = self.units.use(home)
                if home.views is None:
                    home.views = [view(base, place) for place in home.places]
                home.guarded = self.turns.several or others_alive(self.turns.first)
                # Counted before: what an interrupt leaves half bound is found by `release`.
                home.count(here, 1)
                try:
                    for place, values in zip(home.places, home.views, strict=True):
                        place.bind(values, guarded=home.guarded)
                except BaseException:
                    self.unbind(home)
                    raise
            else:
                home.count(here, 1)

    def unbind(self, home: Home, holder: int | None = None) -> None:
        """End what `bind` began; `holder`: the thread that it began in, where that is another."""
        here = current() if holder is None else holder
        with self.lock:
            if here not in home.holders:
                # close() or `release` have ended it already.
                return
            if home.bound > 1:
                home.count(here, -1)
                return
            self._take_away(home)
            home.count(here, -1)
        self._listener.used()

    def release(self, holder: int) -> None:
        """End what a thread has bound: it computes nothing, and interrupts may come between any two lines."""
        with self.lock:
            for home in self.units.homes:
                if not (home.bound or home.holders):
                    continue
                if home.holders.keys() <= {holder}:
                    self._take_away(home)
                # Not the sum: an interrupt may have come between the two.
                home.count(holder, -home.holders.get(holder, 0))

    def _take_away(self, home: Home) -> None:
        """Let the parameters of a unit be away; done again after an interrupt it does the rest."""
        self.units.find_written_in(home, [place.name for place in home.places if place.written])
        for place in home.places:
            place.unbind()

    def holds(self, place: Place) -> bool:
        """Whether this thread has bound a parameter that asks."""
        return current() in self.units.home_of[place.name].holders

    def note_data(self, place: Place) -> None:
        """Somebody takes the `.data` of a parameter, which is watched from here on where it is bound."""
        with self.lock:
            home = self.units.home_of[place.name]
            if home.bound:
                self.units.sums.take(home, place)

    def require_away(self, place: Place) -> None:
        """Refuse other memory for a parameter that is bound."""
        if self.units.home_of[place.name].bound:
            raise UsageError(said(repr(place.name), "replaced through .data"))

    @contextmanager
    def borrowed(self, places: Iterable[Place]) -> Iterator[None]:
        """Bind the units of some parameters for one operation."""
        self.units.require_open()
        self.transfers.settle()
        self._listener.borrowed(places)
        homes = list({id(home): home for home in (self.units.home_of[place.name] for place in places)}.values())
        bound: list[Home] = []
        pushed = False
        with self.turns.touching():
            try:
                for home in homes:
                    self.bind(home)
                    bound.append(home)
                pushed = self.hooks.push()
                yield
            finally:
                if pushed:
                    self.hooks.pop()
                for home in reversed(bound):
                    self.unbind(home)

    def fits(self, places: Iterable[Place]) -> bool:
        """Whether the units of some parameters have room in memory together."""
        homes = {id(home): home for home in (self.units.home_of[place.name] for place in places)}.values()
        sizes = [home.slot_bytes for home in homes if not home.held]
        return all(sizes.count(size) <= self._limits.slots.get(size, 0) for size in set(sizes))

    def detached(self, place: Place) -> torch.Tensor | None:
        """A copy of a parameter's values where a state dict is made; None elsewhere."""
        if place.device.type == "cpu" and not self.reached.computes:
            # Memory that is watched.
            return self.transfers.detached(place, self.reached.for_state_dict)
        return self.transfers.detached(place, self.copy_of)

    def assigned(self, place: Place, values: torch.Tensor) -> bool:
        """Write values through to storage where a state dict is being loaded; False elsewhere."""
        return self.transfers.assigned(place, values)

    def copy_of(self, place: Place) -> torch.Tensor:
        """A parameter's values in an unlinked file, as a tensor that nothing else sees."""
        self.transfers.settle()
        home = self.units.home_of[place.name]
        self.bind(home)
        try:
            return self._copies.of(place)
        finally:
            self.unbind(home)

    def read_into(self, place: Place, take: Callable[[torch.Tensor], None]) -> None:
        """Let `take` have a parameter's values, for as long as it runs."""
        home = self.units.home_of[place.name]
        self.bind(home)
        try:
            assert home.base is not None
            take(view(home.base, place))
        finally:
            self.unbind(home)

    def require_idle(self, call: str) -> None:
        """Refuse a call that may not come while units are in use, in whichever thread."""
        with self.lock:
            used = next((home.name for home in self.units.homes if home.bound), None)
        if used is not None:
            raise UsageError(
                f"unit {used!r} is in use: call {call} outside of the model's forward and of materialized()"
            )

    def close(self, why: str) -> None:
        """Let everything go; afterwards a touch of a parameter raises `UsageError(why)`."""
        with self.lock:
            for home in self.units.homes:
                if home.bound or home.holders:
                    self._take_away(home)
                    home.holders.clear()
                    home.bound = 0
            self.units.close(why)

    def storage_of(self, home: Home, version: int) -> torch.UntypedStorage:
        """The bytes of a unit as they were at `version`."""
        if self.stages is not None:
            self.stages.arrive((home,))
        self._memory.require_usable()
        self.transfers.settle()
        self.reached.note_walk()
        with self.lock:
            if home.version != version:
                raise UsageError(
                    f"a graph needs unit {home.name!r} as it was before step(), or before it was written to: call "
                    "backward() before that, or run the forward again"
                )
            return self.units.use(home).untyped_storage()
