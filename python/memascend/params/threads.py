"""Makes other threads wait while one thread changes parameters; rejects the use of a model in a forked process."""

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


# Top-level packages whose threads are assumed not to use a model's parameters on their own: data loaders, progress
# bars, notebooks, test runners.
_HELPERS = ("torch", "tqdm", "multiprocessing", "ipykernel", "execnet", "memascend")


class _Thread(threading.local):
    """Thread-local state."""

    works_for = 0  # the identifier of the thread for which this thread computes; 0 if there is none


_thread = _Thread()


def working_for(thread: int) -> AbstractContextManager[None]:
    """Context manager in which this thread uses parameters under the identifier of `thread`, while `thread` waits."""
    return replaced(_thread, "works_for", thread)


def current() -> int:
    """Returns the identifier under which this thread uses parameters: `works_for` if it is set, else its own."""
    return _thread.works_for or threading.get_ident()


def works_for_another() -> bool:
    """True if this thread computes a micro-batch for another thread."""
    return bool(_thread.works_for)


def is_autograds() -> bool:
    """True if autograd made this thread; it computes a backward while the thread that called backward() waits."""
    return bool(torch._C._current_graph_task_id() != -1) and isinstance(  # noqa: SLF001
        threading.current_thread(),
        threading._DummyThread,  # noqa: SLF001
    )


def _compilers() -> set[threading.Thread]:
    """Returns the pool threads of torch.compile, which only compile."""
    loaded = sys.modules.get("torch._inductor.async_compile")
    found: set[threading.Thread] = set()
    for name in ("pool", "thread_pool"):
        made = getattr(getattr(loaded, "AsyncCompile", None), name, None)
        if made is not None and hasattr(made, "cache_info") and made.cache_info().currsize:
            found |= getattr(made(), "_threads", set())
    return found


def _is_helper(thread: threading.Thread) -> bool:
    """True if code of `_HELPERS`, or code in C++ or Rust (such as autograd), started `thread`."""
    if isinstance(thread, threading._DummyThread):  # noqa: SLF001
        return True
    module = getattr(getattr(thread, "_target", None), "__module__", None) or type(thread).__module__
    return module.partition(".")[0] in _HELPERS


# The longest time that a thread waits until the operations of other threads on parameters end, or until the modules of
# other threads release memory.
_TOUCH_SECONDS = 60.0
# How many seconds a thread that waits for memory sleeps before it looks for free memory again.
_LOOK_SECONDS = 0.05
FORKED = (
    "this process is a fork of the process that called offload(), and cannot use its model: use the model in the "
    "original process, or call offload() on another model in this process"
)


class OwnProcess:
    """Detects that this process is a fork of the process that offloaded a model.

    In a fork, the threads of memascend do not run, and the bytes of units are zeros.
    """

    def __init__(self) -> None:
        # True if this process is a fork.
        self.is_elsewhere = False
        _own.add(self)

    def refuse(self) -> None:
        """Marks this process as a fork; called after the fork, in the child."""
        self.is_elsewhere = True

    def require_here(self) -> None:
        """Raises UsageError in a fork."""
        if self.is_elsewhere:
            raise UsageError(FORKED)


class ProcessLock(type(threading.RLock())):  # type: ignore[misc]
    """A reentrant lock that raises UsageError in a fork, where the thread that holds the lock may not exist.

    Each step takes the lock many times, so outside of forks it is a plain lock that runs no Python code.
    """

    def __init__(self) -> None:
        _own.add(self)

    def refuse(self) -> None:
        """Makes the lock raise an error from now on; called after a fork, in the child."""
        self.__class__ = _ForksLock


class _ForksLock(ProcessLock):
    """A lock of the parent process; taking it raises UsageError."""

    def __enter__(self) -> NoReturn:
        raise UsageError(FORKED)


# The objects to notify in the child of a fork.
_own: weakref.WeakSet[OwnProcess | ProcessLock] = weakref.WeakSet()


