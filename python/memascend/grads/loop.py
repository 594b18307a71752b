"""Follows the training loop, and decides by its backwards and its use of gradients when updates begin."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch.utils.checkpoint import CheckpointFunction

from memascend.errors import UsageError
from memascend.params import module_hooks
from memascend.params.threads import current, is_autograds, works_for_another

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator
    from types import FrameType

    from memascend.distributed.control_plane import Exchange


_log = logging.getLogger("memascend")
# Actions that always change gradients between their arrival and step().
_CHANGING = frozenset({"a GradScaler", "zero_grad(set_to_none=False)"})
# What runs a reentrant checkpoint's part of the model, without gradients, for the first time.
_CHECKPOINTED = CheckpointFunction.forward.__code__


class Loop:
    """The detected habits of the training loop, and so how gradients wait."""

    def __init__(self, mode: str, accumulation_steps: int, *, keeps: bool, figures: Exchange | None = None) -> None:
        """`mode` may be "auto", too; `keeps`: it is known to need its gradients until step().

        `figures` exchanges numbers between ranks, where there are several.
        """
        self._figures = figures
        # "fused" (gradients do not wait), "ssd" or "ram".
        self.mode = "ssd" if mode == "auto" else mode
        self.accumulation_steps = accumulation_steps
        self._is_auto = mode == "auto"
        self._learning = self._is_auto
        self._keeps = keeps
        self._noticed: set[str] = set()

    def notice(self, what: str) -> None:
        """Note an action of the loop that needs its gradients until step()."""
        self._noticed.add(what)

    @property
    def speculates(self) -> bool:
        """Whether gradients are kept for what may leave them as they are, as clipping: an update by them may stand."""
        if not self._is_auto or self.mode != "ssd" or self._figures is not None:
            return False
        return not self.adds_up and self._noticed.isdisjoint(_CHANGING)

    @property
    def adds_up(self) -> bool:
        """Whether several backwards make a step, and which one is the last is not known."""
        return self.accumulation_steps == 1 and "accumulation" in self._noticed

    @property
    def stays_kept(self) -> bool:
        """Whether gradients wait on storage until step(), in the next step, too."""
        return self.mode == "ssd" and (not self._learning or self._keeps or bool(self._noticed))

    def learn(self) -> str | None:
        """After the first step: decide how gradients wait; returns the words for the log, once."""
        if not self._learning:
            return None
        self._learning = False
        if self._figures is not None:
            # All ranks continue in the same way.
            told = self._figures.everyone(sorted(self._noticed))
            self._noticed = {word for theirs in told for word in theirs}
        if self._keeps or self._noticed:
            why = ", ".join(sorted(self._noticed)) or "a declared max_grad_norm or accumulation_steps"
            return f'gradients="auto": kept on storage until step() ("ssd"), because of {why}'
        self.mode = "fused"
        return 'gradients="auto": updated as they appear ("fused") from the second step on'


# A step that is made anew loses about as much as one that is not gains. So many in a row that would have stood are
# waited for at most: twice as many as before after each one that did not stand, half as many after each one that did.
WAIT_MAX = 256


class Speculation:
    """Decides whether updates begin before step() has the norm: as if it clipped nothing, and repeated where it does.

    Updates wait until so many steps in a row changed no gradient (plain "ssd"); then they begin early.
    """

    def __init__(self, loop: Loop, ram_tier: Container[str]) -> None:
        """`ram_tier` are parameters whose updates wait in any case."""
        # Steps some of whose updates began early, and of these the ones of which some were discarded.
        self.early = 0
        self.anew = 0
        self._loop = loop
        self._ram_tier = ram_tier
        # Steps in a row that changed no gradient, and how many of them it takes.
        self._unchanged = 0
        self._wanted = 1
        # Of this step: no update has begun, some have, or some of these were taken back.
        self._step: Literal["waits", "early", "anew"] = "waits"

    def may_begin(self, name: str) -> bool:
        """Whether the update of parameter `name`, whose gradient is whole, may begin."""
        return self._unchanged >= self._wanted and name not in self._ram_tier and self._loop.speculates

    def begins_after(self, *, unchanged: bool) -> bool:
        """Whether updates of the next step may begin early, where this one leaves its gradients `unchanged`."""
        stood = unchanged and self._step != "anew"
        return stood and self._unchanged + 1 >= self._wanted and self._loop.speculates

    def begun(self) -> None:
        """An update has begun early."""
        if self._step == "waits":
            self._step = "early"

    def taken_back(self) -> None:
        """One that had begun early was discarded; its gradient is still there."""
        self._step = "anew"

    def restart(self) -> None:
        """All gradients of a step that was not made were dropped."""
        self._step = "waits"

    def step_ended(self, *, unchanged: bool) -> None:
        """A step was committed, or skipped; `unchanged`: its updates were by the gradients as they appeared."""
        self.early += self._step != "waits"
        self._unchanged = self._unchanged + 1 if unchanged and self._step != "anew" else 0
        if self._step == "anew":
            self.anew += 1
            self._wanted = min(2 * self._wanted, WAIT_MAX)
            _log.info(
                "the gradients of this step were clipped or changed: the updates that had begun were discarded (%d of "
                "%d steps so far); the next ones begin after %d steps that change none",
                self.anew,
                self.early,
                self._wanted,
            )
        elif self._step == "early":
            self._wanted = max(self._wanted // 2, 1)
        self.restart()


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
