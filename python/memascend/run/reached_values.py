"""Writes to storage what user code wrote to weights between forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memascend.run.run import Run


class ReachedValues:
    """Values that the model computes with and that are not on storage yet."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def write_before_backward(self) -> None:
        """Let updates that the backward begins start from the values that its forward computed with.

        Where gradients wait until step(), so do the values: they may be put back before.
        """
        self._run.residency.reached.note_walk()
        if self._run.gradients.mode == "fused":
            self._write_before_updates()

    def write_before_step(self) -> None:
        """Let the updates that step() begins start from the values that the model has now."""
        if not self._run.gradients.has_updates and self._run.residency.reached.look():
            self._run.gradients.noticed("weights that are written before step()")
        self._run.residency.reached.require_seen()
        self._write_before_updates()

    def _write_before_updates(self) -> None:
        if not self._run.gradients.has_updates:
            # Persistent buffers are ahead of the step that is committed: they are of the next one.
            self._write(buffers=False)

    def write_between_steps(self) -> None:
        """Let storage have what the model has now, unless updates have begun from what it had before."""
        if not self._run.gradients.has_updates:
            self._run.residency.reached.look()
            self._write(buffers=True)

    def _write(self, *, buffers: bool) -> None:
        run = self._run
        record, gradients, reached = run.record, run.gradients, run.residency.reached
        unwritten = reached.unwritten()
        if not unwritten:
            return
        reached.require_seen()
        names = [place.name for place, _ in unwritten]

        def stands() -> None:
            reached.written(names)
            if buffers:
                record.buffers.committed()

        with run.committing(stands, lambda: run.discard(names)):
            for place, values in unwritten:
                gradient = gradients.by_name.get(place.name)
                gradients.rule.rewrite(place.name, values, gradient.step if gradient else 0)
            if buffers:
                record.buffers.stage(run.resources.store, record.position.step)
            run.resources.engine.commit(record.position.step)
