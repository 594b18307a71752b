"""Caches units in memory: reads a unit before its use, and evicts other units to make room.

[Note: living bytes] An eviction drops only the cache's own reference to a slot. If autograd, an update or user code has
a view of the slot, the slot stays leased until the last view is gone, and its bytes stay alive. `CachedUnit.weak`
refers to such bytes: while they are alive and of the current version, `CachedUnit.adopt` caches them again without a
read.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from typing import TYPE_CHECKING

import torch

from memascend.errors import BudgetError, TimeoutExpired, UsageError
from memascend.params.settling import Settling
from memascend.params.threads import FORKED, OwnProcess
from memascend.params.unit import Bytes, CachedUnit, alive
from memascend.text import bytes_shown, size_option

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable

    from memascend.device.unit_memory import UnitMemory
    from memascend.params.offloaded_param import Place
    from memascend.params.threads import ProcessLock
    from memascend.params.unit import Limits
    from memascend.storage import Engine


# `Order.next_use` returns this for a unit that is not expected to be used.
_NEVER = 1 << 60
# How many uses `Order` records in one step at most; a long generate() has more.
_RECORDED_MAX = 1 << 16


class Order:
    """The order in which units are used: recorded in one step, expected in the next.

    Attributes:
        last_used: the number of each unit's last use, by the unit's index; uses are counted over the whole run.
    """

    __slots__ = ("_clock", "_expected", "_position", "_recorded", "_uses", "last_used")

    def __init__(self) -> None:
        self.last_used: dict[int, int] = {}
        self._clock = 0
        self._expected: list[int] = []
        self._uses: dict[int, list[int]] = {}
        self._recorded: list[int] = []
        self._position = 0

    def expect(self, indices: Iterable[int]) -> None:
        """Expects units to be used in this order, until `end` has recorded the order of a step."""
        self._expected = list(indices)
        self._uses = {}
        for position, index in enumerate(self._expected):
            self._uses.setdefault(index, []).append(position)
        self._position = 0

    def went_to(self, index: int) -> None:
        """Records that a unit is used now."""
        self._clock += 1
        self.last_used[index] = self._clock
        if self._recorded and self._recorded[-1] == index:
            return
        if len(self._recorded) < _RECORDED_MAX:
            self._recorded.append(index)
        uses = self._uses.get(index)
        if uses:
            # If this step takes another path than the last step, the position jumps to the next expected use of this
            # unit; if none follows, to the first expected use.
            self._position = uses[bisect_left(uses, self._position) % len(uses)] + 1

    def ahead(self, count: int, beside: Container[int] = ()) -> list[int]:
        """Returns at most `count` units that are expected next, without those in `beside`."""
        total = len(self._expected)
        found: list[int] = []
        looked = 0
        for step in range(total):
            index = self._expected[(self._position + step) % total]
            if index in beside:
                continue
            looked += 1
            if index not in found:
                found.append(index)
            if len(found) >= count or looked >= 4 * count:
                break
        return found

    def next_use(self, index: int) -> int:
        """Returns how many uses from now a unit is expected to be used again."""
        uses = self._uses.get(index)
        if not uses:
            return _NEVER
        at = bisect_left(uses, self._position)
        if at < len(uses):
            return uses[at] - self._position
        return uses[0] + len(self._expected) - self._position

    def is_used_again(self, index: int) -> bool:
        """True if the rest of the step is expected to use a unit."""
        uses = self._uses.get(index, [])
        return bisect_left(uses, self._position) < len(uses)

    def end(self) -> None:
        """Ends the step: its recorded order is expected in the next step."""
        if self._recorded:
            self.expect(self._recorded)
        self._recorded = []
        self._position = 0


def victim_for(
    unit: CachedUnit, units: Iterable[CachedUnit], order: Order, current: CachedUnit | None, *, must: bool
) -> CachedUnit | None:
    """Returns the unit to evict for `unit`: the unit with slots of the same size whose next use is farthest.

    Without `must`, returns None rather than a unit that is used before `unit`. `current`, the unit of the last
    `CachedUnits.use`, is never returned.
    """
    stay = {Bytes.OFFLOADED} if must else {Bytes.OFFLOADED, Bytes.READING}
    same_size = (other for other in units if other.slot_bytes == unit.slot_bytes and other not in (unit, current))
    best = max(
        (other for other in same_size if not (other.holders or other.pinned or other.state in stay)),
        key=lambda other: (order.next_use(other.index), -order.last_used.get(other.index, 0)),
        default=None,
    )
    if best is not None and not must and order.next_use(best.index) <= order.next_use(unit.index):
        return None
    return best


def is_leaving(unit: CachedUnit, units: Iterable[CachedUnit]) -> bool:
    """True if an evicted unit with slots of the same size has living bytes; see [Note: living bytes]."""
    return any(
        other.slot_bytes == unit.slot_bytes
        and other is not unit
        and other.state is Bytes.OFFLOADED
        and other.weak is not None
        and not other.weak[0].expired()
        for other in units
    )


def holders_beside(unit: CachedUnit, units: Iterable[CachedUnit]) -> str:
    """Returns the names of the units whose bytes occupy slots of the size that `unit` needs, for an error message."""
    return ", ".join(
        other.name
        for other in units
        if other.slot_bytes == unit.slot_bytes and other.weak is not None and alive(other.weak[0]) is not None
    )


def is_useless(unit: CachedUnit, order: Order) -> bool:
    """True if a unit's bytes have no more use: this step does not use the unit again, and the commit changes it."""
    return unit.trained and not order.is_used_again(unit.index)


