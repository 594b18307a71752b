"""Runs an optimizer's own train() and eval() on streamed values, as schedule-free optimizers need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.gradients.gradients import Gradients
    from memascend.residency.residency import Residency
    from memascend.run.readiness import Readiness
    from memascend.run.record import Record
    from memascend.run.resources import Resources

__all__ = ["Modes"]


class Modes:
    """What an optimizer does to its parameters between training and evaluation."""

    def __init__(
        self,
        resources: Resources,
        residency: Residency,
        gradients: Gradients,
        readiness: Readiness,
        record: Record,
    ) -> None:
        self._resources = resources
        self._residency = residency
        self._gradients = gradients
        self._readiness = readiness
        self._record = record

    def switch(self, mode: str) -> None:
        """Run `train` or `eval`, and commit what it changed, as a part of the step that is committed.

        Raises:
            UsageError: a step is staged.
            StorageError: storage failed; what was committed stands.
        """
        self._readiness.require_quiet()
        record, engine = self._record, self._resources.engine
        changed = record.shared.switched(mode)
        if not changed:
            # It is in that mode.
            return
        with self._residency.turns.alone():
            try:
                names = self._gradients.rule.switch(mode, self._gradients.by_name.values())
                give_back = record.shared.adopt(names, engine.finish, changed)
            except BaseException:
                engine.discard()
                raise
            if names:
                self._commit(names, give_back)
            # Else the next step commits the mode.

    def _commit(self, names: list[str], give_back: Callable[[], None]) -> None:
        record, store, engine = self._record, self._resources.store, self._resources.engine
        generation = store.info()["generation"]
        try:
            step, hyperparameters = record.position.step, record.hyperparameters()
            engine.commit(step, user_state=record.user_state, hyperparameters=hyperparameters)
        except BaseException:
            if store.info()["generation"] == generation:
                give_back()
                engine.discard()
            raise
        finally:
            # Also where Ctrl-C is heard once the commit has returned; to read a unit again is never wrong.
            self._residency.units.changed(names)
