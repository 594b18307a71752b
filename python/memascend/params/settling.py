"""Chooses, by measured times, which fetch of a unit writes the updates that the last step deferred."""

from __future__ import annotations

import logging
import statistics
import time
from typing import Literal

_log = logging.getLogger("memascend")
# `Settling` has two ways to write deferred updates, and measures `_TRIALS` steps with each way. After `_AGAIN` steps it
# measures both ways again.
_TRIALS = 3
_AGAIN = 512
# A step is unusual if its time differs by more than the factor `_CHANGE` from the median time of the chosen way. After
# `_CHANGED` unusual steps in a row, `Settling` measures both ways again.
_CHANGE = 1.3
_CHANGED = 4
# "backward", which reads more, is chosen only if its median is below this fraction of the median of "forward".
_GAIN = 0.98
Way = Literal["forward", "backward"]


class Settling:
    """Decides which fetch of a unit writes the updates that the last step deferred.

    With "forward", the first fetch after the step reads state and gradient, computes the update, and writes it. The
    second fetch reads only values. This way is faster if the drive limits the step. With "backward", the first fetch
    reads state and gradient and computes the values, but writes nothing. The second fetch computes the update again and
    writes it. This way is faster if compute limits the step.

    Both ways give the same bits. The first steps alternate between the ways. Then the faster way is used for `_AGAIN`
    steps, or until the time of a step changes, for example after a change of the batch size. The ways are compared by
    their median times, because the measured time of a single step may include other work, such as an evaluation.
    """

    def __init__(self) -> None:
        self.way: Way = "backward"
        # The number of steps that have deferred updates.
        self.steps = 0
        # The time at which the last step was committed, and whether that step deferred updates.
        self._last = 0.0
        self.was_left = False
        self._taken: dict[Way, list[float]] = {"forward": [], "backward": []}
        # The median time of the chosen way in seconds; None while both ways are measured.
        self._usual: float | None = None
        # `_unusual` is the number of unusual steps in a row. `_since` is the number of steps since the way was chosen.
        self._unusual = self._since = 0

    def settles(self, fetched: int) -> bool:
        """True if a unit's next fetch, after `fetched` fetches since the last step, writes the deferred updates."""
        return fetched >= (0 if self.way == "forward" else 1)

    def step_ended(self, *, leaves: bool) -> None:
        """Measures the step that was just committed. `leaves` is True if the step deferred updates."""
        now = time.perf_counter()
        if self.was_left:
            self._took(now - self._last)
        self.steps += leaves
        self._last, self.was_left = now, leaves

    def _took(self, seconds: float) -> None:
        """Records the time of a step that also wrote the deferred updates of the previous step."""
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
        """Chooses the way of the next trial or, after the last trial, the faster way."""
        if any(len(taken) < _TRIALS for taken in self._taken.values()):
            self.way = "forward" if len(self._taken["forward"]) < len(self._taken["backward"]) else "backward"
            return
        medians = {way: statistics.median(taken) for way, taken in self._taken.items()}
        self.way = "backward" if medians["backward"] < medians["forward"] * _GAIN else "forward"
        self._usual = medians[self.way]
        _log.info(
            "deferred updates are written in the next step's %s: steps take %.3g s this way, and %.3g s the other way",
            self.way,
            self._usual,
            medians["forward" if self.way == "backward" else "backward"],
        )
