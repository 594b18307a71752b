"""Tracks autograd graph tasks; detects failed backwards."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import CheckpointFunction

from memascend.errors import UsageError
from memascend.residency import leftovers
from memascend.residency.threads import current, is_autograds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

# What runs a reentrant checkpoint's part of the model, without gradients, for the first time.
_CHECKPOINTED = CheckpointFunction.forward.__code__


class BackwardTasks:
    """The backwards since the last step, and the one that is open."""

    def __init__(self, declared: int, begins: Callable[[], None], fails: Callable[[], None]) -> None:
        """None yet.

        Args:
            declared: how many make a step.
            begins: hears of each new one, which it may refuse.
            fails: hears of each that failed, once that is seen.
        """
        self.declared = declared
        # A call has said how many follow.
        self.expected = False
        # Those that ended and brought a gradient.
        self.count = 0
        # The one that is open brought a gradient.
        self.delivered = False
        self.failed = False
        self._begins = begins
        self._fails = fails
        self._task: int | None = None
        # The thread that began it, and the one that computed the model last, which begins it where autograd's runs it.
        self._thread = self._last = 0

    @staticmethod
    def inside() -> bool:
        """Whether autograd runs a backward in this thread now."""
        return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001

    def enter(self) -> bool:
        """Note that a backward runs; whether this is one inside another."""
        task = torch._C._current_graph_task_id()  # noqa: SLF001
        if task == -1:
            return False
        if self._task is None:
            self._begins()
            leftovers.note_thread()
            self._task = task
            self._thread = self._last if is_autograds() else current()
            self.delivered = False
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)  # noqa: SLF001
        return bool(task != self._task)

    def _ended(self) -> None:
        self._task = None
        # One that asked for gradients of something else is none.
        self.count += self.delivered

    def entered(self) -> None:
        """The model is entered; by another thread than the one that has a backward open, this says nothing of it."""
        here = current()
        if not self.inside():
            self._last = here
        if self._task is None or here == self._thread:
            self.seen_outside()

    def seen_outside(self) -> None:
        """A backward that is still open, seen from outside, failed."""
        if self.inside():
            self.enter()
        elif self._task is not None:
            self._task = None
            self.failed = True
            self._fails()
            leftovers.let_go()

    def restart(self) -> None:
        """Count anew: a step was made, or all gradients were dropped."""
        self.count = 0

    def forget_failure(self) -> None:
        """What a failed one brought was dropped."""
        self.failed = False
        self.restart()

    @contextmanager
    def expecting(self, more: int) -> Iterator[None]:
        """So many backwards follow inside; where no number was declared, the last of them makes the step."""
        declared, self.expected = self.declared, True
        if declared == 1:
            self.declared = self.count + more
        try:
            yield
        finally:
            self.declared, self.expected = declared, False

    def is_last(self, more: int = 1) -> bool:
        """Whether the one that is open makes a step."""
        return (self.count + more) % self.declared == 0

    def require_declared(self, name: str) -> None:
        """Refuse more backwards than were declared: the step would be none of the loop's."""
        if 1 < self.declared <= self.count:
            raise UsageError(
                f"backward {self.count + 1} of a step of {self.declared}, for {name!r}: accumulation_steps= says "
                'how many make a step; pass another number, or gradients="ssd", which takes any'
            )


def in_reentrant_checkpoint() -> bool:
    """Whether this is the forward of a reentrant checkpoint: its backward is going to run inside of another."""
    if torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code is _CHECKPOINTED:
            return True
        frame = frame.f_back
    return False
