"""Detects the habits of the training loop, and decides from them when updates begin."""

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
# Actions that change the gradients of most steps before step(). A loop with such an action gets no early updates.
_CHANGING = frozenset({"a GradScaler", "zero_grad(set_to_none=False)"})
# The code object of the function that runs a reentrant checkpoint's forward, without gradients.
_CHECKPOINTED = CheckpointFunction.forward.__code__


class Loop:
    """The detected habits of the training loop, which decide whether and where gradients wait for step()."""

    def __init__(self, mode: str, accumulation_steps: int, *, keeps: bool, figures: Exchange | None = None) -> None:
        """`mode` is "fused", "ssd", "ram" or "auto"; `keeps`: the loop is known to need gradients until step().

        `figures` exchanges values between ranks; None for a single rank.
        """
        self._figures = figures
        # "fused": updates use gradients as they appear. "ssd": gradients wait on storage for step(). "ram": gradients
        # wait in memory for step().
        self.mode = "ssd" if mode == "auto" else mode
        self.accumulation_steps = accumulation_steps
        self._is_auto = mode == "auto"
        self._learning = self._is_auto
        self._keeps = keeps
        self._noticed: set[str] = set()

    def notice(self, what: str) -> None:
        """Records an action of the loop that needs gradients until step()."""
        self._noticed.add(what)

    @property
    def speculates(self) -> bool:
        """True if updates may begin before step(), because kept gradients may reach step() unchanged.

        For example, clipping changes gradients only in steps in which their norm is too large.
        """
        if not self._is_auto or self.mode != "ssd" or self._figures is not None:
            return False
        return not self.adds_up and self._noticed.isdisjoint(_CHANGING)

    @property
    def adds_up(self) -> bool:
        """True if a step has several backwards, and the user did not declare their number."""
        return self.accumulation_steps == 1 and "accumulation" in self._noticed

    @property
    def stays_kept(self) -> bool:
        """True if `mode` is known to be "ssd" in the next step, too."""
        return self.mode == "ssd" and (not self._learning or self._keeps or bool(self._noticed))

    def decide_mode(self) -> str | None:
        """Decides between "ssd" and "fused" after the first step; returns the text for the log.

        Returns None on later calls, and if the user chose the mode.
        """
        if not self._learning:
            return None
        self._learning = False
        if self._figures is not None:
            # Take the union over all ranks, so that all ranks make the same decision.
            by_rank = self._figures.all_values(sorted(self._noticed))
            self._noticed = {word for theirs in by_rank for word in theirs}
        if self._keeps or self._noticed:
            why = ", ".join(sorted(self._noticed)) or "a declared max_grad_norm or accumulation_steps"
            return f'gradients="auto": gradients are kept on storage until step() ("ssd"), because of {why}'
        self.mode = "fused"
        return 'gradients="auto": from the second step on, updates begin as gradients appear ("fused")'


# The maximum of `Speculation._wanted`. Once `_wanted` steps in a row have changed no gradient, updates begin early.
# Beginning the updates of a step early saves about as much time as repeating them costs. So `_wanted` doubles after
# each step that discarded early updates, and halves after each step that kept all of them.
WAIT_MAX = 256


