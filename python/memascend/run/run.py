"""Bundles the parts of a run that most others need; refuses calls at a wrong moment; tells whether a commit stands."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memascend.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memascend.gradients.gradients import Gradients
    from memascend.residency.gates import Frames
    from memascend.residency.residency import Residency
    from memascend.run.record import Record
    from memascend.run.resources import Resources


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What a model and its optimizer became."""

    resources: Resources  # store, engine and memory
    residency: Residency  # the parameters
    frames: Frames  # the modules that are being computed
    gradients: Gradients  # of the parameters that are trained
    record: Record  # what is committed beside parameters

    def require_open(self) -> None:
        """Refuse what comes after close(); end what an interrupt left open."""
        self.resources.require_open()
        self.frames.unwind()

    def require_quiet(self) -> None:
        """Refuse where a step is staged or a unit is in use; wait for what is in flight."""
        self.require_open()
        if self.gradients.is_staged():
            raise UsageError("a step is staged: call step() or zero_grad() first")
        self.residency.require_idle("this")
        self.resources.engine.finish()

    @contextlib.contextmanager
    def committing(self, stands: Callable[[], None], failed: Callable[[], None]) -> Iterator[None]:
        """Inside is one commit: afterwards `stands` is called, or with an exception `failed`.

        Ctrl-C is heard once the commit has returned. So an exception does not say which of them it is; the store does.
        """
        store = self.resources.store
        generation = store.info()["generation"]
        try:
            yield
        except BaseException:
            (failed if store.info()["generation"] == generation else stands)()
            raise
        stands()

    def discard(self, names: Iterable[str]) -> None:
        """Forget what was staged of these parameters, and nothing else."""
        for name in names:
            self.resources.engine.discard(name)

    def changed(self, names: Iterable[str]) -> None:
        """Parameters have new values on storage: what was read of them before is old."""
        names = list(names)
        self.residency.units.changed(names)
        self.residency.reached.forget(names)
