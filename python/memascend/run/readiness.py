"""Checks whether committed values may be read or changed: the run is open, nothing is staged or in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.errors import UsageError

if TYPE_CHECKING:
    from memascend.gradients.gradients import Gradients
    from memascend.residency.gates import Frames
    from memascend.residency.residency import Residency
    from memascend.run.resources import Resources

__all__ = ["Readiness"]


class Readiness:
    """Refuses what comes at a wrong moment."""

    def __init__(self, resources: Resources, residency: Residency, frames: Frames, gradients: Gradients) -> None:
        self._resources = resources
        self._residency = residency
        self._frames = frames
        self._gradients = gradients

    def require_open(self) -> None:
        """Refuse what comes after close(); end what an interrupt left open."""
        self._resources.require_open()
        self._frames.unwind()

    def require_quiet(self) -> None:
        """Refuse where a step is staged or a unit is in use; wait for what is in flight."""
        self.require_open()
        if self._gradients.is_staged():
            raise UsageError("a step is staged: call step() or zero_grad() first")
        self._residency.require_idle("this")
        self._resources.engine.finish()
