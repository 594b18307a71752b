"""Decides whether updates begin before step() has the norm: as if it clipped nothing, and repeated where it does."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

    from memascend.grads.loop import Loop


_log = logging.getLogger("memascend")


# A step that is made anew loses about as much as one that is not gains. So many in a row that would have stood are
# waited for at most: twice as many as before after each one that did not stand, half as many after each one that did.
WAIT_MAX = 256


class Speculation:
    """The outcome of earlier steps, and so whether the updates of this step begin as its gradients appear.

    There are three states. Updates wait until so many steps in a row changed no gradient (plain "ssd"), or they begin
    early, or they do not for the rest of a step, since storage is about to change otherwise.

    Attributes:
        early: steps some of whose updates began before step().
        anew: early steps some of whose updates were discarded, and repeated if the step was committed.
    """

    def __init__(self, loop: Loop, held: Container[str]) -> None:
        """`held` are parameters whose updates wait in any case."""
        self.early = 0
        self.anew = 0
        self._loop = loop
        self._held = held
        # Steps in a row that changed no gradient, and how many of them it takes.
        self._unchanged = 0
        self._wanted = 1
        # Of this step: updates have begun, some were taken back, no more may begin.
        self._begun = self._taken_back = self._paused = False

    def may_begin(self, name: str) -> bool:
        """Whether the update of parameter `name`, whose gradient is whole, may begin."""
        return self._unchanged >= self._wanted and not self._paused and name not in self._held and self._loop.speculates

    def begun(self) -> None:
        """An update has begun early."""
        self._begun = True

    def taken_back(self) -> None:
        """One that had begun early was discarded; its gradient is still there."""
        self._taken_back = True

    def pause(self) -> None:
        """Begin nothing more in this step."""
        self._paused = True

    def restart(self) -> None:
        """All gradients of a step that was not made were dropped."""
        self._begun = self._taken_back = self._paused = False

    def step_ended(self, *, unchanged: bool) -> None:
        """A step was committed, or skipped; `unchanged`: its updates were by the gradients as they appeared."""
        if self._begun:
            self.early += 1
        if self._begun and self._taken_back:
            self.anew += 1
            self._wanted = min(2 * self._wanted, WAIT_MAX)
            _log.info(
                "the gradients of this step were clipped or changed: the updates that had begun were discarded (%d of "
                "%d steps so far); the next ones begin after %d steps that change none",
                self.anew,
                self.early,
                self._wanted,
            )
        elif self._begun:
            self._wanted = max(self._wanted // 2, 1)
        self._unchanged = self._unchanged + 1 if unchanged and not (self._begun and self._taken_back) else 0
        self.restart()
