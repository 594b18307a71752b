"""Learns from the first step how gradients have to wait for step(): "fused", "ssd" or "ram"."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Habits", "Loop"]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What is known of the training loop before its first step.

    Attributes:
        mode: "auto", "fused", "ssd" or "ram".
        accumulation_steps: backwards that make a step.
        keeps: it is known to need its gradients until step(), so that "auto" has nothing to learn.
    """

    mode: str
    accumulation_steps: int
    keeps: bool


class Habits:
    """What the loop does.

    Attributes:
        mode: "fused" (gradients do not wait), "ssd" or "ram".
        accumulation_steps: backwards that make a step.
    """

    def __init__(self, loop: Loop) -> None:
        self.mode = "ssd" if loop.mode == "auto" else loop.mode
        self.accumulation_steps = loop.accumulation_steps
        self._learning = loop.mode == "auto"
        self._keeps = loop.keeps
        self._noticed: set[str] = set()

    def notice(self, what: str) -> None:
        """It does something that needs its gradients until step()."""
        self._noticed.add(what)

    def learn(self) -> str | None:
        """After the first step: what it needs; the words for the log, once."""
        if not self._learning:
            return None
        self._learning = False
        if self._keeps or self._noticed:
            why = ", ".join(sorted(self._noticed)) or "a declared max_grad_norm or accumulation_steps"
            return f'gradients="auto": kept on storage until step() ("ssd"), because of {why}'
        self.mode = "fused"
        return 'gradients="auto": updated as they appear ("fused") from the second step on'