class Speculation:
    """Decides whether updates begin early: before step() has computed the norm and knows whether gradients change.

    If clipping or user code then changes a gradient, its early update is discarded, and step() makes the update again.
    Updates begin early once enough steps in a row have changed no gradient. Until then, updates begin in step().
    """

    def __init__(self, loop: Loop, ram_tier: Container[str]) -> None:
        """`ram_tier` has the names of parameters whose updates never begin early."""
        # `early`: the number of steps in which updates began early. `anew`: how many of these steps discarded updates.
        self.early = 0
        self.anew = 0
        self._loop = loop
        self._ram_tier = ram_tier
        # `_unchanged`: the number of steps in a row that changed no gradient. If it is at least `_wanted`, updates
        # begin early.
        self._unchanged = 0
        self._wanted = 1
        # The present step: no update has begun early ("waits"), some have ("early"), or some were discarded ("anew").
        self._step: Literal["waits", "early", "anew"] = "waits"

    def may_begin(self, name: str) -> bool:
        """True if the update of parameter `name`, whose gradient is complete, may begin before step()."""
        return self._unchanged >= self._wanted and name not in self._ram_tier and self._loop.speculates

    def begins_after(self, *, unchanged: bool) -> bool:
        """True if the next step may begin updates early; `unchanged`: the present step leaves gradients unchanged."""
        stood = unchanged and self._step != "anew"
        return stood and self._unchanged + 1 >= self._wanted and self._loop.speculates

    def begun(self) -> None:
        """Records that an update began early."""
        if self._step == "waits":
            self._step = "early"

    def taken_back(self) -> None:
        """Records that an update that began early was discarded; its gradient remains."""
        self._step = "anew"

    def restart(self) -> None:
        """Starts a new step, after a step ended or all gradients were dropped."""
        self._step = "waits"

    def step_ended(self, *, unchanged: bool) -> None:
        """Ends a committed or skipped step; `unchanged`: its updates used the gradients as they appeared."""
        self.early += self._step != "waits"
        self._unchanged = self._unchanged + 1 if unchanged and self._step != "anew" else 0
        if self._step == "anew":
            self.anew += 1
            self._wanted = min(2 * self._wanted, WAIT_MAX)
            _log.info(
                "updates that had begun before step() were discarded, because gradients were clipped or changed, "
                "options were changed, or the step was skipped (in %d of the %d steps with such updates so far); "
                "updates begin before step() again after %d steps in a row that change no gradient",
                self.anew,
                self.early,
                self._wanted,
            )
        elif self._step == "early":
            self._wanted = max(self._wanted // 2, 1)
        self.restart()


class Backwards:
    """Counts the backwards since the last step, and detects a backward that failed."""

    def __init__(self, declared: int, begins: Callable[[], None], fails: Callable[[], None]) -> None:
        """`declared` is the number of backwards that make a step.

        `begins` is called when a backward begins, and may reject it by raising. `fails` is called when a failed
        backward is detected.
        """
        self.declared: float = declared
        # Inside an `expecting()` block: the value of `count` when the block began. None outside of such a block.
        self.before: int | None = None
        # Since the last step: the number of backwards that ended and delivered a gradient.
        self.count = 0
        self._begins = begins
        self._fails = fails
        # The state of the last backward; "delivers": it is open and has delivered a gradient.
        self._state: Literal["ended", "open", "delivers", "failed"] = "ended"
        # About the open or failed backward: autograd's number of its graph task, and the thread that began the
        # backward.
        self._number = self._thread = 0
        # The thread that ran the model's last forward outside of a backward. If one of autograd's own threads runs a
        # backward, this thread counts as the thread that began the backward.
        self._last = 0

    @staticmethod
    def inside() -> bool:
        """True if autograd runs a backward in the current thread."""
        return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001

    @property
    def failed(self) -> bool:
        """True if the last backward failed and its gradients were not dropped."""
        return self._state == "failed"

    def enter(self, *, delivers: bool = False) -> bool:
        """Records the running backward, if any; `delivers`: it delivers a gradient.

        True if the backward runs inside another backward.
        """
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
        # A backward that delivered no parameter's gradient does not count. An example is a backward for the gradients
        # of inputs.
        self.count += self._state == "delivers"
        self._state = "ended"

    def entered(self) -> None:
        """Handles a forward of the model.

        If a backward is open, but its thread runs this forward outside of any backward, the open backward has failed.
        """
        if works_for_another():
            # Another micro-batch of the `accumulate()` call may be in its backward. The call itself detects failures.
            return
        here, inside = current(), torch._C._current_graph_task_id() != -1  # noqa: SLF001
        if not inside:
            self._last = here
        if inside if self._state == "ended" else here == self._thread:
            self.seen_outside()

    def seen_outside(self) -> None:
        """If this thread runs a backward, calls `enter()`; otherwise marks an open backward as failed."""
        if self.inside():
            self.enter()
        elif self._state in ("open", "delivers"):
            self._state = "failed"
            self._fails()
            module_hooks.drain_autograd_queue()

    def restart(self) -> None:
        """Counts backwards from 0 again."""
        self.count = 0

    def note_ended(self, more: int) -> None:
        """Counts `more` ended backwards that delivered gradients without a call of `enter()`."""
        self.count += more

    def forget_failure(self) -> None:
        """Ends the failed state, if any, and counts backwards from 0. Callers drop or zero all gradients."""
        if self.failed:
            self._state = "ended"
        self.restart()

    @contextmanager
    def expecting(self, more: float) -> Iterator[None]:
        """Expects `more` backwards inside the `with` block.

        The last of these backwards completes a step, unless the user declared the number of backwards in a step. If
        `more` is infinite, the number of backwards is not known, and only `step()` ends the step.
        """
        declared, self.before = self.declared, self.count
        if declared == 1:
            self.declared = self.count + more
        try:
            yield
        finally:
            self.declared, self.before = declared, None

    def is_last(self, more: int = 1) -> bool:
        """True if the last of the next `more` backwards completes a step; an open backward is the first of them."""
        return (self.count + more) % self.declared == 0

    def require_declared(self, name: str) -> None:
        """Raises UsageError for a backward beyond the declared number of backwards in a step.

        The updates of the step would not include the gradients of this backward.
        """
        if 1 < self.declared <= self.count:
            raise UsageError(
                f"backward {self.count + 1} of a step delivers a gradient of {name!r}, but accumulation_steps= or "
                f"accumulate() declared {self.declared} backwards: pass the real number of backwards in a step as "
                'accumulation_steps=, or pass gradients="ssd", which allows any number'
            )


def in_reentrant_checkpoint() -> bool:
    """True in the forward of a reentrant checkpoint, whose backward will run inside another backward."""
    if torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code is _CHECKPOINTED:
            return True
        frame = frame.f_back
    return False
