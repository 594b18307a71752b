"""Adds the gradients of several micro-batches in their order, while a unit's last micro-batch is still to come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.gradients.arrivals import Arrivals
    from memascend.gradients.gradient import Gradient
    from memascend.microbatches.baton import Baton, MicroBatch
    from memascend.microbatches.course import Course

# The gradient's own storage, and the reference that asks.
_STORAGE_USES = 2


class _Sum:
    """What has come of one parameter's gradient."""

    __slots__ = ("came", "early", "gradient", "stage", "stored", "values")

    def __init__(self, gradient: Gradient, stage: int) -> None:
        self.gradient = gradient
        # At which its parts arrive: a micro-batch that has passed it brings none.
        self.stage = stage
        # The micro-batches whose parts have come.
        self.came: set[int] = set()
        # Parts that came before one of an earlier micro-batch.
        self.early: dict[int, torch.Tensor] = {}
        self.values: torch.Tensor | None = None
        # The sum is on storage: memory had no room for it.
        self.stored = False


class PartialSums:
    """The gradients of one call. Each goes to the update or to storage once no micro-batch can add to it."""

    def __init__(
        self,
        arrivals: Arrivals,
        course: Course,
        baton: Baton,
        limit: int,
        room: Callable[[int], None],
        *,
        whole: bool,
    ) -> None:
        """Begin with none.

        Args:
            arrivals: takes what is complete.
            course: at which stage each gradient arrives.
            baton: which micro-batch runs, and how far the others are.
            limit: bytes of sums in memory; others lie on storage, and each part is added there.
            room: waits until the queue of gradients leaves room for so many bytes of sums.
            whole: nothing more of this step comes after the call.
        """
        self._arrivals = arrivals
        self._course = course
        self._baton = baton
        self._limit = limit
        self._room = room
        self._whole = whole
        self._open: dict[str, _Sum] = {}
        self._done: set[str] = set()
        # By the stage at which they are complete: the names of gradients that have begun to come.
        self._due: dict[int, list[str]] = {}
        self._passed = -1
        self.nbytes = 0
        self.peak = 0
        baton.on_low = self._reached

    def take(self, gradient: Gradient) -> bool:
        """Take the part of a gradient that a micro-batch has just accumulated, and leave nothing in `p.grad`."""
        own = self._baton.here
        if own is None:
            return False
        values = gradient.place.parameter.grad
        assert values is not None, "it was accumulated"
        gradient.place.parameter.grad = None
        if values.requires_grad or values.is_sparse:
            kind = "a sparse" if values.is_sparse else "backward(create_graph=True) leaves a graph on the"
            raise UsageError(f"{kind} gradient of {gradient.name!r} is not summed by layer: pass by_layer=False")
        if torch._C._storage_Use_Count(values.untyped_storage()._cdata) > _STORAGE_USES:  # noqa: SLF001
            # A view of memory that somebody else may write to.
            values = values.clone()
        with torch.no_grad():
            self._add_part(gradient, own, values)
        return True

    def _add_part(self, gradient: Gradient, own: MicroBatch, values: torch.Tensor) -> None:
        name = gradient.name
        found = self._open.get(name)
        if name in self._done or (found is not None and own.index in found.came):
            raise _other_order(name)
        if found is None:
            found = self._open[name] = _Sum(gradient, max(self._course.arrivals.get(name, -1), int(own.stage)))
            self._due.setdefault(found.stage, []).append(name)
        found.came.add(own.index)
        own.path.arrivals[name] = len(own.path.units) - 1
        found.early[own.index] = values
        self._add_in_order(found)
        if len(found.came) == len(self._baton.micro_batches) and not found.early:
            self._complete(found)

    def _add_in_order(self, found: _Sum, *, all_of_it: bool = False) -> None:
        """Add what nothing of an earlier micro-batch can precede any more."""
        for index in sorted(found.early):
            if not all_of_it and any(self._may_come(found, before) for before in range(index)):
                return
            self._add(found, found.early.pop(index))

    def _may_come(self, found: _Sum, index: int) -> bool:
        """Whether a micro-batch may bring a part of a gradient yet: it has not passed the stage where they arrive."""
        if index in found.came:
            return False
        return self._baton.micro_batches[index].stage <= found.stage

    def _add(self, found: _Sum, values: torch.Tensor) -> None:
        gradient = found.gradient
        if found.stored:
            gradient.change(gradient.laid_out(values), add=True)
        elif found.values is not None:
            found.values.add_(values)
        elif self.nbytes + values.nbytes <= self._limit:
            self._room(self.nbytes + values.nbytes)
            self.nbytes += values.nbytes
            self.peak = max(self.peak, self.nbytes)
            found.values = values
        else:
            self._arrivals.store(gradient, values)
            gradient.place.parameter.grad = None
            found.stored = True

    def _complete(self, found: _Sum) -> None:
        gradient = found.gradient
        del self._open[gradient.name]
        self._done.add(gradient.name)
        if found.stored:
            gradient.place.parameter.grad = gradient.handle
            if self._whole and self._arrivals.loop.mode == "fused" and not gradient.in_pieces:
                gradient.stage_stored((), 1.0)
        elif found.values is not None:
            values, found.values = found.values, None
            self.nbytes -= values.nbytes
            self._arrivals.deliver(gradient, values, whole=self._whole)

    def _reached(self, low: float) -> None:
        """All micro-batches have come to a stage: what arrives before it is complete, whoever brought nothing."""
        last = max(self._due, default=-1)
        end = int(min(low, last + 1))
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for stage in sorted(stage for stage in self._due if stage < end):
                for name in self._due.pop(stage):
                    found = self._open.get(name)
                    if found is not None:
                        self._add_in_order(found, all_of_it=True)
                        self._complete(found)

    def drop(self) -> None:
        """Forget all that is not complete."""
        for found in self._open.values():
            if found.stored:
                found.gradient.place.parameter.grad = found.gradient.handle
        self._open.clear()
        self.nbytes = 0


def _other_order(name: str) -> UsageError:
    return UsageError(
        f"the gradient of {name!r} arrived in another order than in earlier calls, and its sum would have other bits: "
        "nothing of the step is kept; compute it again with accumulate(..., by_layer=False)"
    )
