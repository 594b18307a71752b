"""Computes the learning rate of a step: a linear warm-up, then a fall."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memascend.formatting import counted


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The learning rate over a run."""

    peak: float  # the highest
    steps: int  # of the run
    warmup_steps: int  # of them, that warm up
    schedule: str  # "linear", "cosine" or "constant" after that
    lowest: float = 0.0  # what it falls to

    def of_step(self, step: int) -> float:
        """Of a step, counted from 0: the first and the last learn something, too."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        part = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        factor = {"linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2, "constant": 1.0}[self.schedule]
        return self.lowest + (self.peak - self.lowest) * factor

    def said(self) -> str:
        """In words."""
        falls = {"linear": "falls linearly to {}", "cosine": "falls to {} as a cosine", "constant": "stays"}
        fall = falls[self.schedule].format(f"{self.lowest:g}")
        rises = f"rises to {self.peak:g} in {counted(self.warmup_steps, 'step')}, then" if self.warmup_steps else ""
        return f"lr {rises or f'begins at {self.peak:g} and'} {fall}"


def warmup_steps(warmup: float, steps: int) -> int:
    """Steps that warm up, of --warmup: a part of all, or how many."""
    return int(warmup) if warmup >= 1 else math.ceil(steps * warmup)