def _refuse_forks() -> None:
    for one in list(_own):
        one.refuse()


os.register_at_fork(after_in_child=_refuse_forks)


class Turns:
    """Lets many threads use parameters, or one thread change them; `Residency.lock` guards all fields."""

    def __init__(self, lock: ProcessLock) -> None:
        self.lock = lock
        # Threads wait on this condition for a change of a field below, or for the release of a unit.
        self._turn = threading.Condition(lock)
        # `_changer` is the thread in `alone`. `_changing` is True once `_changer` may change values: the operations of
        # all other threads have ended, or `_TOUCH_SECONDS` have passed.
        self._changer: int | None = None
        self._changing = False
        # The threads that run an operation in `touching`.
        self._touching: set[int] = set()
        # True once a second thread has used parameters: then each thread must materialize units for itself.
        self.several = False
        # The first thread that used parameters.
        self._first: int | None = None
        # The threads that wait in `wait_to_read` for memory of other threads.
        self._waiting: set[int] = set()

    def note_thread(self) -> None:
        """Records that this thread is about to use parameters; sets `several` for the second thread."""
        thread = current()
        if self._first is None:
            self._first = thread
        elif thread != self._first and not is_autograds():
            self.several = True

    def others_alive(self) -> bool:
        """True if another living thread may use parameters; known helper threads of libraries do not count."""
        if threading.active_count() == 1:
            return False
        here = {threading.get_ident(), current()}
        if self._first is not None and is_autograds():
            # The first thread called this backward, and waits for it.
            here.add(self._first)
        others = [thread for thread in threading.enumerate() if thread.ident not in here and not _is_helper(thread)]
        return bool(others) and not _compilers().issuperset(others)

    def wait_to_materialize(self, holders: Callable[[], set[int]]) -> None:
        """Calls `wait_to_read`, and then waits until no other thread changes values.

        The caller must hold the lock.
        """
        self.note_thread()
        self.wait_to_read(holders)
        if self._changing and self._changer != current():
            self._turn.wait_for(lambda: not self._changing)

    def wait_to_read(self, holders: Callable[[], set[int]]) -> None:
        """Waits until the threads that `holders` returns release their memory. The caller must hold the lock.

        Returns at once unless `several` is set. Does not wait for a thread that also waits in this method. Returns
        after `_TOUCH_SECONDS` at the latest. The caller then evicts a unit, takes more memory, or raises an error.
        """
        here, deadline = current(), time.monotonic() + _TOUCH_SECONDS
        while self.several and holders() - self._waiting and time.monotonic() < deadline:
            self._waiting.add(here)
            try:
                # A slot becomes free without a notification when its last view is deleted, so this thread must check
                # again soon.
                self._turn.wait(_LOOK_SECONDS)
            finally:
                self._waiting.discard(here)

    def note_release(self) -> None:
        """Notifies waiting threads that a unit was released. The caller must hold the lock."""
        if self.several:
            self._turn.notify_all()

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Context manager for one operation on parameters; first waits until no other thread is in `alone`."""
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
        """Ends operations of this thread that an interrupt left in `touching`."""
        with self.lock:
            self._touching.discard(current())
            self._turn.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context manager in which only this thread may materialize units.

        First waits until no other thread is in `alone`. Then waits until the operations of other threads have ended,
        but not longer than `_TOUCH_SECONDS`.
        """
        here = current()
        with self.lock:
            self._turn.wait_for(lambda: self._changer in (None, here))
            is_outermost, self._changer = self._changer is None, here
        try:
            with self.lock:
                # Operations that are already in `touching` may continue, and materialize more units. `_changer`
                # prevents new operations.
                self._turn.wait_for(lambda: not self._touching - {here}, timeout=_TOUCH_SECONDS)
                self._changing = True
            yield
        finally:
            if is_outermost:
                with self.lock:
                    self._changer, self._changing = None, False
                    self._turn.notify_all()
