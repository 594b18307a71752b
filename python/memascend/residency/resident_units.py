"""Keeps units' bytes in memory: reads them ahead of their use, evicts others to make room."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memascend.errors import TimeoutExpired, UsageError
from memascend.residency.eviction import (
    crowded,
    has_useless,
    holders_beside,
    is_leaving,
    is_useless,
    victim_for,
)
from memascend.residency.unit_slot import Home, alive, view
from memascend.residency.use_order import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memascend.residency.access import Turns
    from memascend.residency.copies import Copies
    from memascend.residency.environment import Limits, Memory
    from memascend.residency.placeholder import Place
    from memascend.residency.unseen_writes import Sums

_log = logging.getLogger("memascend")

# How long the bytes of an evicted unit may take to come back, and how long to wait before giving up.
_RELEASE_SECONDS = 0.05
_LAST_SECONDS = 1.0
# Units beyond the planned ones that are fetched ahead where there is room anyway.
_FARTHER = 3


class ResidentUnits:
    """The units of a model, and which of them have their bytes in the arena.

    Attributes:
        homes: the units, in the order in which they were added.
        home_of: the unit of each parameter, by the parameter's name.
        order: in which units are used.
        closed: why nothing may be used any more, once that is so.
        written: parameters that somebody wrote to while they were bound.
        overrides: values that are not on storage, and that the model computes with, by parameter.
        counters: what was done, for reports.
    """

    def __init__(
        self,
        memory: Memory,
        limits: Limits,
        copies: Copies,
        turns: Turns,
        busy: Callable[[], bool],
        sums: Sums,
    ) -> None:
        """See `Residency`; `busy` says whether updates are under way, which may hold units."""
        self._memory = memory
        self._arena = memory.arena
        self._limits = limits
        self._classes = sorted(limits.slots)
        self._copies = copies
        self._turns = turns
        self._lock = turns.lock
        self._busy = busy
        self.sums = sums
        self.homes: list[Home] = []
        self.home_of: dict[str, Home] = {}
        self.order = Order()
        # The places of units that are held: they are always there.
        self._held: set[int] = set()
        self.closed: str | None = None
        self.written: set[str] = set()
        self.overrides: dict[str, torch.Tensor] = {}
        self.counters = {"fetches": 0, "hits": 0, "adopted": 0, "evictions": 0}
        self._at: dict[int, tuple[Home, int]] = {}
        self._clock = 0
        # The unit that is asked for right now: not to be evicted for one that comes later.
        self._current: Home | None = None

    def add(self, name: str, places: list[Place], nbytes: int, *, pinned: bool, held: bool = False) -> None:
        """Take charge of a unit of so many bytes."""
        slot_bytes = 0 if held else next((size for size in self._classes if size >= nbytes), nbytes)
        home = Home(len(self.homes), name, nbytes, slot_bytes, pinned=pinned, held=held)
        home.places = places
        self.homes.append(home)
        if held:
            self._held.add(home.index)
        self.home_of.update((place.name, home) for place in places)

    def require_open(self) -> None:
        """Refuse what comes after the end, and what a forked child asks."""
        if self.closed:
            raise UsageError(self.closed)
        self._lock.process.require_here()

    # --- reading ------------------------------------------------------------------------

    def use(self, home: Home) -> torch.Tensor:
        """The bytes of a unit, waited for; and begin to fetch what comes after it."""
        with self._lock:
            self.require_open()
            self._clock += 1
            home.used = self._clock
            self._current = home
            self.order.went_to(home.index)
            if home.in_place and home.epoch != self._memory.held_epoch:
                # It was changed by a step, and by nobody else.
                self.sums.note(home)
                self.evict(home)
            if home.base is None:
                self._bring(home)
            else:
                self.counters["hits"] += 1
            self._look_ahead()
            base = home.base
            assert base is not None
            self._memory.used(base)
            return base

    def _bring(self, home: Home) -> None:
        if home.held:
            base = self._held_bytes(home)
        else:
            if home.fetch is None and not self._adopt(home):
                self._start(home, must=True)
            fetch, pending = home.fetch, home.pending
            home.fetch = home.pending = None
            if fetch is None or pending is None:
                return
            fetch.wait()
            # Not before it was checked: after an error somebody's traceback may hold what it was read into.
            base = pending
            home.weak = (StorageWeakRef(base.untyped_storage()), home.version)
        self._at[base.data_ptr()] = (home, home.version)
        home.overlay(base, self.overrides)
        self.sums.forget(home)
        # The last thing: an interrupt before it leaves a unit that is brought again.
        home.base = base
        self.sums.note(home)

    def _held_bytes(self, home: Home) -> torch.Tensor:
        """A unit whose values are in memory: it is computed with where they lie, but for values that are not stored."""
        # Asked first: what becomes stale in between is brought again.
        home.epoch = self._memory.held_epoch
        held = self._memory.held(home.name)
        home.held_at = held.data_ptr()
        home.in_place = not any(place.name in self.overrides for place in home.places)
        if home.in_place:
            return held
        # What only the model has is no part of what is held: in a file, as all that user code reached.
        base = self._copies.of_bytes(held[: home.nbytes])
        home.mapped = StorageWeakRef(base.untyped_storage())
        return base

    def _start(self, home: Home, *, must: bool) -> bool:
        """Lease memory and begin the read."""
        lease = self._room(home, must=must)
        if lease is None:
            return False
        with torch.inference_mode(mode=False):
            base = lease.tensor((home.nbytes,), torch.uint8)
        home.weak = None
        home.fetch = self._memory.begin(home.name, base)
        home.pending = base
        self.counters["fetches"] += 1
        return True

    def _adopt(self, home: Home) -> bool:
        """Take living bytes of the current version again."""
        if home.weak is None or home.weak[1] != home.version:
            return False
        storage = alive(home.weak[0])
        if storage is None or home.fetch is not None:
            return False
        with torch.inference_mode(mode=False):
            home.base = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (home.nbytes,), (1,))
        self.counters["adopted"] += 1
        return True

    def look_ahead(self) -> None:
        """Begin to fetch what is used next, where there is room now."""
        with self._lock:
            if not self.closed:
                self._look_ahead()

    def _look_ahead(self) -> None:
        """Begin to fetch the next units.

        Farther ones, too, where nothing has to leave for them that this step uses again: embeddings and heads have
        places of their own, and the disk is not to wait until they are next.
        """
        near = self._limits.lookahead
        if len(self._held) == len(self.homes):
            return
        for count, index in enumerate(self.order.ahead(near + _FARTHER if near else 0, self._held)):
            home = self.homes[index]
            if (
                home.bound
                or home.base is not None
                or home.fetch is not None
                or is_useless(home, self.order)
                or self._adopt(home)
            ):
                # One that is useless now is read when the commit has made its values new.
                # One that is bound without bytes of ours is materialized: they could not leave before it is no more.
                continue
            room = count < near or self._arena.free_slots(home.nbytes) or has_useless(home, self.homes, self.order)
            if not room:
                continue
            if not self._start(home, must=False):
                return

    # --- making room --------------------------------------------------------------------

    def _room(self, home: Home, *, must: bool) -> Any:
        """A lease for a unit; None where there is no room now and it is not needed yet."""
        patience, evicted = 0.0, False
        while True:
            # Where there is no room now, that is asked and not tried: an error with its message takes its time.
            if patience or self._arena.free_slots(home.nbytes):
                try:
                    return self._arena.lease(home.nbytes, timeout=patience, owner="units")
                except TimeoutExpired:
                    if patience == _LAST_SECONDS and not self._busy():
                        if self._limits.add is None:
                            raise crowded(home, self.homes, self._limits) from None
                        self._add_room(home, self._limits.add)
                        continue
            leaving = is_leaving(home, self.homes)
            if not must and (evicted or leaving):
                # It is asked for again soon; waiting here would keep compute from going on.
                return None
            if leaving and patience != _LAST_SECONDS and (self._busy() or not patience):
                # Whoever read it lets go in a moment; an update that works on it, when it is done.
                patience = _RELEASE_SECONDS
                continue
            victim = victim_for(home, self.homes, self.order, self._current, must=must)
            if victim is not None:
                self.evict(victim)
                evicted, patience = True, 0.0
            elif must:
                patience = _LAST_SECONDS
            else:
                return None

    def _add_room(self, home: Home, add: Callable[[int], int]) -> None:
        """Take memory beside the planned: nobody gave a budget, and a plan cannot know what code keeps."""
        added = add(home.nbytes)
        _log.warning(
            "%d bytes beside the planned %s were added for unit %r: all places of its size are held by views of %s, "
            "which a checkpoint segment of several blocks, or your code, keeps",
            added,
            self._limits.option,
            home.name,
            ", ".join(holders_beside(home, self.homes)) or "units in use",
        )

    def evict(self, home: Home) -> None:
        """Let a unit's bytes go; views that others hold keep them until they are gone."""
        with self._lock:
            if home.fetch is not None:
                # Dropping a read waits for it; what it reads into goes after it, and was never checked.
                home.fetch = None
                home.pending = None
                home.weak = None
            self.written.update(self.sums.changed(home))
            home.views = None
            home.base = None
            home.in_place = False
            self.counters["evictions"] += 1

    # --- values that change -------------------------------------------------------------

    def override(self, place: Place, values: torch.Tensor | None) -> None:
        """Let the model compute with these values from now on; None: with those on storage again."""
        with self._lock:
            self.overrides.pop(place.name, None)
            if values is not None:
                self.overrides[place.name] = values
            home = self.home_of[place.name]
            # A graph of what it was before is not walked any more.
            home.version += 1
            self.evict(home)
            home.weak = None

    def settle_override(self, place: Place) -> None:
        """The values of an override are on storage now: what is resident is right, what is being read may be old."""
        with self._lock:
            self.overrides.pop(place.name, None)
            home = self.home_of[place.name]
            if home.base is None:
                self.evict(home)

    def find_written(self) -> None:
        """Look for values in memory that are not what was read, as far as they are compared."""
        with self._lock:
            for home in self.homes:
                self.find_written_in(home)

    def find_written_in(self, home: Home, seen: Iterable[str] = ()) -> None:
        """The same for one unit; `seen` are parameters of it that were seen to be written to."""
        written = {*seen, *self.sums.changed(home)}
        if written:
            self.written.update(written)
            for name in written if home.held else ():
                self._memory.spoil(name)
            # What it holds now is no step's: it is read again.
            self.evict(home)
            home.weak = None

    def changed(self, names: Iterable[str]) -> None:
        """Parameters have new values on storage: what is resident of their units is old."""
        with self._lock:
            for index in {self.home_of[name].index for name in names}:
                home = self.homes[index]
                home.version += 1
                home.trained = True
                if home.held:
                    home.count_write()
                    self.sums.note(home)
                self.evict(home)

    def end_step(self) -> None:
        """Learn the order in which units were used, and begin to fetch the first of the next step."""
        with self._lock:
            self.order.end()
            self._look_ahead()

    # --- looking ------------------------------------------------------------------------

    def values_of(self, place: Place) -> torch.Tensor | None:
        """The values of a parameter where they are resident, as the last commit left them. They hold the unit."""
        with self._lock:
            home = self.home_of[place.name]
            # What is held the engine has.
            return None if home.base is None or home.held else view(home.base, place)

    def home_at(self, address: int) -> tuple[Home, int] | None:
        """The unit whose bytes begin at an address, and their version."""
        found = self._at.get(address)
        if found is not None and found[0].held and found[0].held_at != address:
            # Where a file was, something else may be now.
            storage = None if found[0].mapped is None else alive(found[0].mapped)
            if storage is None or storage.data_ptr() != address:
                self._at.pop(address, None)
                return None
        return found

    def close(self, why: str) -> None:
        """Let all bytes go; afterwards a use raises `UsageError(why)`."""
        self.closed = why
        for home in self.homes:
            self.evict(home)
        self._at.clear()
