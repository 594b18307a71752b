"""Serialises threads that use parameters with the one that changes them."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memascend.errors import UsageError
from memascend.residency.threads import current, is_autograds

if TYPE_CHECKING:
    from collections.abc import Iterator

# How long an operation of another thread on a parameter may take before it is refused as one that does not end.
_TOUCH_SECONDS = 60.0


class OwnProcess:
    """The process that offloaded a model; its forks have none of the threads, and see zeros where units are."""

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the process that asks is a fork of it."""
        return os.getpid() != self._id

    def require_here(self) -> None:
        """Refuse what a fork asks."""
        if self.is_elsewhere:
            raise UsageError(
                "the model belongs to the process that offloaded it, and this process is a fork of it: compute there, "
                "or offload a model here"
            )


class ProcessLock(type(threading.RLock())):  # type: ignore[misc]
    """A reentrant lock that a fork is refused: it may be held there by a thread that is not there."""

    def __init__(self) -> None:
        self.process = OwnProcess()

    def __enter__(self) -> bool:
        self.process.require_here()
        return bool(super().__enter__())


class Turns:
    """Which threads use parameters now, and which one waits to change them; all under the residency's lock."""

    def __init__(self, lock: ProcessLock) -> None:
        self.lock = lock
        # Tells of every change of what follows.
        self._turn = threading.Condition(lock)
        # The thread that changes values or waits to, how deep, and whether the others have stopped; see `alone`.
        self._changer: int | None = None
        self._changes = 0
        self._changing = False
        # Threads that carry out one operation on a parameter, with how often.
        self._touching: dict[int, int] = {}
        # More threads than one have bound units: what one has bound is not bound for another.
        self.several = False
        # The first one that used them.
        self.first: int | None = None

    def note_thread(self) -> None:
        """A thread is about to use parameters: from its first module on it must not lean on what another has bound."""
        thread = current()
        if self.first is None:
            self.first = thread
        elif thread != self.first and not is_autograds():
            self.several = True

    def wait_to_bind(self) -> None:
        """Under the lock: let another thread that changes values end."""
        if self._changing and self._changer != current():
            self._turn.wait_for(lambda: not self._changing)
        self.note_thread()

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Carry out one operation on parameters inside, not while another thread changes them or waits to."""
        here = current()
        with self.lock:
            if here not in self._touching:
                self._turn.wait_for(lambda: self._changer in (None, here))
            count_here(self._touching, 1)
        try:
            yield
        finally:
            with self.lock:
                count_here(self._touching, -1)
                self._turn.notify_all()

    def release(self) -> None:
        """End what an interrupt left of this thread's operations."""
        with self.lock:
            if self._touching.pop(current(), None) is not None:
                self._turn.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the operations of other threads on parameters end, and no other thread bind anything inside."""
        here = current()
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


def count_here(threads: dict[int, int], more: int) -> None:
    """Count for this thread; those that stand at nothing are not there."""
    thread = current()
    counted = threads.pop(thread, 0) + more
    if counted > 0:
        threads[thread] = counted
