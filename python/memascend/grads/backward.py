"""Follows backwards: how many a step has, which of them failed, and those inside of another."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch.utils.checkpoint import CheckpointFunction

from memascend.errors import UsageError
from memascend.params import module_hooks
from memascend.params.threads import current, is_autograds, works_for_another

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


# What runs a reentrant checkpoint's part of the model, without gradients, for the first time.
_CHECKPOINTED = CheckpointFunction.forward.__code__


class Backwards:
    """The backwards since the last step, and the one that is open or failed."""

    def __init__(self, declared: int, begins: Callable[[], None], fails: Callable[[], None]) -> None:
        """None yet; `declared` ones make a step.

        `begins` is called at the begin of each backward, which it may reject, and `fails` after each failed one, once
        the failure is seen.
        """
        self.declared: float = declared
        # Backwards before those that a call has said will follow; None outside of such a call.
        self.before: int | None = None
        # Backwards that ended and brought a gradient.
        self.count = 0
        self._begins = begins
        self._fails = fails
        # The state of the last one, and whether it has brought a gradient, where it is open.
        self._state: Literal["ended", "open", "delivers", "failed"] = "ended"
        # Of the one that is open or failed: autograd's number, and the thread that began it.
        self._number = self._thread = 0
        # The thread that computed the model last, which begins a backward where autograd's own thread runs it.
        self._last = 0

    @staticmethod
    def inside() -> bool:
        """Whether autograd runs a backward in this thread now."""
        return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001

    @property
    def failed(self) -> bool:
        """Whether the last one failed, and its gradients were not dropped."""
        return self._state == "failed"

    def enter(self, *, delivers: bool = False) -> bool:
        """Note that a backward runs, and whether it brings a gradient; returns whether this is one inside another."""
        number = torch._C._current_graph_task_id()  # noqa: SLF001
        if number == -1:
            return False
        if self._state in ("ended", "failed"):
            self._begins()
            module_hooks.note_thread()
            self._state = "open"
            self._number, self._thread = number, self._last if is_autograds() else current()
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)  # noqa: SLF001
        if delivers:
            self._state = "delivers"
        return bool(number != self._number)

    def _ended(self) -> None:
        # One that asked for gradients of something else is none.
        self.count += self._state == "delivers"
        self._state = "ended"

    def entered(self) -> None:
        """The model is entered; by another thread than the one that has a backward open, this says nothing of it."""
        if works_for_another():
            # Another micro-batch of the call may be in its backward, and the call itself sees which fails.
            return
        here, inside = current(), torch._C._current_graph_task_id() != -1  # noqa: SLF001
        if not inside:
            self._last = here
        if inside if self._state == "ended" else here == self._thread:
            self.seen_outside()

    def seen_outside(self) -> None:
        """A backward that is still open, seen from outside, failed."""
        if self.inside():
            self.enter()
        elif self._state in ("open", "delivers"):
            self._state = "failed"
            self._fails()
            module_hooks.let_go()

    def restart(self) -> None:
        """Count anew: a step was made, or all gradients were dropped."""
        self.count = 0

    def note_ended(self, more: int) -> None:
        """Count backwards that ended and brought gradients, and that this object did not follow."""
        self.count += more

    def forget_failure(self) -> None:
        """The gradients of a failed backward were dropped."""
        if self.failed:
            self._state = "ended"
        self.restart()

    @contextmanager
    def expecting(self, more: float) -> Iterator[None]:
        """So many backwards follow inside; where no number was declared, the last of them makes the step.

        Infinity: their number is not known, so `step()` makes it.
        """
        declared, self.before = self.declared, self.count
        if declared == 1:
            self.declared = self.count + more
        try:
            yield
        finally:
            self.declared, self.before = declared, None

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
