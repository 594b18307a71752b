"""Serialises threads that use parameters with the one that changes them."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch

from memascend.errors import UsageError
from memascend.text import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


# Threads of these packages carry out their own work, and never touch a model: progress bars, loaders, debuggers.
_HELPERS = ("torch", "tqdm", "multiprocessing", "ipykernel", "execnet", "memascend")


class _Thread(threading.local):
    """A thread, and the one that it works for."""

    works_for = 0


_thread = _Thread()


def working_for(thread: int) -> AbstractContextManager[None]:
    """Inside, units that this thread materializes are so for another one, which waits."""
    return replaced(_thread, "works_for", thread)


def current() -> int:
    """The thread that uses parameters here: this one, or the one that it works for, which waits meanwhile."""
    return _thread.works_for or threading.get_ident()


def works_for_another() -> bool:
    """Whether this thread computes a micro-batch for another one, as others do by turns."""
    return bool(_thread.works_for)


def is_autograds() -> bool:
    """Whether this is a thread of autograd's, which computes a backward while the one that began it waits."""
    return bool(torch._C._current_graph_task_id() != -1) and isinstance(  # noqa: SLF001
        threading.current_thread(),
        threading._DummyThread,  # noqa: SLF001
    )


def _compilers() -> set[threading.Thread]:
    """The threads that torch.compile keeps: a pool like any other, which runs nothing but compilers."""
    loaded = sys.modules.get("torch._inductor.async_compile")
    found: set[threading.Thread] = set()
    for name in ("pool", "thread_pool"):
        made = getattr(getattr(loaded, "AsyncCompile", None), name, None)
        if made is not None and hasattr(made, "cache_info") and made.cache_info().currsize:
            found |= getattr(made(), "_threads", set())
    return found


def _is_helper(thread: threading.Thread) -> bool:
    if isinstance(thread, threading._DummyThread):  # noqa: SLF001
        # Begun outside of Python, as autograd's and ours are.
        return True
    module = getattr(getattr(thread, "_target", None), "__module__", None) or type(thread).__module__
    return module.partition(".")[0] in _HELPERS


# How long an operation of another thread on a parameter may take before it is refused as one that does not end.
_TOUCH_SECONDS = 60.0
# How often a thread that waits for memory looks whether there is some.
_LOOK_SECONDS = 0.05
FORKED = (
    "the model belongs to the process that offloaded it, and this process is a fork of it: compute there, or offload a "
    "model here"
)


class OwnProcess:
    """The process that offloaded a model; its forks have none of the threads, and see zeros where units are."""

    def __init__(self) -> None:
        # Whether the process that asks is a fork of it.
        self.is_elsewhere = False
        _own.add(self)

    def refuse(self) -> None:
        """This is a fork of it."""
        self.is_elsewhere = True

    def require_here(self) -> None:
        """Reject a call in a fork."""
        if self.is_elsewhere:
            raise UsageError(FORKED)


class ProcessLock(type(threading.RLock())):  # type: ignore[misc]
    """A reentrant lock that a fork is refused: it may be held there by a thread that is not there.

    Each step takes it some fifty times: in its own process it is a plain lock, without a call of Python.
    """

    def __init__(self) -> None:
        _own.add(self)

    def refuse(self) -> None:
        """In a fork, taking the lock raises an error from now on."""
        self.__class__ = _ForksLock


class _ForksLock(ProcessLock):
    """A lock of the process that this one is a fork of."""

    def __enter__(self) -> NoReturn:
        raise UsageError(FORKED)


_own: weakref.WeakSet[OwnProcess | ProcessLock] = weakref.WeakSet()


def _refuse_forks() -> None:
    for one in list(_own):
        one.refuse()


os.register_at_fork(after_in_child=_refuse_forks)


class Turns:
    """Which threads use parameters now, and which one waits to change them; all under the residency's lock."""

    def __init__(self, lock: ProcessLock) -> None:
        self.lock = lock
        # Notified of every change of the following attributes.
        self._turn = threading.Condition(lock)
        # The thread that changes values or waits to, and whether the others have stopped; see `alone`.
        self._changer: int | None = None
        self._changing = False
        # Threads that carry out one operation on a parameter.
        self._touching: set[int] = set()
        # More than one thread has materialized units: a unit that one has materialized is not so for another.
        self.several = False
        # The first one that used them.
        self._first: int | None = None
        # Threads that wait for memory that others hold.
        self._waiting: set[int] = set()

    def note_thread(self) -> None:
        """A thread is about to use parameters: it must not rely on units that another has materialized."""
        thread = current()
        if self._first is None:
            self._first = thread
        elif thread != self._first and not is_autograds():
            self.several = True

    def others_alive(self) -> bool:
        """Whether a thread runs beside this one that is not known to be a library's helper."""
        if threading.active_count() == 1:
            return False
        here = {threading.get_ident(), current()}
        if self._first is not None and is_autograds():
            # It waits for this one.
            here.add(self._first)
        others = [thread for thread in threading.enumerate() if thread.ident not in here and not _is_helper(thread)]
        return bool(others) and not _compilers().issuperset(others)

    def wait_to_materialize(self, holders: Callable[[], set[int]]) -> None:
        """Under the lock: let another thread that changes values end, and others release the memory that is needed."""
        self.note_thread()
        self.wait_to_read(holders)
        if self._changing and self._changer != current():
            self._turn.wait_for(lambda: not self._changing)

    def wait_to_read(self, holders: Callable[[], set[int]]) -> None:
        """Under the lock: let the threads that hold the memory that is needed release it, unless they wait themselves.

        After some time, memory is made or there is an error.
        """
        here, deadline = current(), time.monotonic() + _TOUCH_SECONDS
        while self.several and holders() - self._waiting and time.monotonic() < deadline:
            self._waiting.add(here)
            try:
                # What a view holds comes back without a notice.
                self._turn.wait(_LOOK_SECONDS)
            finally:
                self._waiting.discard(here)

    def note_release(self) -> None:
        """Under the lock: a thread has ended a module, whose memory another one may wait for."""
        if self.several:
            self._turn.notify_all()

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Carry out one operation on parameters inside, not while another thread changes them or waits to."""
        here = current()
        with self.lock:
            is_outermost = here not in self._touching
            if is_outermost:
                self._turn.wait_for(lambda: self._changer in (None, here))
                self._touching.add(here)
        try:
            yield
        finally:
            if is_outermost:
                with self.lock:
                    self._touching.discard(here)
                    self._turn.notify_all()

    def release(self) -> None:
        """End operations of this thread that an interrupt left open."""
        with self.lock:
            self._touching.discard(current())
            self._turn.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the operations of other threads on parameters end, and no other thread materialize anything inside."""
        here = current()
        with self.lock:
            self._turn.wait_for(lambda: self._changer in (None, here))
            is_outermost, self._changer = self._changer is None, here
        try:
            with self.lock:
                # An operation that has begun continues, also where it materializes more; no other begins.
                self._turn.wait_for(lambda: not self._touching - {here}, timeout=_TOUCH_SECONDS)
                self._changing = True
            yield
        finally:
            if is_outermost:
                with self.lock:
                    self._changer, self._changing = None, False
                    self._turn.notify_all()
