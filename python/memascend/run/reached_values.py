"""Writes to storage what user code wrote to weights between forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memascend.gradients.gradients import Gradients
    from memascend.residency.residency import Residency
    from memascend.run.record import Record
    from memascend.run.resources import Resources

__all__ = ["ReachedValues"]


class ReachedValues:
    """Values that the model computes with and that are not on storage yet."""

    def __init__(self, resources: Resources, residency: Residency, gradients: Gradients, record: Record) -> None:
        self._resources = resources
        self._reached = residency.reached
        self._gradients = gradients
        self._record = record

    def write_before_updates(self) -> None:
        """Let the updates of a step begin from the values that its forward computed with."""
        if not self._gradients.has_updates:
            # Persistent buffers are ahead of the step that is committed: they are of the next one.
            self._write(buffers=False)

    def write_between_steps(self) -> None:
        """Let storage have what the model has now, unless a step is staged."""
        if not self._gradients.is_staged():
            self._reached.look()
            self._write(buffers=True)

    def _write(self, *, buffers: bool) -> None:
        unwritten = self._reached.unwritten()
        if not unwritten:
            return
        self._reached.require_seen()
        engine, record = self._resources.engine, self._record
        names = [place.name for place, _ in unwritten]
        try:
            for place, values in unwritten:
                gradient = self._gradients.by_name.get(place.name)
                self._gradients.rule.rewrite(place.name, values, gradient.step if gradient else 0)
            if buffers:
                record.buffers.stage(self._resources.store, record.position.step)
            engine.commit(record.position.step)
        except BaseException:
            for name in names:
                engine.discard(name)
            raise
        self._reached.written(names)
        if buffers:
            record.buffers.committed()