_log = logging.getLogger("memascend")
# `_room` waits this long for a lease: `_RELEASE_SECONDS` each time while views keep the slot of an evicted unit, and
# `_LAST_SECONDS` before it gives up.
_RELEASE_SECONDS = 0.05
_LAST_SECONDS = 1.0
# How many units beyond the planned lookahead are fetched if a slot is free.
_FARTHER = 3


class CachedUnits:
    """The units of a model, and the cache of their bytes in the arena.

    Attributes:
        all: the units, in the order in which they were added.
        unit_of: the unit of each parameter, by the parameter's name.
        at: by address, the unit whose bytes were last stored there, and the version of these bytes.
        order: the order in which units are used.
        closed: after `close`, the message of the error that each use raises; None before `close`.
        written: the names of parameters that user code wrote to in place while they were materialized.
        counters: the numbers of fetches, hits, adoptions and evictions, for reports.
    """

    def __init__(self, memory: UnitMemory, limits: Limits, lock: ProcessLock, engine: Engine) -> None:
        """Starts without units. `Residency` describes the arguments."""
        self._memory = memory
        self._arena = memory.arena
        self._limits = limits
        self._lock = lock
        self._process = OwnProcess()
        self._engine = engine
        self.all: list[CachedUnit] = []
        self.unit_of: dict[str, CachedUnit] = {}
        self.order = Order()
        # The indices of units in the RAM tier, which are always in memory.
        self._ram_tier: set[int] = set()
        self.closed: str | None = None
        self.written: set[str] = set()
        # Chooses which fetch of a unit writes the updates that the last step deferred.
        self.settling = Settling()
        self.counters = {"fetches": 0, "hits": 0, "adopted": 0, "evictions": 0}
        self.at: dict[int, tuple[CachedUnit, int]] = {}
        # The unit of the last `use`, which is not evicted for a unit that is only fetched ahead.
        self._current: CachedUnit | None = None

    def add(self, name: str, places: list[Place], nbytes: int, *, pinned: bool, in_ram: bool = False) -> None:
        """Adds a unit of `nbytes` bytes; `in_ram`: its values are in the RAM tier, so the unit needs no slot."""
        fitting = (size for size in sorted(self._limits.slots) if size >= nbytes)
        slot_bytes = 0 if in_ram else next(fitting, nbytes)
        unit = CachedUnit(len(self.all), name, nbytes, slot_bytes, pinned=pinned, in_ram=in_ram, places=places)
        self.all.append(unit)
        if in_ram:
            self._ram_tier.add(unit.index)
        self.unit_of.update((place.name, unit) for place in places)

    def require_open(self) -> None:
        """Raises UsageError after `close`, and in a forked child."""
        if self.closed:
            raise UsageError(self.closed)
        if self._process.is_elsewhere:
            raise UsageError(FORKED)

    # --- reading ------------------------------------------------------------------------

    def use(self, unit: CachedUnit) -> torch.Tensor:
        """Returns the bytes of a unit once they have been read; also begins to fetch the next units."""
        with self._lock:
            self.require_open()
            self._current = unit
            self.order.went_to(unit.index)
            if unit.in_ram and unit.is_stale(self._engine.store.ram_tier_epoch):
                self.evict(unit)
            if unit.base is None:
                self._bring(unit)
            else:
                self.counters["hits"] += 1
            self.look_ahead()
            base = unit.base
            assert base is not None
            if self._memory.device is not None:
                self._memory.used(base)
            return base

    def _bring(self, unit: CachedUnit) -> None:
        """Puts the bytes of a unit into memory; after an interrupt the next `use` calls this again."""
        if unit.in_ram:
            store = self._engine.store
            # The epoch is read before the values: if an update changes the values in between, the next `use` finds the
            # unit stale.
            epoch = store.ram_tier_epoch
            with torch.inference_mode(mode=False):
                values = store.ram_tier_unit(unit.name)
            assert values is not None, f"unit {unit.name!r} is not in RAM"
            self.at[values.data_ptr()] = (unit, unit.version)
            unit.stand(values, epoch)
            return
        if unit.state is Bytes.OFFLOADED:
            if self._adopt(unit):
                return
            self._start(unit, must=True)
        unit.arrive()

    def _start(self, unit: CachedUnit, *, must: bool) -> bool:
        """Takes memory and begins the read of a unit; False if there is no memory now and not `must`."""
        settle = self._engine.is_behind and self.settling.settles(unit.fetched)
        base = self._room(unit, must=must)
        if base is None:
            return False
        unit.begin_read(self._memory.begin(unit.name, base, settle=settle), base)
        self.at[base.data_ptr()] = (unit, unit.version)
        self.counters["fetches"] += 1
        return True

    def _adopt(self, unit: CachedUnit) -> bool:
        """Caches living bytes of the current version again; False if there are none. See [Note: living bytes]."""
        adopted = unit.adopt()
        self.counters["adopted"] += adopted
        return adopted

    def look_ahead(self) -> None:
        """Begins to fetch the next units into memory that is free now."""
        # `_FARTHER` more units are fetched if that evicts no unit which this step uses again: embeddings and LM heads
        # have slots of their own, and the drive should not idle until these units are next.
        near = self._limits.lookahead
        with self._lock:
            if self.closed or len(self._ram_tier) == len(self.all):
                return
            for number, index in enumerate(self.order.ahead(near + _FARTHER if near else 0, self._ram_tier)):
                unit = self.all[index]
                if unit.holders or unit.state is not Bytes.OFFLOADED:
                    # Within materialized(), units have holders and no bytes: their parameters have copies.
                    continue
                if is_useless(unit, self.order) or self._adopt(unit):
                    # A useless unit is fetched only after the commit that changes its values. An adopted unit needs no
                    # read.
                    continue
                room = number < near or self._arena.free_slots(unit.nbytes) or self._has_useless(unit)
                if room and not self._start(unit, must=False):
                    return

    def _has_useless(self, unit: CachedUnit) -> bool:
        """True if evicting some cached unit with slots of the same size costs this step no further read."""
        return any(
            other.slot_bytes == unit.slot_bytes
            and other.base is not None
            and not (other.holders or other.pinned)
            and is_useless(other, self.order)
            for other in self.all
        )

    # --- freeing memory -----------------------------------------------------------------

    def _room(self, unit: CachedUnit, *, must: bool) -> torch.Tensor | None:
        """Returns memory for a unit; None if none is free now and the unit is not needed yet (not `must`)."""
        waited, evicted = 0.0, False
        while True:
            # Free slots are counted first, since a lease that fails is slower: it makes an error with its message.
            if waited or self._arena.free_slots(unit.nbytes):
                try:
                    return self._memory.take(unit.nbytes, waited)
                except TimeoutExpired:
                    if waited == _LAST_SECONDS and not self._engine.queued_bytes:
                        self._add_room(unit)
                        continue
            # For a unit that is only fetched ahead, at most one other unit is evicted.
            way = None if evicted and not must else self._way_to_room(unit, waited, must=must)
            if isinstance(way, CachedUnit):
                self.evict(way)
                waited, evicted = 0.0, True
            elif way is not None:
                waited = way
            else:
                return None

    def _way_to_room(self, unit: CachedUnit, waited: float, *, must: bool) -> CachedUnit | float | None:
        """Decides how to get memory for a unit, after a lease waited for `waited` seconds in vain.

        Returns:
            A unit to evict; or the seconds to wait for a lease; or None if the unit is not needed yet. After None the
            next use of any unit tries again, since waiting here would stop compute.
        """
        if is_leaving(unit, self.all):
            if not must:
                return None
            if waited != _LAST_SECONDS and (self._engine.queued_bytes or not waited):
                # Code that reads from a view releases it soon; an update releases its view when the update is done.
                return _RELEASE_SECONDS
        victim = victim_for(unit, self.all, self.order, self._current, must=must)
        return _LAST_SECONDS if victim is None and must else victim

    def holders_of_room(self, unit: CachedUnit, here: int) -> set[int]:
        """Returns the other threads whose modules occupy all memory for a unit; empty if the unit can get memory."""
        if unit.in_ram or unit.base is not None or self._arena.free_slots(unit.nbytes):
            return set()
        if victim_for(unit, self.all, self.order, None, must=True) is not None:
            return set()
        same_size = (other for other in self.all if other.slot_bytes == unit.slot_bytes)
        return {thread for other in same_size for thread in other.holders if thread != here}

    def _add_room(self, unit: CachedUnit) -> None:
        """Takes memory for a unit beyond the plan, which cannot know the views that user code keeps.

        Raises:
            BudgetError: the user gave a budget; the message has a budget that works.
        """
        limits, holders = self._limits, holders_beside(unit, self.all) or "units in use"
        if limits.add is None:
            smallest = limits.larger(unit.slot_bytes)
            raise BudgetError(
                f"no memory for unit {unit.name!r} ({bytes_shown(unit.nbytes)}): all places of its size are held by "
                f"views of {holders}, which a checkpoint segment of several blocks, another thread, or your code, "
                "keeps; "
                f'{limits.option}="{size_option(smallest)}" has a place for every unit',
                smallest=smallest,
            ) from None
        added = limits.add(unit.nbytes)
        _log.warning(
            "%d bytes beside the planned %s were added for unit %r: all places of its size are held by views of %s, "
            "which a checkpoint segment of several blocks, or your code, keeps",
            added,
            limits.option,
            unit.name,
            holders,
        )

    def evict(self, unit: CachedUnit) -> None:
        """Drops the cache's reference to a unit's bytes; see [Note: living bytes]."""
        with self._lock:
            unit.leave()
            self.counters["evictions"] += 1

    # --- values that change -------------------------------------------------------------

    def find_written(self, units: Iterable[CachedUnit]) -> None:
        """Evicts units whose parameters code wrote to in place, as `_version` shows: no commit has such bytes."""
        with self._lock:
            for unit in units:
                written = unit.written
                if not written:
                    continue
                self.written.update(written)
                unit.note_written()
                # A write through the storage of one parameter may have reached the values of all parameters in the
                # unit.
                for place in unit.places if unit.in_ram else ():
                    self._engine.store.spoil(place.name)
                self.evict(unit)
                unit.forget()

    def forget_written(self, but: Collection[str] = ()) -> set[str]:
        """Forgets writes in place, except to parameters in `but`; returns the forgotten names."""
        found = self.written - set(but)
        self.written -= found
        return found

    def changed(self, names: Iterable[str]) -> None:
        """Evicts the units of parameters whose values on storage a commit has changed."""
        with self._lock:
            for index in {self.unit_of[name].index for name in names}:
                unit = self.all[index]
                unit.train()
                self.evict(unit)

    def read_again(self) -> None:
        """Evicts units that no thread uses, after updates were discarded.

        The engine may have rejected an update because a unit's cached values were not those of the last commit.
        """
        with self._lock:
            for unit in self.all:
                if not (unit.in_ram or unit.holders):
                    self.evict(unit)
                    unit.forget()

    def drop_reads(self) -> None:
        """Drops the reads that are under way when a commit begins, as they could mix values before and after it."""
        with self._lock:
            for unit in self.all:
                if unit.state is Bytes.READING and not unit.holders:
                    self.evict(unit)

    def end_step(self) -> None:
        """Ends the recorded order of the step, and begins to fetch the first units of the next step."""
        with self._lock:
            leaves = self._engine.is_behind
            if leaves or self.settling.was_left:
                self.settling.step_ended(leaves=leaves)
            self.order.end()
            self.look_ahead()

    # --- cached values, and the end ------------------------------------------------------

    def values_of(self, place: Place) -> torch.Tensor | None:
        """Returns the cached values of a parameter, as the last commit left them; None if its unit is not cached.

        The tensor is a view: the unit's slot stays leased until the view is deleted.
        """
        with self._lock:
            unit = self.unit_of[place.name]
            # The engine already has the values of the RAM tier, so it needs no view of them.
            return None if unit.base is None or unit.in_ram else unit.view(place)

    def close(self, why: str) -> None:
        """Evicts all units; afterwards `use` raises `UsageError(why)`."""
        self.closed = why
        for unit in self.all:
            self.evict(unit)
        self.at.clear()
