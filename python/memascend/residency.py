"""Residency: units come into the arena before they are needed and leave when their place is."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memascend.errors import BudgetError, TimeoutExpired, UsageError
from memascend.order import Order
from memascend.saved import Hooks
from memascend.threads import is_autograds, others_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memascend.memory import Arena
    from memascend.placeholder import Place
    from memascend.sums import Sums

__all__ = ["Home", "Residency"]

# How long the bytes of an evicted unit may take to come back, and how long to wait before giving up.
_RELEASE_SECONDS = 0.05
_LAST_SECONDS = 1.0
# How long an operation of another thread on a parameter may take before it is refused as one that does not end.
_TOUCH_SECONDS = 60.0
# Units beyond the planned ones that are fetched ahead where there is room anyway.
_FARTHER = 3


class Fetch(Protocol):
    """A read of a unit that was begun."""

    def wait(self) -> int:
        """Wait for it, and check it."""

    def done(self) -> bool:
        """Whether the device is done."""


class Copies(Protocol):
    """What answers where a state dict is made or loaded; see `placeholder.Source`."""

    def detached(self, place: Place) -> torch.Tensor | None:
        """A private copy of a parameter's values, or None."""

    def assigned(self, place: Place, values: torch.Tensor) -> bool:
        """Write values through; False where that is not meant."""


class Home:
    """One unit at run time: its parameters, and where its bytes are now."""

    __slots__ = (
        "base",
        "bound",
        "fetch",
        "guarded",
        "holders",
        "index",
        "name",
        "nbytes",
        "pending",
        "pinned",
        "places",
        "slot_bytes",
        "trained",
        "used",
        "version",
        "views",
        "weak",
    )

    def __init__(self, index: int, name: str, nbytes: int, slot_bytes: int, *, pinned: bool) -> None:
        self.index = index
        self.name = name
        self.nbytes = nbytes
        self.slot_bytes = slot_bytes
        self.pinned = pinned
        self.places: list[Place] = []
        self.bound = 0
        # Its parameters ask each thread whether it has bound them; and the threads that have, with how often.
        self.guarded = False
        self.holders: dict[int, int] = {}
        self.version = 0
        # A step has changed its values, so the next one will.
        self.trained = False
        self.used = 0
        self.base: torch.Tensor | None = None
        self.fetch: Fetch | None = None
        # The bytes that `fetch` fills.
        self.pending: torch.Tensor | None = None
        self.views: list[torch.Tensor] | None = None
        # Of the storage that was leased last: views that others hold may keep it alive.
        self.weak: tuple[StorageWeakRef, int] | None = None


