"""Learns from the first step how gradients have to wait for step(): "fused", "ssd" or "ram"."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memascend.ranks.figures import Figures


class Loop:
    """What is known of the training loop, and so how gradients wait.

    Attributes:
        mode: "fused" (gradients do not wait), "ssd" or "ram".
        accumulation_steps: backwards that make a step.
    """

    def __init__(self, mode: str, accumulation_steps: int, *, keeps: bool, figures: Figures | None = None) -> None:
        """`mode` may be "auto", too; `keeps`: it is known to need its gradients until step(), and nothing is learnt.

        `figures` is what ranks tell each other, where there are several.
        """
        self._figures = figures
        self.mode = "ssd" if mode == "auto" else mode
        self.accumulation_steps = accumulation_steps
        self._learning = mode == "auto"
        self._keeps = keeps
        self._noticed: set[str] = set()

    def notice(self, what: str) -> None:
        """It does something that needs its gradients until step()."""
        self._noticed.add(what)

    def learn(self) -> str | None:
        """After the first step: what it needs; the words for the log, once."""
        if not self._learning:
            return None
        self._learning = False
        if self._figures is not None:
            # All ranks go on in the same way.
            self._noticed = self._figures.union(self._noticed)
        if self._keeps or self._noticed:
            why = ", ".join(sorted(self._noticed)) or "a declared max_grad_norm or accumulation_steps"
            return f'gradients="auto": kept on storage until step() ("ssd"), because of {why}'
        self.mode = "fused"
        return 'gradients="auto": updated as they appear ("fused") from the second step on'
