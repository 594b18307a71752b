"""Computes the learning rate of a step: a linear warm-up, then a fall to nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The learning rate over a run."""

    peak: float  # the highest
    steps: int  # of the run
    warmup: float  # the part of them that warms up
    schedule: str  # "linear", "cosine" or "constant" after that

    @property
    def warmup_steps(self) -> int:
        """Steps that warm up."""
        return math.ceil(self.steps * self.warmup)

    def of_step(self, step: int) -> float:
        """Of a step, counted from 0: the first and the last learn something, too."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        part = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        factor = {"linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2, "constant": 1.0}[self.schedule]
        return self.peak * factor

    def said(self) -> str:
        """In words."""
        fall = {"linear": "falls linearly to 0", "cosine": "falls to 0 as a cosine", "constant": "stays"}[self.schedule]
        return f"lr rises to {self.peak:g} in {self.warmup_steps:,} steps, then {fall}"
