"""Caches units (parameters that are read together) in memory: reads a unit before its use, and evicts other units.

[Note: living bytes] An eviction drops only the cache's own reference to a slot. If autograd, an update or user code has
a view of the slot, the slot stays leased until the last view is deleted, and the bytes in the slot stay alive.
`CachedUnit.weak` refers to these bytes. If they are still alive and of the current version, `CachedUnit.adopt` caches
them again without a read.
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
# The largest number of uses that `Order` records in one step. A long call of generate() has more uses.
_RECORDED_MAX = 1 << 16


class Order:
    """Records the order in which a step uses units, and expects the next step to use units in the same order.

    Attributes:
        last_used: by the index of a unit, the number of its last use. Uses are numbered over the whole run.
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
        """Sets the order in which units are expected to be used, until `end` replaces it by the order of a step."""
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
            # The position moves behind the next expected use of this unit, even if this step uses units in another
            # order than the last step. If no use of this unit follows, it moves behind the first expected use.
            self._position = uses[bisect_left(uses, self._position) % len(uses)] + 1

    def ahead(self, count: int, beside: Container[int] = ()) -> list[int]:
        """Returns the indices of at most `count` units that are expected next, without the indices in `beside`."""
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
        """Returns the distance to a unit's next expected use, counted in uses of units."""
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
        """Ends the step. The next step is expected to use units in the order that this step recorded."""
        if self._recorded:
            self.expect(self._recorded)
        self._recorded = []
        self._position = 0


def victim_for(
    unit: CachedUnit, units: Iterable[CachedUnit], order: Order, current: CachedUnit | None, *, must: bool
) -> CachedUnit | None:
    """Returns the unit to evict for `unit`.

    Among the units with slots of the same size, it is the unit whose next expected use is farthest away. Returns None
    if no unit can be evicted; without `must`, also if no candidate is expected to be used later than `unit`. With
    `must`, units that are being read are candidates, too. Never returns `current`, the unit of the last
    `CachedUnits.use`.
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
    """True if an evicted unit still occupies a slot of the size that `unit` needs; see [Note: living bytes]."""
    return any(
        other.slot_bytes == unit.slot_bytes
        and other is not unit
        and other.state is Bytes.OFFLOADED
        and other.weak is not None
        and not other.weak[0].expired()
        for other in units
    )


def other_holders(unit: CachedUnit, units: Iterable[CachedUnit]) -> str:
    """Returns the names of the units whose bytes occupy slots of the size that `unit` needs, for a message."""
    return ", ".join(
        other.name
        for other in units
        if other.slot_bytes == unit.slot_bytes and other.weak is not None and alive(other.weak[0]) is not None
    )


def is_useless(unit: CachedUnit, order: Order) -> bool:
    """True if this step is not expected to use a unit again, and the commit is expected to change the unit's values."""
    return unit.trained and not order.is_used_again(unit.index)


_log = logging.getLogger("memascend")
# How long each attempt of `_room` waits for a lease at most: `_RELEASE_SECONDS` if views occupy the slot of an evicted
# unit, and `_LAST_SECONDS` before it takes more memory than planned or raises an error.
_RELEASE_SECONDS = 0.05
_LAST_SECONDS = 1.0
# How many units beyond the planned lookahead `look_ahead` fetches at most.
_FARTHER = 3


