"""Follows backwards: hooks on accumulated gradients, how many backwards a step has, and which of them failed."""

from __future__ import annotations

import functools
import sys
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from memascend.errors import UsageError
from memascend.params import module_hooks
from memascend.params.threads import current, is_autograds, works_for_another

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


# In the parameters' tables of hooks, where torch's own keys are numbers.
_KEY = "memascend"


class AccumulationHooks:
    """One function for all parameters, called with each whose gradient was accumulated."""

    def __init__(self, heard: Callable[[torch.Tensor], None]) -> None:
        """`heard` is a bound method. torch holds hooks where Python's collector does not look, so it is held weakly."""
        weak = weakref.WeakMethod(heard)

        def call(parameter: torch.Tensor) -> None:
            method = weak()
            if method is not None:
                method(parameter)

        self._call = call
        self._parameters: list[Any] = []

    def add(self, parameter: torch.Tensor) -> None:
        """Call the function for gradients of this parameter."""
        self._parameters.append(parameter)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            frozen = not parameter.requires_grad
            # One that is frozen now may thaw later, and torch takes no hook of it.
            parameter.requires_grad_(True)
            own: Any = parameter
            if own._post_accumulate_grad_hooks is None:  # noqa: SLF001
                own._post_accumulate_grad_hooks = _Hooks()  # noqa: SLF001
            own._post_accumulate_grad_hooks[_KEY] = self._call  # noqa: SLF001
            parameter.requires_grad_(not frozen)

    def remove(self) -> None:
        """Release all parameters."""
        for parameter in self._parameters:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001
            if hooks is not None:
                hooks.pop(_KEY, None)
        self._parameters.clear()


class _Hooks(dict[Any, Any]):
    """A parameter's hooks, as torch's own table of them but smaller: a model has thousands of parameters."""

    __slots__ = ("__weakref__",)


# What runs a reentrant checkpoint's part of the model, without gradients, for the first time.
_CHECKPOINTED = CheckpointFunction.forward.__code__


class _Task:
    """A backward that is open, or that failed."""

    def __init__(self, number: int, thread: int) -> None:
        """`number` is that of autograd's task, `thread` the one that began it."""
        self.number = number
        self.thread = thread
        self.delivers = False
        self.failed = False

    def deliver(self) -> None:
        """Note that it brings a gradient."""
        self.delivers = True

    def fail(self) -> None:
        """Note that it ended by an exception."""
        self.failed = True


class Backwards:
    """The backwards since the last step, and the one that is open or failed."""

    def __init__(self, declared: int, begins: Callable[[], None], fails: Callable[[], None]) -> None:
        """None yet.

        Args:
            declared: how many make a step.
            begins: called at the begin of each backward, which it may reject.
            fails: called after each failed backward, once the failure is seen.
        """
        self.declared: float = declared
        # Backwards before those that a call has said will follow; None outside of such a call.
        self.before: int | None = None
        # Backwards that ended and brought a gradient.
        self.count = 0
        self._begins = begins
        self._fails = fails
        self._task: _Task | None = None
        # The thread that computed the model last, which begins a backward where autograd's own thread runs it.
        self._last = 0

    @staticmethod
    def inside() -> bool:
        """Whether autograd runs a backward in this thread now."""
        return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001

    @property
    def failed(self) -> bool:
        """Whether the last one failed, and its gradients were not dropped."""
        return self._task is not None and self._task.failed

    def enter(self, *, delivers: bool = False) -> bool:
        """Note that a backward runs, and whether it brings a gradient; returns whether this is one inside another."""
        number = torch._C._current_graph_task_id()  # noqa: SLF001
        if number == -1:
            return False
        task = self._task
        if task is None or task.failed:
            self._begins()
            module_hooks.note_thread()
            task = self._task = _Task(number, self._last if is_autograds() else current())
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)  # noqa: SLF001
        if delivers:
            task.deliver()
        return bool(number != task.number)

    def _ended(self) -> None:
        # One that asked for gradients of something else is none.
        self.count += self._task is not None and self._task.delivers
        self._task = None

    def entered(self) -> None:
        """The model is entered; by another thread than the one that has a backward open, this says nothing of it."""
        if works_for_another():
            # Another micro-batch of the call may be in its backward, and the call itself sees which fails.
            return
        here = current()
        if not self.inside():
            self._last = here
        if self._task is None or here == self._task.thread:
            self.seen_outside()

    def seen_outside(self) -> None:
        """A backward that is still open, seen from outside, failed."""
        if self.inside():
            self.enter()
        elif self._task is not None and not self._task.failed:
            self._task.fail()
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
            self._task = None
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


# The gradient's own, and the one that asks.
_STORAGE_USES = 2


def shares_memory(values: torch.Tensor) -> bool:
    """Whether another tensor has the memory."""
    return bool(torch._C._storage_Use_Count(values.untyped_storage()._cdata) > _STORAGE_USES)  # noqa: SLF001


def was_there(values: torch.Tensor, *, shared: bool) -> bool:
    """Whether a gradient is on memory that was in `p.grad` before the backward, and is the user's.

    A gradient that autograd makes is no view of another tensor, and on memory that can be resized. Accumulation into
    an existing gradient raises its version; shared memory is seldom written to otherwise.
    """
    return values._is_view() or not values.untyped_storage().resizable() or (shared and values._version > 0)  # noqa: SLF001


@functools.cache
def references_of_one() -> int:
    """Python's count of references to a gradient without other owners; versions of Python and torch differ in it."""
    with torch.inference_mode(mode=False):
        parameter = torch.nn.Parameter(torch.zeros((), device="cpu"))
        parameter.grad = torch.zeros((), device="cpu")
    values = parameter.grad
    return sys.getrefcount(values)
