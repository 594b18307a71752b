"""Chooses which fetch of a unit writes the updates that the last step left to the next one."""

from __future__ import annotations

import logging
import statistics
import time
from typing import Literal

_log = logging.getLogger("memascend")
# Steps that are measured of each way, and steps after which both are measured again.
_TRIALS = 3
_AGAIN = 512
# A step that takes so much more or less than those by which a way was chosen is another kind of step; so many in a row
# begin new trials.
_CHANGE = 1.3
_CHANGED = 4
# What reads more has to be so much faster.
_GAIN = 0.98
Way = Literal["forward", "backward"]


class Settling:
    """At which fetch of a unit the updates are written that the last step left.

    | way | first fetch after the step | second one, or the next gradient | pays where |
    |---|---|---|---|
    | "forward" | reads state and gradient, computes, writes | reads values | the drive bounds the step |
    | "backward" | reads state and gradient, computes values | the same again, and writes | computation bounds it |

    Both give the same bits. The first steps try both in turn, and the faster one stays until steps become of another
    kind, as with another size of batches. Time outside of steps, as for an evaluation, counts for its step; so medians
    decide.
    """

    def __init__(self) -> None:
        self.way: Way = "backward"
        # Steps that left updates to the next one.
        self.steps = 0
        self._last = 0.0
        self.was_left = False
        self._taken: dict[Way, list[float]] = {"forward": [], "backward": []}
        # Seconds of the steps by which the way was chosen; None while it is being tried.
        self._usual: float | None = None
        self._unusual = self._since = 0

    def settles(self, fetched: int) -> bool:
        """Whether a fetch writes the updates of a unit that was fetched so often since the last step."""
        return fetched >= (0 if self.way == "forward" else 1)

    def step_ended(self, *, leaves: bool) -> None:
        """A step was committed, which `leaves` updates to the next one."""
        now = time.perf_counter()
        if self.was_left:
            self._took(now - self._last)
        self.steps += leaves
        self._last, self.was_left = now, leaves

    def _took(self, seconds: float) -> None:
        """A step that had updates of the one before took so long."""
        if self._usual is None:
            self._taken[self.way].append(seconds)
            self._choose()
            return
        self._since += 1
        is_usual = self._usual / _CHANGE <= seconds <= self._usual * _CHANGE
        self._unusual = 0 if is_usual else self._unusual + 1
        if self._unusual >= _CHANGED or self._since >= _AGAIN:
            self._taken = {"forward": [], "backward": []}
            self._usual, self._unusual, self._since = None, 0, 0

    def _choose(self) -> None:
        """Try the other way, or choose."""
        if any(len(taken) < _TRIALS for taken in self._taken.values()):
            self.way = "forward" if len(self._taken["forward"]) < len(self._taken["backward"]) else "backward"
            return
        medians = {way: statistics.median(taken) for way, taken in self._taken.items()}
        self.way = "backward" if medians["backward"] < medians["forward"] * _GAIN else "forward"
        self._usual = medians[self.way]
        _log.info(
            "updates that wait for the norm of all gradients are written in the next step's %s: steps take %.3g s so, "
            "and %.3g s otherwise",
            self.way,
            self._usual,
            medians["forward" if self.way == "backward" else "backward"],
        )