class CachedUnits:
    """The units of a model, and the cache of their bytes in the arena.

    Attributes:
        all: the units, in the order in which they were added.
        unit_of: the unit of each parameter, by the parameter's name.
        at: by the address of memory, the unit whose bytes were last stored in this memory, and the version of these
            bytes.
        order: the order in which units are used.
        closed: after `close`, the message of the error that each use raises; None before `close`.
        written: the names of parameters that user code wrote to in place while the parameters were materialized.
        counters: the numbers of fetches, hits, adoptions and evictions, for reports.
    """

    def __init__(self, memory: UnitMemory, limits: Limits, lock: ProcessLock, engine: Engine) -> None:
        """Creates a cache without units; `add` adds each unit."""
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
        # The unit of the last `use`. This unit is not evicted for a unit that is only fetched ahead.
        self._current: CachedUnit | None = None

    def add(self, name: str, places: list[Place], nbytes: int, *, pinned: bool, in_ram: bool = False) -> None:
        """Adds a unit of `nbytes` bytes. With `in_ram`, the unit's values are in the RAM tier, so it needs no slot."""
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
        """Returns the bytes of a unit, after a read if they are not in memory; also begins to fetch the next units."""
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
        """Puts the bytes of a unit into memory; after an interrupt the next `use` calls this method again."""
        if unit.in_ram:
            store = self._engine.store
            # The epoch is read before the values. If an update changes the values between these two reads, the unit
            # gets a stale epoch, and the next `use` takes the values again.
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
        """Takes memory for a unit and begins its read. Without `must`, returns False if `_room` finds no memory."""
        settle = self._engine.is_behind and self.settling.settles(unit.fetched)
        base = self._room(unit, must=must)
        if base is None:
            return False
        unit.begin_read(self._memory.begin(unit.name, base, settle=settle), base)
        self.at[base.data_ptr()] = (unit, unit.version)
        self.counters["fetches"] += 1
        return True

    def _adopt(self, unit: CachedUnit) -> bool:
        """Caches bytes of the unit again if views kept them alive, else returns False. See [Note: living bytes]."""
        adopted = unit.adopt()
        self.counters["adopted"] += adopted
        return adopted

    def look_ahead(self) -> None:
        """Begins to fetch the next units into slots that are free, or that an eviction frees at once."""
        # Beyond the lookahead, up to `_FARTHER` more units are fetched, but only into free slots or slots of units that
        # this step no longer needs. For example, often only embeddings and LM heads have slots of their size, so these
        # slots can be filled early, while the drive is idle.
        near = self._limits.lookahead
        with self._lock:
            if self.closed or len(self._ram_tier) == len(self.all):
                return
            for number, index in enumerate(self.order.ahead(near + _FARTHER if near else 0, self._ram_tier)):
                unit = self.all[index]
                if unit.holders or unit.state is not Bytes.OFFLOADED:
                    # Within materialized(), units have holders but no bytes, because their parameters are copies.
                    continue
                if is_useless(unit, self.order) or self._adopt(unit):
                    # A useless unit is fetched only after the commit that changes its values. A unit that `_adopt`
                    # cached needs no read.
                    continue
                room = number < near or self._arena.free_slots(unit.nbytes) or self._has_useless(unit)
                if room and not self._start(unit, must=False):
                    return

    def _has_useless(self, unit: CachedUnit) -> bool:
        """True if a cached unit with slots of the same size can be evicted, because this step does not use it again."""
        return any(
            other.slot_bytes == unit.slot_bytes
            and other.base is not None
            and not (other.holders or other.pinned)
            and is_useless(other, self.order)
            for other in self.all
        )

    # --- freeing memory -----------------------------------------------------------------

    def _room(self, unit: CachedUnit, *, must: bool) -> torch.Tensor | None:
        """Returns memory for a unit, after evictions if necessary.

        Without `must`, evicts at most one unit, and returns None instead of waiting. With `must`, raises BudgetError if
        no memory becomes free and the user gave a budget.
        """
        waited, evicted = 0.0, False
        while True:
            # Count the free slots first: a lease that fails is slower, because it makes an exception and its message.
            if waited or self._arena.free_slots(unit.nbytes):
                try:
                    return self._memory.take(unit.nbytes, waited)
                except TimeoutExpired:
                    if waited == _LAST_SECONDS and not self._engine.queued_bytes:
                        self._add_room(unit)
                        continue
            way = None if evicted and not must else self._way_to_room(unit, waited, must=must)
            if isinstance(way, CachedUnit):
                self.evict(way)
                waited, evicted = 0.0, True
            elif way is not None:
                waited = way
            else:
                return None

    def _way_to_room(self, unit: CachedUnit, waited: float, *, must: bool) -> CachedUnit | float | None:
        """Decides how to get memory for a unit, after a lease has waited `waited` seconds without success.

        Returns:
            A unit to evict; or the number of seconds to wait for a lease; or None if no memory is free and the unit is
            not needed yet. After None, the next use of any unit tries again, because waiting here would stop compute.
        """
        if is_leaving(unit, self.all):
            if not must:
                return None
            if waited != _LAST_SECONDS and (self._engine.queued_bytes or not waited):
                # Wait a short time: code that reads from a view soon deletes the view, and an update deletes its view
                # when it ends.
                return _RELEASE_SECONDS
        victim = victim_for(unit, self.all, self.order, self._current, must=must)
        return _LAST_SECONDS if victim is None and must else victim

    def holders_of_room(self, unit: CachedUnit, here: int) -> set[int]:
        """Returns the threads, except `here`, that have materialized units in the slots that `unit` could use.

        Returns an empty set if `unit` needs no slot or has one already, or if a slot is free or can be freed.
        """
        if unit.in_ram or unit.base is not None or self._arena.free_slots(unit.nbytes):
            return set()
        if victim_for(unit, self.all, self.order, None, must=True) is not None:
            return set()
        same_size = (other for other in self.all if other.slot_bytes == unit.slot_bytes)
        return {thread for other in same_size for thread in other.holders if thread != here}

    def _add_room(self, unit: CachedUnit) -> None:
        """Takes memory for a unit beyond the plan: the plan cannot know how many views user code keeps.

        Raises:
            BudgetError: the user gave a budget. The message names a larger budget.
        """
        limits, holders = self._limits, other_holders(unit, self.all) or "units in use"
        if limits.add is None:
            smallest = limits.larger(unit.slot_bytes)
            raise BudgetError(
                f"no memory for unit {unit.name!r} ({bytes_shown(unit.nbytes)}): all slots of its size are occupied. "
                "A checkpoint segment of several blocks, another thread, or your code keeps views of "
                f"{holders}: delete the views, or pass "
                f'{limits.option}="{size_option(smallest)}", which has memory for more units',
                smallest=smallest,
            ) from None
        added = limits.add(unit.nbytes)
        _log.warning(
            "allocated %d bytes more than the planned %s for unit %r: all slots of its size are occupied. A checkpoint "
            "segment of several blocks, another thread, or your code keeps views of %s. Delete such views to save "
            "memory",
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
        """Evicts each unit with a parameter that code wrote to in place, because no commit has the written values.

        Also adds such parameters to `written`. In the RAM tier, marks the values of the whole unit as overwritten.
        """
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
        """Removes all names from `written`, except the names in `but`; returns the removed names."""
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
        """Evicts all units outside of the RAM tier that no thread uses, after updates were discarded.

        The engine may have rejected an update because the cached values of a unit differed from the last commit. After
        the eviction the next use reads the values again.
        """
        with self._lock:
            for unit in self.all:
                if not (unit.in_ram or unit.holders):
                    self.evict(unit)
                    unit.forget()

    def drop_reads(self) -> None:
        """Discards the reads that are under way when a commit begins: they could mix old values with new values."""
        with self._lock:
            for unit in self.all:
                if unit.state is Bytes.READING and not unit.holders:
                    self.evict(unit)

    def end_step(self) -> None:
        """Ends the step for `order` and `settling`, and begins to fetch the first units of the next step."""
        with self._lock:
            leaves = self._engine.is_behind
            if leaves or self.settling.was_left:
                self.settling.step_ended(leaves=leaves)
            self.order.end()
            self.look_ahead()

    # --- cached values, and the end ------------------------------------------------------

    def values_of(self, place: Place) -> torch.Tensor | None:
        """Returns the cached values of a parameter, as the last commit left them, for an update by the engine.

        Returns None if the parameter's unit is not cached or is in the RAM tier. The tensor is a view: the unit's slot
        stays leased until the view is deleted.
        """
        with self._lock:
            unit = self.unit_of[place.name]
            # The engine already has the values of the RAM tier, so the engine needs no view of these values.
            return None if unit.base is None or unit.in_ram else unit.view(place)

    def close(self, why: str) -> None:
        """Evicts all units; afterwards `use` raises `UsageError(why)`."""
        self.closed = why
        for unit in self.all:
            self.evict(unit)
        self.at.clear()
