"""Records the losses, seconds and counters of a cell's steps, and decides when there are enough steps."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from benchmarks import counters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.train.cell.systems import System

__all__ = ["Record"]

_PARTS = ("forward", "backward", "update")
# `Record.enough` assumes that the end of a cell takes as long as this number of steps.
_END_STEPS = 2


class Record:
    """The steps of a cell.

    Attributes:
        steps: the number of steps made.
    """

    def __init__(self, order: dict[str, Any], storage: Path, system: System) -> None:
        """Makes an empty record. `order` is the order of the cell."""
        self.steps = 0
        counted = self._counted = system.counted
        # `_way()` returns how `system` will do its next step, if it tries several ways. Other systems have no `way`, so
        # `str()` is called, which returns "".
        self._way: Callable[[], str] = getattr(system, "way", str)
        self._next, self._ways = self._way(), list[str]()
        self._first = self._last = counted()
        self._storage, self._warm, self._most = storage, order["warm"], order["warm"] + order["steps"]
        self._until: float = order.get("until") or math.inf
        self._losses: list[float] = []
        self._seconds: dict[str, list[float]] = {"step": [], **{part: [] for part in _PARTS}}
        self._between: list[dict[str, float]] = []

    def now(self) -> counters.Counts:
        """Returns the counters at this moment."""
        return counters.counts(self._storage)

    @property
    def enough(self) -> bool:
        """True if all steps were made, or if the cell would end after the order's `until` with one more step.

        The estimate uses the seconds of the last step. At least one step is measured, even after `until`.
        """
        if self.steps >= self._most:
            return True
        last = self._seconds["step"][-1] if self._between else 0.0
        return bool(self._between) and time.time() + (1 + _END_STEPS) * last > self._until

    def add(self, loss: float, at: Sequence[counters.Counts]) -> None:
        """Adds a step. Warm-up steps add only their loss.

        `at` has the counters before the step and after each of its parts: forward, backward and update. If the parts
        are not known, `at` has the counters before and after the step.

        Raises:
            ValueError: the loss is not finite.
        """
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss of step {self.steps} is {loss}, so the step is no measurement of training: leave this "
                "system out of the comparison"
            )
        self._losses.append(loss)
        if self.steps >= self._warm:
            whole = at[-1].since(at[0])
            self._between.append(whole)
            self._ways.append(self._next)
            self._seconds["step"].append(whole["wall"])
            parts = _PARTS if len(at) > len(_PARTS) else ()
            for part, first, last in zip(parts, at, at[1:], strict=False):
                self._seconds[part].append(last.wall - first.wall)
        self.steps += 1
        self._last, self._next = self._counted(), self._way()
        if self.steps <= self._warm:
            self._first = self._last

    def values(self, parameters: int) -> dict[str, Any]:
        """Returns the losses of all steps, and the seconds, ways and mean counters of the measured steps.

        `parameters` is the number of the model's parameters, by which the bytes "..._per_parameter" are divided.
        """
        steps = len(self._between)
        known = (self._between or [{}])[0]
        mean = {name: sum(counts[name] for counts in self._between) / steps for name in known}
        moved = None if self._first is None or self._last is None else self._last - self._first
        return {
            "parameters": parameters,
            "losses": self._losses,
            "seconds": self._seconds,
            "ways": self._ways,
            "steps": steps,
            "mean": mean,
            "read_per_parameter": mean.get("read", 0) / parameters,
            "written_per_parameter": mean.get("written", 0) / parameters,
            "counted_per_parameter": None if moved is None else moved / max(steps, 1) / parameters,
        }
