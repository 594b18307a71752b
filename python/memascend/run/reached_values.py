"""Writes to storage what user code wrote to weights between forwards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from memascend.errors import RankError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.ranks.figures import Figures
    from memascend.run.run import Run


class ReachedValues:
    """Values that the model computes with and that are not on storage yet.

    Ranks that share the parameters write them in one commit, where all of them come: before the updates of a step, in
    `save()` and `close()`, and, where updates do not wait for the step, in the first gather of a forward.
    """

    def __init__(self, run: Run, figures: Figures | None = None) -> None:
        """`figures` is what ranks tell each other, where there are several."""
        self._run = run
        self._figures = figures
        # A forward has begun, and the ranks did not meet in it yet.
        self._begun = False

    def forward_begins(self) -> None:
        """Let the forward compute with what was written."""
        self._run.residency.reached.look()
        self._begun = True

    def write_in_gather(self) -> None:
        """All ranks meet in a forward or a backward."""
        run = self._run
        begins = self._begun or not run.residency.reached.computes
        if self._figures is not None and begins and run.gradients.mode == "fused":
            self._write_together(buffers=False)
        self._begun = False

    def write_before_backward(self) -> None:
        """Let updates that the backward begins start from the values that its forward computed with.

        Where gradients wait until step(), so do the values: they may be put back before.
        """
        self._run.residency.reached.note_walk()
        if self._run.gradients.mode == "fused":
            if self._figures is None:
                self.write_before_step([self.told()])
            else:
                # Ranks come here one by one.
                self._run.residency.reached.give_late()

    def look_before_step(self) -> None:
        """Find what the updates that step() begins are to start from; what is refused, is by now."""
        if not self._run.gradients.has_updates and self._run.residency.reached.look():
            self._run.gradients.noticed("weights that are written before step()")
        self._run.residency.reached.require_seen()

    def told(self) -> list[bool]:
        """Whether there is something to write, and whether updates have begun; what ranks tell each other."""
        return [bool(self._run.residency.reached.unwritten()), self._run.gradients.has_updates]

    def write_before_step(self, told: Sequence[Sequence[bool]]) -> None:
        """Let the updates that step() begins start from the values that the model has now; `told` is by all ranks.

        Raises:
            UsageError: updates of this step have begun from others already, on some rank.
        """
        if not any(updates for _, updates in told):
            # Persistent buffers are ahead of the step that is committed: they are of the next one.
            self._write_of_any(told, buffers=False)
        elif self._figures is not None and any(unwritten for unwritten, _ in told):
            self._run.residency.reached.give_late()
            ranks = ", ".join(str(rank) for rank, (unwritten, _) in enumerate(told) if unwritten)
            raise UsageError(
                f"weights of rank {ranks} were written to too late for this step: call zero_grad(), and write to them "
                "before the forward; between backward and step() it counts with gradients='ssd'"
            )

    def write_between_steps(self) -> None:
        """Let storage have what the model has now, unless updates have begun from what it had before.

        All ranks come here together.
        """
        if not self._run.gradients.has_updates:
            self._run.residency.reached.look()
        self._write_together(buffers=True)

    def write_at_end(self) -> None:
        """The same in close(), to which a rank that fails comes alone.

        Raises:
            RankError: this rank has something to write, and another one does not come.
        """
        figures, reached = self._figures, self._run.residency.reached
        if figures is None:
            self.write_between_steps()
            return
        if not reached.handed_out:
            return
        reached.look()
        try:
            if figures.exchange.broken is not None:
                raise figures.exchange.broken
            # What ends because of an error waits for nobody.
            if sys.exc_info()[0] is None:
                self._write_together(buffers=True)
        except RankError as error:
            if reached.unwritten():
                error.add_note("what was written to weights since the last step is not kept")
                raise

    def _write_together(self, *, buffers: bool) -> None:
        """Write what any rank has to write; nothing where updates have begun."""
        told = [self.told()] if self._figures is None else self._figures.everyone(self.told())
        if not any(updates for _, updates in told):
            self._write_of_any(told, buffers=buffers)
        elif self._figures is not None:
            self._run.residency.reached.give_late()

    def _write_of_any(self, told: Sequence[Sequence[bool]], *, buffers: bool) -> None:
        if any(unwritten for unwritten, _ in told):
            self._write(buffers=buffers)

    def _write(self, *, buffers: bool) -> None:
        run = self._run
        record, gradients, reached = run.record, run.gradients, run.residency.reached
        unwritten = reached.unwritten()
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
