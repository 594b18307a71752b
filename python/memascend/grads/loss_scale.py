"""Keeps the factor that scales losses: dynamic, as in torch.amp.GradScaler, or fixed."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, Literal

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


# torch.amp.GradScaler's defaults.
SCALE_FIRST = 65536.0
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_STEPS = 2000
Mode = Literal["dynamic", "fixed", "off"]


def _float32(value: float) -> float:
    """Rounds `value` to fp32, in which GradScaler keeps its scale."""
    return ctypes.c_float(value).value


def _checked(scale: object) -> float:
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ConfigError(f"loss_scale is {scale!r}: give 'dynamic', a positive number or None")
    try:
        rounded = _float32(scale)
    except OverflowError:
        rounded = math.inf
    if not 0.0 < rounded < math.inf:
        raise ConfigError(f"loss_scale is {scale!r}: give a positive number that is finite in fp32")
    return rounded


class LossScale:
    """The factor of the loss, and its changes from step to step.

    `setting` is "dynamic" (doubles after 2000 steps without overflow, halves on each overflow), a number (constant), or
    None (off: the factor is 1.0).
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
        # The present factor of the loss, an fp32 number.
        self.scale = scale
        # The reciprocal of `scale`, computed as in GradScaler: in f64, then rounded to fp32.
        self.inverse = _float32(1.0 / scale) if scale else math.inf
        self._good_steps = good_steps

    def update(self, overflowed: bool) -> None:
        """Adjusts a dynamic scale after one step; `overflowed`: some gradient was not finite."""
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
        """Returns everything that a resume needs, as a JSON value."""
        return {"mode": self.mode, "scale": self.scale, "good_steps": self._good_steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a result of `state()`, including the mode."""
        mode: Any = state.get("mode")
        scale: Any = state.get("scale")
        good_steps: Any = state.get("good_steps")
        is_number = type(scale) in {int, float} and type(good_steps) is int
        if mode not in {"dynamic", "fixed", "off"} or not is_number or not 0 <= good_steps < GROWTH_STEPS:
            raise ConfigError(f"this version cannot read the stored loss scale {dict(state)!r}: use a newer memascend")
        # A dynamic scale that sees only overflows reaches 0, as torch's scale does.
        self._set(mode, 0.0 if mode == "dynamic" and scale == 0 else _checked(scale), good_steps)
