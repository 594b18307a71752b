"""Keeps units' bytes in memory: reads them ahead of their use, and evicts others."""

from __future__ import annotations

import logging
from bisect import bisect_left
from typing import TYPE_CHECKING

import torch

from memascend.errors import BudgetError, TimeoutExpired, UsageError
from memascend.params.settling import Settling
from memascend.params.threads import FORKED, OwnProcess
from memascend.params.unit import Bytes, Home, alive
from memascend.text import bytes_shown, size_option

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable

    from memascend.device.unit_memory import UnitMemory
    from memascend.params.offloaded_param import Place
    from memascend.params.threads import ProcessLock
    from memascend.params.unit import Limits
    from memascend.storage import Engine


_NEVER = 1 << 60
# A step that uses more units than this (a long generate()) is not recorded beyond it.
_RECORDED_MAX = 1 << 16


class Order:
    """The order in which units are used: recorded in one step, expected in the next.

    Attributes:
        last_used: when each was used last, as the number of the use.
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
        """Expect this order, until a step has shown the true one."""
        self._expected = list(indices)
        self._uses = {}
        for position, index in enumerate(self._expected):
            self._uses.setdefault(index, []).append(position)
        self._position = 0

    def went_to(self, index: int) -> None:
        """A unit is used now."""
        self._clock += 1
        self.last_used[index] = self._clock
        if self._recorded and self._recorded[-1] == index:
            return
        if len(self._recorded) < _RECORDED_MAX:
            self._recorded.append(index)
        uses = self._uses.get(index)
        if uses:
            # Another path than the last step's: continue where this unit is used next, or was used at all.
            self._position = uses[bisect_left(uses, self._position) % len(uses)] + 1

    def ahead(self, count: int, beside: Container[int] = ()) -> list[int]:
        """The next units that are used, `beside` some, this many at most."""
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
        """How many uses from now a unit is used again."""
        uses = self._uses.get(index)
        if not uses:
            return _NEVER
        at = bisect_left(uses, self._position)
        if at < len(uses):
            return uses[at] - self._position
        return uses[0] + len(self._expected) - self._position

    def is_used_again(self, index: int) -> bool:
        """Whether the rest of the step uses a unit."""
        uses = self._uses.get(index, [])
        return bisect_left(uses, self._position) < len(uses)

    def end(self) -> None:
        """The step is over."""
        if self._recorded:
            self.expect(self._recorded)
        self._recorded = []
        self._position = 0


def victim_for(home: Home, homes: Iterable[Home], order: Order, current: Home | None, *, must: bool) -> Home | None:
    """The unit in the same class whose next use is farthest; one that is used before `home` only if it must be.

    `current` is the unit that is asked for right now, which stays.
    """
    stay = {Bytes.OFFLOADED} if must else {Bytes.OFFLOADED, Bytes.READING}
    alike = (other for other in homes if other.slot_bytes == home.slot_bytes and other not in (home, current))
    best = max(
        (other for other in alike if not (other.holders or other.pinned or other.state in stay)),
        key=lambda other: (order.next_use(other.index), -order.last_used.get(other.index, 0)),
        default=None,
    )
    if best is not None and not must and order.next_use(best.index) <= order.next_use(home.index):
        return None
    return best


def is_leaving(home: Home, homes: Iterable[Home]) -> bool:
    """Whether views still hold the bytes of an evicted unit of the same class."""
    return any(
        other.slot_bytes == home.slot_bytes
        and other is not home
        and other.state is Bytes.OFFLOADED
        and other.weak is not None
        and not other.weak[0].expired()
        for other in homes
    )


def holders_beside(home: Home, homes: Iterable[Home]) -> str:
    """The names of units of the same class whose bytes are held by views or updates."""
    return ", ".join(
        other.name
        for other in homes
        if other.slot_bytes == home.slot_bytes and other.weak is not None and alive(other.weak[0]) is not None
    )


def is_useless(home: Home, order: Order) -> bool:
    """Whether the rest of the step does not use a unit, whose values the commit makes old."""
    return home.trained and not order.is_used_again(home.index)


_log = logging.getLogger("memascend")
# How long the bytes of an evicted unit may take to come back, and how long to wait before giving up.
_RELEASE_SECONDS = 0.05
_LAST_SECONDS = 1.0
# Units beyond the planned ones that are fetched ahead where memory is free anyway.
_FARTHER = 3


class CachedUnits:
    """The units of a model, and which of them have their bytes in the arena.

    Attributes:
        homes: the units, in the order in which they were added.
        home_of: the unit of each parameter, by the parameter's name.
        at: the units whose bytes began at an address, and their versions.
        order: in which units are used.
        closed: why nothing may be used any more, once that is so.
        written: parameters that were written to in place while they were materialized.
        counters: what was done, for reports.
    """

    def __init__(self, memory: UnitMemory, limits: Limits, lock: ProcessLock, engine: Engine) -> None:
        """See `Residency`."""
        self._memory = memory
        self._arena = memory.arena
        self._limits = limits
        self._lock = lock
        self._process = OwnProcess()
        self._engine = engine
        self.homes: list[Home] = []
        self.home_of: dict[str, Home] = {}
        self.order = Order()
        # Indices of units in the RAM tier: they are always in memory.
        self._ram_tier: set[int] = set()
        self.closed: str | None = None
        self.written: set[str] = set()
        # At which of a unit's fetches the updates that the last step left are written.
        self.settling = Settling()
        self.counters = {"fetches": 0, "hits": 0, "adopted": 0, "evictions": 0}
        self.at: dict[int, tuple[Home, int]] = {}
        # The unit that is asked for right now: not to be evicted for one that comes later.
        self._current: Home | None = None

    def add(self, name: str, places: list[Place], nbytes: int, *, pinned: bool, in_ram: bool = False) -> None:
        """Take charge of a unit of so many bytes."""
        fitting = (size for size in sorted(self._limits.slots) if size >= nbytes)
        slot_bytes = 0 if in_ram else next(fitting, nbytes)
        home = Home(len(self.homes), name, nbytes, slot_bytes, pinned=pinned, in_ram=in_ram, places=places)
        self.homes.append(home)
        if in_ram:
            self._ram_tier.add(home.index)
        self.home_of.update((place.name, home) for place in places)

    def require_open(self) -> None:
        """Reject calls after the end, and calls of a forked child."""
        if self.closed:
            raise UsageError(self.closed)
        if self._process.is_elsewhere:
            raise UsageError(FORKED)

    # --- reading ------------------------------------------------------------------------

    def use(self, home: Home) -> torch.Tensor:
        """The bytes of a unit, waited for; also begins to fetch the next units."""
        with self._lock:
            self.require_open()
            self._current = home
            self.order.went_to(home.index)
            if home.in_ram and home.is_stale(self._engine.store.ram_tier_epoch):
                self.evict(home)
            if home.base is None:
                self._bring(home)
            else:
                self.counters["hits"] += 1
            self.look_ahead()
            base = home.base
            assert base is not None
            if self._memory.device is not None:
                self._memory.used(base)
            return base

    def _bring(self, home: Home) -> None:
        """Have the bytes of a unit in memory; an interrupt leaves one that is brought again."""
        if home.in_ram:
            store = self._engine.store
            # Read first: bytes that become stale in between are brought again.
            epoch = store.ram_tier_epoch
            with torch.inference_mode(mode=False):
                values = store.ram_tier_unit(home.name)
            assert values is not None, f"unit {home.name!r} is not in RAM"
            self.at[values.data_ptr()] = (home, home.version)
            home.stand(values, epoch)
            return
        if home.state is Bytes.OFFLOADED:
            if self._adopt(home):
                return
            self._start(home, must=True)
        home.arrive()

    def _start(self, home: Home, *, must: bool) -> bool:
        """Take memory and begin the read."""
        settle = self._engine.is_behind and self.settling.settles(home.fetched)
        base = self._room(home, must=must)
        if base is None:
            return False
        home.begin_read(self._memory.begin(home.name, base, settle=settle), base)
        self.at[base.data_ptr()] = (home, home.version)
        self.counters["fetches"] += 1
        return True

    def _adopt(self, home: Home) -> bool:
        """Take living bytes of the current version again."""
        adopted = home.adopt()
        self.counters["adopted"] += adopted
        return adopted

    def look_ahead(self) -> None:
        """Begin to fetch the next units, where memory is free now."""
        # Farther ones, too, where no unit has to leave for them that this step uses again: embeddings and LM heads have
        # slots of their own. The drive should not wait until they are next.
        near = self._limits.lookahead
        with self._lock:
            if self.closed or len(self._ram_tier) == len(self.homes):
                return
            for number, index in enumerate(self.order.ahead(near + _FARTHER if near else 0, self._ram_tier)):
                home = self.homes[index]
                if home.holders or home.state is not Bytes.OFFLOADED:
                    # One that is materialized without bytes of ours has copies, within materialized().
                    continue
                if is_useless(home, self.order) or self._adopt(home):
                    # One that is useless now is read when the commit has made its values new.
                    continue
                room = number < near or self._arena.free_slots(home.nbytes) or self._has_useless(home)
                if room and not self._start(home, must=False):
                    return

    def _has_useless(self, home: Home) -> bool:
        """Whether a cached unit of the same class can leave without being read again."""
        return any(
            other.slot_bytes == home.slot_bytes
            and other.base is not None
            and not (other.holders or other.pinned)
            and is_useless(other, self.order)
            for other in self.homes
        )

    # --- freeing memory -----------------------------------------------------------------

    def _room(self, home: Home, *, must: bool) -> torch.Tensor | None:
        """Memory for a unit; None where no memory is free now and it is not needed yet."""
        waited, evicted = 0.0, False
        while True:
            # A query for free slots comes first: a lease that fails is slower, as an error with its message is made.
            if waited or self._arena.free_slots(home.nbytes):
                try:
                    return self._memory.take(home.nbytes, waited)
                except TimeoutExpired:
                    if waited == _LAST_SECONDS and not self._engine.queued_bytes:
                        self._add_room(home)
                        continue
            # At most one unit is evicted for one that is only fetched ahead.
            way = None if evicted and not must else self._way_to_room(home, waited, must=must)
            if isinstance(way, Home):
                self.evict(way)
                waited, evicted = 0.0, True
            elif way is not None:
                waited = way
            else:
                return None

    def _way_to_room(self, home: Home, waited: float, *, must: bool) -> Home | float | None:
        """How a unit gets memory, after `waited` seconds for a lease in vain.

        Returns:
            A unit to evict; or how long to wait for a lease; or None, where the unit is not needed yet. The next use of
            any unit tries again: waiting here would stop compute.
        """
        if is_leaving(home, self.homes):
            if not must:
                return None
            if waited != _LAST_SECONDS and (self._engine.queued_bytes or not waited):
                # Its reader releases it in a moment; an update that works on it, when it is done.
                return _RELEASE_SECONDS
        victim = victim_for(home, self.homes, self.order, self._current, must=must)
        return _LAST_SECONDS if victim is None and must else victim

    def holders_of_room(self, home: Home, here: int) -> set[int]:
        """The other threads whose modules hold all memory for a unit; none where it has memory, or can have some."""
        if home.in_ram or home.base is not None or self._arena.free_slots(home.nbytes):
            return set()
        if victim_for(home, self.homes, self.order, None, must=True) is not None:
            return set()
        alike = (other for other in self.homes if other.slot_bytes == home.slot_bytes)
        return {thread for other in alike for thread in other.holders if thread != here}

    def _add_room(self, home: Home) -> None:
        """Take memory beside the planned, where no budget was given: a plan cannot know which views code keeps."""
        limits, holders = self._limits, holders_beside(home, self.homes) or "units in use"
        if limits.add is None:
            smallest = limits.larger(home.slot_bytes)
            raise BudgetError(
                f"no memory for unit {home.name!r} ({bytes_shown(home.nbytes)}): all places of its size are held by "
                f"views of {holders}, which a checkpoint segment of several blocks, another thread, or your code, "
                "keeps; "
                f'{limits.option}="{size_option(smallest)}" has a place for every unit',
                smallest=smallest,
            ) from None
        added = limits.add(home.nbytes)
        _log.warning(
            "%d bytes beside the planned %s were added for unit %r: all places of its size are held by views of %s, "
            "which a checkpoint segment of several blocks, or your code, keeps",
            added,
            limits.option,
            home.name,
            holders,
        )

    def evict(self, home: Home) -> None:
        """Release a unit's bytes; views of other code keep them alive."""
        with self._lock:
            home.leave()
            self.counters["evictions"] += 1

    # --- values that change -------------------------------------------------------------

    def find_written(self, homes: Iterable[Home]) -> None:
        """Look for writes in place that torch has counted. Such bytes are no step's: they are read again."""
        with self._lock:
            for home in homes:
                written = home.written
                if not written:
                    continue
                self.written.update(written)
                home.note_written()
                # A write to one through its storage may have reached all of them.
                for place in home.places if home.in_ram else ():
                    self._engine.store.spoil(place.name)
                self.evict(home)
                home.forget()

    def forget_written(self, but: Collection[str] = ()) -> set[str]:
        """Forget writes in place `but` some; returns the others."""
        found = self.written - set(but)
        self.written -= found
        return found

    def changed(self, names: Iterable[str]) -> None:
        """Parameters have new values on storage: the cached bytes of their units are old."""
        with self._lock:
            for index in {self.home_of[name].index for name in names}:
                home = self.homes[index]
                home.train()
                self.evict(home)

    def read_again(self) -> None:
        """Release bytes that nothing uses: updates may have been rejected because these are not of the last commit."""
        with self._lock:
            for home in self.homes:
                if not (home.in_ram or home.holders):
                    self.evict(home)
                    home.forget()

    def drop_reads(self) -> None:
        """Drop what is being read, in parts perhaps: a commit comes, after which parts are of another one."""
        with self._lock:
            for home in self.homes:
                if home.state is Bytes.READING and not home.holders:
                    self.evict(home)

    def end_step(self) -> None:
        """Learn the order in which units were used, and begin to fetch the first of the next step."""
        with self._lock:
            leaves = self._engine.is_behind
            if leaves or self.settling.was_left:
                self.settling.step_ended(leaves=leaves)
            self.order.end()
            self.look_ahead()

    # --- looking ------------------------------------------------------------------------

    def values_of(self, place: Place) -> torch.Tensor | None:
        """The values of a parameter where they are cached, as the last commit left them. They hold the unit."""
        with self._lock:
            home = self.home_of[place.name]
            # The engine has the values of the RAM tier.
            return None if home.base is None or home.in_ram else home.view(place)

    def close(self, why: str) -> None:
        """Release all bytes; afterwards a use raises `UsageError(why)`."""
        self.closed = why
        for home in self.homes:
            self.evict(home)
        self.at.clear()
