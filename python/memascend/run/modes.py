"""Runs an optimizer's own train() and eval() on streamed values, as schedule-free optimizers need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memascend.run.run import Run


class Modes:
    """What an optimizer does to its parameters between training and evaluation."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def switch(self, mode: str) -> None:
        """Run `train` or `eval`, and commit what it changed, as a part of the step that is committed.

        Raises:
            UsageError: a step is staged.
            StorageError: storage failed; what was committed stands.
        """
        with self._run.resources.store.preparing():
            self._switch(mode)

    def _switch(self, mode: str) -> None:
        run = self._run
        run.require_quiet()
        record, engine = run.record, run.resources.engine
        changed = record.shared.switched(mode)
        if not changed:
            # It is in that mode.
            return
        with run.residency.turns.alone():
            try:
                names = run.gradients.rule.switch(mode, run.gradients.by_name.values())
                give_back = record.shared.adopt(names, engine.finish, changed)
            except BaseException:
                engine.discard()
                raise
            if not names:
                # The next step commits the mode.
                return

            def failed() -> None:
                give_back()
                engine.discard()

            with run.committing(lambda: run.residency.units.changed(names), failed):
                recorded = record.hyperparameters()
                engine.commit(record.position.step, user_state=record.user_state, hyperparameters=recorded)