class Residency:
    """Which units are in the arena. Everything here runs under one lock; compute does not."""

    def __init__(
        self,
        arena: Arena,
        busy: Callable[[], bool],
        begin: Callable[[str, torch.Tensor], Fetch],
        *,
        lookahead: int,
        slots: dict[int, int],
        used: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Begin with nothing resident.

        Args:
            arena: where units are held.
            busy: whether updates are under way, which may hold units until they are done.
            begin: begins to read a unit into memory.
            lookahead: how many units ahead of the one in use are fetched.
            slots: the arena's classes, {bytes: count}.
            used: hears of a unit's bytes each time that somebody is about to compute with them.
        """
        self._arena = arena
        self._begin = begin
        self._used = used
        self._busy = busy
        self._lookahead = lookahead
        self._classes = sorted(slots)
        self.homes: list[Home] = []
        self.lock = threading.RLock()
        # The thread that changes values or waits to, how deep, and whether the others have stopped; see `alone`.
        self._changer: int | None = None
        self._changes = 0
        self._changing = False
        # Threads that carry out one operation on a parameter, with how often.
        self._touching: dict[int, int] = {}
        # Tells of every change of these.
        self._turn = threading.Condition(self.lock)
        self.hooks = Hooks(self)
        self.order = Order()
        self.closed: str | None = None
        # More threads than one have bound units: what one has bound is not bound for another.
        self.several = False
        self._thread: int | None = None
        # What makes copies of whole models.
        self.surgery: Copies | None = None
        self._at: dict[int, tuple[Home, int]] = {}
        self._clock = 0
        # The unit that is asked for right now: not to be evicted for one that comes later.
        self._current: Home | None = None
        # Parameters that somebody wrote to while they were bound.
        self.written: set[str] = set()
        # Finds what was written to past torch's counters, where that was asked for.
        self.sums: Sums | None = None
        # Hears of parameters that are touched outside of their modules.
        self.on_borrowed: Callable[[Iterable[Place]], None] | None = None
        self.counters = {"fetches": 0, "hits": 0, "adopted": 0, "evictions": 0}
        # A budget that has more room, where a unit of so many bytes finds none.
        self.budget_option = "host_memory"
        self.larger_budget: Callable[[int], int] = lambda nbytes: nbytes
        # Hears when the use of a unit has ended.
        self.on_used: Callable[[], None] | None = None

    def add(self, name: str, nbytes: int, *, pinned: bool) -> Home:
        """A unit of so many bytes; its places follow."""
        slot_bytes = next((size for size in self._classes if size >= nbytes), nbytes)
        home = Home(len(self.homes), name, nbytes, slot_bytes, pinned=pinned)
        self.homes.append(home)
        return home

    # --- binding ---------------------------------------------------------------

    def note_thread(self) -> None:
        """A thread is about to use parameters: from its first module on it must not lean on what another has bound."""
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        elif thread != self._thread and not is_autograds():
            self.several = True

    def bind(self, home: Home) -> None:
        """Make a unit's parameters real. Every call is ended by `unbind`."""
        with self.lock:
            if self._changing and self._changer != threading.get_ident():
                self._turn.wait_for(lambda: not self._changing)
            self.note_thread()
            if home.bound == 0:
                base = self.use(home)
                if home.views is None:
                    home.views = [_view(base, place) for place in home.places]
                home.guarded = self.several or others_alive(self._thread)
                for place, view in zip(home.places, home.views, strict=True):
                    place.bind(view, guarded=home.guarded)
            home.bound += 1
            if home.guarded:
                _count(home.holders, 1)

    def unbind(self, home: Home) -> None:
        """End what `bind` began."""
        with self.lock:
            # close() may have ended it already.
            home.bound = max(0, home.bound - 1)
            if home.bound > 0:
                if home.guarded:
                    _count(home.holders, -1)
                return
            home.holders.clear()
            written = [place.name for place in home.places if place.written]
            for place in home.places:
                place.unbind()
            self._find_written(home, written)
        if self.on_used is not None:
            self.on_used()

    def holds(self, place: Place) -> bool:
        """Whether this thread has bound a parameter that asks; see `placeholder.Source`."""
        return threading.get_ident() in self.home_of[place.name].holders

    @contextmanager
    def borrowed(self, places: Iterable[Place]) -> Iterator[None]:
        """Bind the units of some parameters for one operation; see `placeholder.Source`."""
        if self.closed:
            raise UsageError(self.closed)
        if self.on_borrowed is not None:
            self.on_borrowed(places)
        homes = list({id(home): home for home in (self.home_of[place.name] for place in places)}.values())
        bound: list[Home] = []
        pushed = False
        with self.lock:
            if threading.get_ident() not in self._touching:
                self._turn.wait_for(lambda: self._changer in (None, threading.get_ident()))
            _count(self._touching, 1)
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
            with self.lock:
                _count(self._touching, -1)
                self._turn.notify_all()

    def detached(self, place: Place) -> torch.Tensor | None:
        """See `placeholder.Source`."""
        return self.surgery.detached(place) if self.surgery is not None else None

    def assigned(self, place: Place, values: torch.Tensor) -> bool:
        """See `placeholder.Source`."""
        return self.surgery is not None and self.surgery.assigned(place, values)

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
            self.order.went_to(home.index)
            if home.base is None:
                self._bring(home)
            else:
                self.counters["hits"] += 1
            self._look_ahead()
            base = home.base
            assert base is not None
            if self._used is not None:
                self._used(base)
            return base

    def _bring(self, home: Home) -> None:
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
            if self.sums is not None:
                self.sums.note(home)

    def _start(self, home: Home, *, must: bool) -> bool:
        """Lease memory and begin the read."""
        lease = self._room(home, must=must)
        if lease is None:
            return False
        with torch.inference_mode(mode=False):
            base = lease.tensor((home.nbytes,), torch.uint8)
        home.weak = None
        home.fetch = self._begin(home.name, base)
        home.pending = base
        self.counters["fetches"] += 1
        return True

    def _adopt(self, home: Home) -> bool:
        """Take living bytes of the current version again."""
        if home.weak is None or home.weak[1] != home.version:
            return False
        storage = _alive(home.weak[0])
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
                        raise self._crowded(home) from None
            leaving = self._is_leaving(home)
            if not must and (evicted or leaving):
                # It is asked for again soon; waiting here would keep compute from going on.
                return None
            if leaving and patience != _LAST_SECONDS and (self._busy() or not patience):
                # Whoever read it lets go in a moment; an update that works on it, when it is done.
                patience = _RELEASE_SECONDS
                continue
            victim = self._victim(home, must=must)
            if victim is not None:
                self.evict(victim)
                evicted, patience = True, 0.0
            elif must:
                patience = _LAST_SECONDS
            else:
                return None

    def _is_leaving(self, home: Home) -> bool:
        """Whether the bytes of an evicted unit of the same class are still held by somebody."""
        return any(
            other.slot_bytes == home.slot_bytes
            and other is not home
            and other.base is None
            and other.fetch is None
            and other.weak is not None
            and not other.weak[0].expired()
            for other in self.homes
        )

    def _victim(self, home: Home, *, must: bool) -> Home | None:
        """The unit in the same class whose next use is farthest; one that is used before `home` only if it must be."""
        best: Home | None = None
        best_key = (-1, 0)
        for other in self.homes:
            if other.slot_bytes != home.slot_bytes or other.bound or other.pinned or other in (home, self._current):
                continue
            if other.base is None and (other.fetch is None or not must):
                continue
            key = (self.order.next_use(other.index), -other.used)
            if key > best_key:
                best, best_key = other, key
        if best is not None and not must and best_key[0] <= self.order.next_use(home.index):
            return None
        return best

    def evict(self, home: Home) -> None:
        """Let a unit's bytes go; views that others hold keep them until they are gone."""
        with self.lock:
            if home.fetch is not None:
                # Dropping a read waits for it; what it reads into goes after it, and was never checked.
                home.fetch = None
                home.pending = None
                home.weak = None
            if self.sums is not None:
                self.written.update(self.sums.changed(home))
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
        near = self._lookahead
        for count, index in enumerate(self.order.ahead(near + _FARTHER if near else 0)):
            home = self.homes[index]
            if home.base is not None or home.fetch is not None or self._adopt(home):
                continue
            if count >= near and not (self._arena.free_slots(home.nbytes) or self._has_useless(home.slot_bytes)):
                continue
            if not self._start(home, must=False):
                return

    def _has_useless(self, slot_bytes: int) -> bool:
        """Whether something resident has values that the next commit will make old, and is not used before it."""
        return any(
            home.slot_bytes == slot_bytes
            and home.trained
            and home.base is not None
            and not (home.bound or home.pinned)
            and not self.order.is_used_again(home.index)
            for home in self.homes
        )

    def _crowded(self, home: Home) -> BudgetError:
        holders = [
            other.name
            for other in self.homes
            if other.slot_bytes == home.slot_bytes and other.weak is not None and _alive(other.weak[0]) is not None
        ]
        smallest = self.larger_budget(home.slot_bytes)
        return BudgetError(
            f"no room for unit {home.name!r} ({home.nbytes} bytes): all places of its size are held by views of "
            f"{', '.join(holders) or 'units in use'}, which a checkpoint segment of several blocks, or your "
            f"code, keeps; {self.budget_option}={smallest} works",
            smallest=smallest,
        )

    def find_written(self) -> None:
        """Look for values in memory that are not what was read, where that was asked for."""
        with self.lock:
            for home in self.homes:
                self._find_written(home)

    def _find_written(self, home: Home, seen: Iterable[str] = ()) -> None:
        written = {*seen, *(self.sums.changed(home) if self.sums is not None else ())}
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

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the operations of other threads on parameters end, and no other thread bind anything inside."""
        here = threading.get_ident()
        with self.lock:
            self._turn.wait_for(lambda: self._changer in (None, here))
            self._changer = here
            self._changes += 1
        try:
            with self.lock:
                # An operation that has begun goes on, also where it binds more; no other begins.
                self._turn.wait_for(lambda: not self._touching.keys() - {here}, timeout=_TOUCH_SECONDS)
                self._changing = True
            yield
        finally:
            with self.lock:
                self._changes -= 1
                if self._changes == 0:
                    self._changer, self._changing = None, False
                    self._turn.notify_all()

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
                if home.bound:
                    home.bound = 1
                    self.unbind(home)
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
            return None if home.base is None else _view(home.base, place)

    # --- what the saved-tensor hooks ask ------------------------------------------

    def home_at(self, address: int) -> tuple[Any, int] | None:
        """The unit whose bytes begin at an address, and their version."""
        return self._at.get(address)

    def storage_of(self, home: Home, version: int) -> torch.UntypedStorage:
        """The bytes of a unit as they were at `version`."""
        with self.lock:
            if home.version != version:
                raise UsageError(
                    f"a graph needs unit {home.name!r} as it was before step(); call backward() before step(), or run "
                    "the forward again"
                )
            return self.use(home).untyped_storage()


def _count(threads: dict[int, int], more: int) -> None:
    """Count for this thread; those that stand at nothing are not there."""
    thread = threading.get_ident()
    count = threads.pop(thread, 0) + more
    if count > 0:
        threads[thread] = count


def _view(base: torch.Tensor, place: Place) -> torch.Tensor:
    with torch.inference_mode(mode=False), torch.no_grad():
        view = torch.empty(0, dtype=place.dtype, device=base.device)
        return view.set_(base.untyped_storage(), place.offset // view.element_size(), place.shape, place.stride)


def _alive(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage of a weak reference, if it lives."""
    if weak.expired():
        return None
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)  # noqa: SLF001
