"""Loads units before they are needed and evicts them when their memory is."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memascend.errors import BudgetError, TimeoutExpired, UsageError
from memascend.residency.access import Turns
from memascend.residency.eviction import has_useless, holders_beside, is_leaving, is_useless, victim_for
from memascend.residency.reached import ReachedWeights
from memascend.residency.saved_tensors import Hooks
from memascend.residency.threads import others_alive
from memascend.residency.transfers import Transfers
from memascend.residency.unit_slot import Home, alive, view
from memascend.residency.use_order import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memascend.residency.copies import Copies
    from memascend.residency.debug_checksums import Sums
    from memascend.residency.environment import Limits, Listener, Memory, Moment
    from memascend.residency.placeholder import Place
    from memascend.residency.saved_tensors import Keeper

__all__ = ["Residency"]

_log = logging.getLogger("memascend")

# How long the bytes of an evicted unit may take to come back, and how long to wait before giving up.
_RELEASE_SECONDS = 0.05
_LAST_SECONDS = 1.0
# Units beyond the planned ones that are fetched ahead where there is room anyway.
_FARTHER = 3


class Residency:
    """Which units are in the arena. Everything here runs under one lock; compute does not."""

    def __init__(
        self,
        memory: Memory,
        limits: Limits,
        listener: Listener,
        copies: Copies,
        moment: Moment,
        *,
        keeper: Keeper | None = None,
        sums: Sums | None = None,
    ) -> None:
        """Begin with nothing resident.

        Args:
            memory: where units are held.
            limits: what the plan lets them have.
            listener: hears of what is done with units.
            copies: where copies of parameters go.
            moment: says what the run does now.
            keeper: keeps what autograd saves and lies in no unit.
            sums: finds what was written to past torch's counters, where that was asked for.
        """
        self._memory = memory
        self._arena = memory.arena
        self._limits = limits
        self._busy = moment.busy
        self._listener = listener
        self._copies = copies
        self._classes = sorted(limits.slots)
        self.homes: list[Home] = []
        self.lock = threading.RLock()
        self.turns = Turns(self.lock)
        self.hooks = Hooks(self, keeper)
        self.order = Order()
        self.closed: str | None = None
        self.transfers = Transfers(self.copy_of)
        self.reached = ReachedWeights(self, copies, moment)
        # Values that are not on storage, and that the model computes with.
        self._overrides: dict[str, torch.Tensor] = {}
        self._at: dict[int, tuple[Home, int]] = {}
        self._clock = 0
        # The unit that is asked for right now: not to be evicted for one that comes later.
        self._current: Home | None = None
        # Parameters that somebody wrote to while they were bound.
        self.written: set[str] = set()
        self._sums = sums
        self.counters = {"fetches": 0, "hits": 0, "adopted": 0, "evictions": 0}
        # Those that were found to be used whole.
        self._told: set[str] = set()

    def add(self, name: str, nbytes: int, *, pinned: bool, by_rows: bool = False) -> Home:
        """A unit of so many bytes; its places follow."""
        slot_bytes = 0 if by_rows else next((size for size in self._classes if size >= nbytes), nbytes)
        home = Home(len(self.homes), name, nbytes, slot_bytes, pinned=pinned, by_rows=by_rows)
        self.homes.append(home)
        return home

    # --- binding ---------------------------------------------------------------

    def bind(self, home: Home) -> None:
        """Make a unit's parameters real. Every call is ended by `unbind`."""
        self._memory.require_usable()
        here = threading.get_ident()
        with self.lock:
            self.turns.wait_to_bind()
            if home.bound == 0:
                # Through views that were taken while the model computed.
                self._find_written(home, [place.name for place in home.places if place.written])
                base = self.use(home)
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
        here = threading.get_ident() if holder is None else holder
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
            for home in self.homes:
                if not (home.bound or home.holders):
                    continue
                if home.holders.keys() <= {holder}:
                    self._take_away(home)
                home.count(holder, -home.bound)

    def _take_away(self, home: Home) -> None:
        """Let the parameters of a unit be away; done again after an interrupt it does the rest."""
        self._find_written(home, [place.name for place in home.places if place.written])
        for place in home.places:
            place.unbind()

    def holds(self, place: Place) -> bool:
        """Whether this thread has bound a parameter that asks."""
        return threading.get_ident() in self.home_of[place.name].holders

    @contextmanager
    def borrowed(self, places: Iterable[Place]) -> Iterator[None]:
        """Bind the units of some parameters for one operation."""
        if self.closed:
            raise UsageError(self.closed)
        self.transfers.settle()
        self._listener.borrowed(places)
        homes = list({id(home): home for home in (self.home_of[place.name] for place in places)}.values())
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
        homes = {id(home): home for home in (self.home_of[place.name] for place in places)}.values()
        sizes = [home.slot_bytes for home in homes if not home.by_rows]
        return all(sizes.count(size) <= self._limits.slots.get(size, 0) for size in set(sizes))

    def looked_up(self, place: Place, indices: torch.Tensor, padding: int | None) -> torch.Tensor | None:
        """What an embedding gives for some indices, where that takes no more than their rows; None elsewhere."""
        home = self.home_of[place.name]
        rows = self._memory.rows
        if rows is None or not home.by_rows:
            return None
        if self.closed:
            raise UsageError(self.closed)
        self.transfers.settle()
        self._listener.borrowed([place])
        with self.turns.touching():
            return rows.look_up(home.name, place, indices, padding, self._overrides.get(place.name))

    def detached(self, place: Place) -> torch.Tensor | None:
        """A private copy of a parameter's values where a state dict is made inside of a forward; None elsewhere."""
        if place.device.type == "cpu" and not self.reached.computes:
            # Memory that is watched, as everybody gets it.
            return None
        return self.transfers.detached(place)

    def assigned(self, place: Place, values: torch.Tensor) -> bool:
        """Write values through to storage where a state dict is being loaded; False elsewhere."""
        return self.transfers.assigned(place, values)

    def copy_of(self, place: Place) -> torch.Tensor:
        """A parameter's values in an unlinked file, as a tensor that nothing else sees."""
        self.transfers.settle()
        home = self.home_of[place.name]
        if home.by_rows and place.name in self._overrides:
            return self._copies.of_values(place, self._overrides[place.name])
        if home.by_rows:
            return self._mapped(place).view(place.dtype).view(place.shape)
        self.bind(home)
        try:
            return self._copies.of(place)
        finally:
            self.unbind(home)

    def each_part(self, place: Place, visit: Callable[[int, torch.Tensor], None]) -> None:
        """Read all of an embedding that is read by rows: `visit` gets where each part begins, and its bytes."""
        with self.lock:
            if self.closed:
                raise UsageError(self.closed)
            self.turns.wait_to_bind()
        assert self._memory.rows is not None
        self._memory.rows.each_part(self.home_of[place.name].name, visit)

    def _mapped(self, place: Place) -> torch.Tensor:
        """The bytes of an embedding that is read by rows, in an unlinked file."""
        return self._copies.gathered(place.nothing.nbytes, lambda visit: self.each_part(place, visit))

    def settle(self) -> None:
        """Name the homes of all places, once all were added."""
        self.home_of = {place.name: home for home in self.homes for place in home.places}

    # --- bytes -----------------------------------------------------------------

    def use(self, home: Home) -> torch.Tensor:
        """The bytes of a unit, waited for; and begin to fetch what comes after it."""
        with self.lock:
            if self.closed:
                raise UsageError(self.closed)
            self._clock += 1
            home.used = self._clock
            self._current = home
            if not home.by_rows:
                self.order.went_to(home.index)
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
        if home.by_rows:
            self._bring_mapped(home)
            return
        if home.fetch is None and not self._adopt(home):
            self._start(home, must=True)
        fetch, base = home.fetch, home.pending
        home.fetch = home.pending = None
        if fetch is not None and base is not None:
            fetch.wait()
            # Not before it was checked: after an error somebody's traceback may hold what it was read into.
            home.weak = (StorageWeakRef(base.untyped_storage()), home.version)
            home.base = base
            self._at[base.data_ptr()] = (home, home.version)
            self._overlay(home)
            if self._sums is not None:
                self._sums.note(home)

    def _overlay(self, home: Home) -> None:
        """Let a unit that was read have the values that are not on storage."""
        if self._overrides and home.base is not None:
            with torch.inference_mode(mode=False), torch.no_grad():
                for place in home.places:
                    values = self._overrides.get(place.name)
                    if values is not None:
                        view(home.base, place).copy_(values)

    def override(self, place: Place, values: torch.Tensor | None) -> None:
        """Let the model compute with these values from now on; None: with those on storage again."""
        with self.lock:
            self._overrides.pop(place.name, None)
            if values is not None:
                self._overrides[place.name] = values
            home = self.home_of[place.name]
            # A graph of what it was before is not walked any more.
            home.version += 1
            self.evict(home)
            home.weak = None

    def settle_override(self, place: Place) -> None:
        """The values of an override are on storage now: what is resident is right, what is being read may be old."""
        with self.lock:
            self._overrides.pop(place.name, None)
            home = self.home_of[place.name]
            if home.base is None:
                self.evict(home)

    def _bring_mapped(self, home: Home) -> None:
        """All of a unit that has no place in memory: in a file, whose pages the kernel keeps or not."""
        (place,) = home.places
        if place.name not in self._told:
            self._told.add(place.name)
            _log.warning(
                "all of %s is used, and not only rows of it: it is brought into a file each time; host_memory=%d keeps "
                "it in memory",
                place.name,
                self._limits.whole,
            )
        home.base = self._mapped(place)
        home.mapped = StorageWeakRef(home.base.untyped_storage())
        self._at[home.base.data_ptr()] = (home, home.version)
        self._overlay(home)
        if self._sums is not None:
            self._sums.note(home)

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
                            raise self._crowded(home) from None
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

    def evict(self, home: Home) -> None:
        """Let a unit's bytes go; views that others hold keep them until they are gone."""
        with self.lock:
            if home.fetch is not None:
                # Dropping a read waits for it; what it reads into goes after it, and was never checked.
                home.fetch = None
                home.pending = None
                home.weak = None
            if self._sums is not None:
                self.written.update(self._sums.changed(home))
            home.views = None
            home.base = None
            self.counters["evictions"] += 1

    def look_ahead(self) -> None:
        """Begin to fetch what is used next, where there is room now."""
        with self.lock:
            if not self.closed:
                self._look_ahead()

    def _look_ahead(self) -> None:
        """Begin to fetch the next units.

        Farther ones, too, where nothing has to leave for them that this step uses again: embeddings and heads have
        places of their own, and the disk is not to wait until they are next.
        """
        near = self._limits.lookahead
        for count, index in enumerate(self.order.ahead(near + _FARTHER if near else 0)):
            home = self.homes[index]
            if (
                home.by_rows
                or home.base is not None
                or home.fetch is not None
                or is_useless(home, self.order)
                or self._adopt(home)
            ):
                # One that is useless now is read when the commit has made its values new.
                continue
            room = count < near or self._arena.free_slots(home.nbytes) or has_useless(home, self.homes, self.order)
            if not room:
                continue
            if not self._start(home, must=False):
                return

    def _add_room(self, home: Home, add: Callable[[int], int]) -> None:
        """Take memory beside the planned: nobody gave a budget, and a plan cannot know what code keeps."""
        added = add(home.nbytes)
        _log.warning(
            "%d bytes of host memory were added for unit %r: all places of its size are held by views of %s, which a "
            "checkpoint segment of several blocks, or your code, keeps",
            added,
            home.name,
            ", ".join(holders_beside(home, self.homes)) or "units in use",
        )

    def _crowded(self, home: Home) -> BudgetError:
        holders = holders_beside(home, self.homes)
        smallest = self._limits.larger(home.slot_bytes)
        return BudgetError(
            f"no room for unit {home.name!r} ({home.nbytes} bytes): all places of its size are held by views of "
            f"{', '.join(holders) or 'units in use'}, which a checkpoint segment of several blocks, or your "
            f"code, keeps; {self._limits.option}={smallest} has a place for every unit",
            smallest=smallest,
        )

    def find_written(self) -> None:
        """Look for values in memory that are not what was read, where that was asked for."""
        with self.lock:
            for home in self.homes:
                self._find_written(home)

    def _find_written(self, home: Home, seen: Iterable[str] = ()) -> None:
        written = {*seen, *(self._sums.changed(home) if self._sums is not None else ())}
        if written:
            self.written.update(written)
            # What it holds now is no step's: it is read again.
            self.evict(home)
            home.weak = None

    def require_idle(self, call: str) -> None:
        """Refuse a call that may not come while units are in use, in whichever thread."""
        with self.lock:
            used = next((home.name for home in self.homes if home.bound), None)
        if used is not None:
            raise UsageError(
                f"unit {used!r} is in use: call {call} outside of the model's forward and of materialized()"
            )

    # --- the step's end --------------------------------------------------------

    def changed(self, names: Iterable[str]) -> None:
        """Parameters have new values on storage: what is resident of their units is old."""
        with self.lock:
            for index in {self.home_of[name].index for name in names}:
                home = self.homes[index]
                home.version += 1
                home.trained = True
                self.evict(home)

    def end_step(self) -> None:
        """Learn the order in which units were used, and begin to fetch the first of the next step."""
        with self.lock:
            self.order.end()
            self._look_ahead()

    def close(self, why: str) -> None:
        """Let everything go; afterwards a touch of a parameter raises `UsageError(why)`."""
        with self.lock:
            self.closed = why
            for home in self.homes:
                if home.bound or home.holders:
                    self._take_away(home)
                    home.holders.clear()
                    home.bound = 0
                self.evict(home)
            self._at.clear()

    # --- what reports ask -----------------------------------------------------------

    @property
    def lent_bytes(self) -> int:
        """Bytes of the arena that are lent now."""
        return self._arena.in_use_bytes

    @property
    def table_bytes(self) -> int:
        """What the arena keeps beside its memory."""
        return self._arena.table_bytes

    def values_of(self, place: Place) -> torch.Tensor | None:
        """The values of a parameter where they are resident, as the last commit left them. They hold the unit."""
        with self.lock:
            home = self.home_of[place.name]
            return None if home.base is None else view(home.base, place)

    # --- what the saved-tensor hooks ask ------------------------------------------

    def home_at(self, address: int) -> tuple[Any, int] | None:
        """The unit whose bytes begin at an address, and their version."""
        found = self._at.get(address)
        if found is not None and found[0].by_rows:
            # Where a file was, something else may be now.
            storage = None if found[0].mapped is None else alive(found[0].mapped)
            if storage is None or storage.data_ptr() != address:
                self._at.pop(address, None)
                return None
        return found

    def storage_of(self, home: Home, version: int) -> torch.UntypedStorage:
        """The bytes of a unit as they were at `version`."""
        self._memory.require_usable()
        self.transfers.settle()
        with self.lock:
            if home.version != version:
                raise UsageError(
                    f"a graph needs unit {home.name!r} as it was before step(); call backward() before step(), or run "
                    "the forward again"
                )
            return self.use(home).untyped_storage()
