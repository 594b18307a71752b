"""Detects how the training loop uses gradients, whether updates begin before step(), and the scale of its loss."""

from __future__ import annotations

import ctypes
import logging
import math
from typing import TYPE_CHECKING, Any, Literal

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from memascend.distributed.control_plane import Exchange


_log = logging.getLogger("memascend")
# Actions that always change gradients between their arrival and step().
_CHANGING = frozenset({"a GradScaler", "zero_grad(set_to_none=False)"})


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


# torch.amp.GradScaler's defaults.
SCALE_FIRST = 65536.0
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_STEPS = 2000
Mode = Literal["dynamic", "fixed", "off"]


def _float32(value: float) -> float:
    """GradScaler keeps its scale in fp32."""
    return ctypes.c_float(value).value


def _checked(scale: object) -> float:
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ConfigError(f"loss_scale is {scale!r}: give 'dynamic', a positive number or None")
    try:
        rounded = _float32(scale)
    except OverflowError:
        rounded = math.inf
    if not 0.0 < rounded < math.inf:
        raise ConfigError(f"loss_scale is {scale!r}: a fixed scale is positive and finite as fp32")
    return rounded


class LossScale:
    """The factor of the loss, and how it changes from step to step.

    `setting` is "dynamic" (doubles after 2000 steps without overflow, halves on each overflow), a number (stays), or
    None (off: 1.0, and an overflow is the user's business).
    """

    def __init__(self, setting: float | str | None) -> None:
        if setting is None:
            self._set("off", 1.0)
        elif setting == "dynamic":
            self._set("dynamic", SCALE_FIRST)
        else:
            self._set("fixed", _checked(setting))

    def _set(self, mode: Mode, scale: float, good_steps: int = 0) -> None:
        self.mode: Mode = mode
        self.enabled = mode != "off"
        # What the loss is multiplied by now, an fp32 number.
        self.scale = scale
        # Its reciprocal as GradScaler takes it, in f64 and rounded to fp32.
        self.inverse = _float32(1.0 / scale) if scale else math.inf
        self._good_steps = good_steps

    def update(self, overflowed: bool) -> None:
        """Account for one step: whether any gradient was not finite."""
        if self.mode != "dynamic":
            return
        if overflowed:
            self._set(self.mode, _float32(self.scale * BACKOFF))
        elif self._good_steps + 1 < GROWTH_STEPS:
            self._good_steps += 1
        else:
            grown = _float32(self.scale * GROWTH)
            self._set(self.mode, grown if math.isfinite(grown) else self.scale)

    def state(self) -> dict[str, Any]:
        """Everything that a resume needs, as a JSON value."""
        return {"mode": self.mode, "scale": self.scale, "good_steps": self._good_steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what state() gave, mode included."""
        mode, scale, good_steps = state.get("mode"), state.get("scale"), state.get("good_steps")
        if mode not in {"dynamic", "fixed", "off"} or type(good_steps) is not int or not 0 <= good_steps < GROWTH_STEPS:
            raise ConfigError(f"the stored loss scale is {dict(state)!r}, which no memascend up to this one writes")
        # A dynamic scale that only ever saw overflows ends at 0, as torch's does.
        self._set(mode, 0.0 if mode == "dynamic" and scale == 0 else _checked(scale), good_steps)
