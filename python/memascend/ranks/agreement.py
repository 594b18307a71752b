"""Makes a step one step on all ranks, or on none: they agree before their roots are written, and again after that."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from memascend.errors import RankError
from memascend.ranks.exchange import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memascend.engine import Store
    from memascend.ranks.exchange import Exchange

__all__ = ["Agreement"]


class Agreement:
    """The commits of one run that several ranks make together. See `SharedCommits` of the engine.

    Nobody stages a step before all have written the root of the one before. So ranks are never more than one commit
    apart, and the two slots of each store hold the newest that all of them have.
    """

    def __init__(self, exchange: Exchange, run: bytes, number: int) -> None:
        """Agree on what comes after a commit that all ranks have.

        Args:
            exchange: how the ranks talk.
            run: which run it is, 16 bytes, the same on all ranks.
            number: of the last commit, the same on all ranks; 0 before the first.
        """
        self.exchange = exchange
        self.run = run
        self.number = number
        self._store: Store | None = None
        # How often all were asked for their part of a commit.
        self._asked = 0

    def lead(self, store: Store) -> None:
        """Take charge of the commits of this rank's store."""
        self._store = store
        store.shared = self

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """What leads to a commit: where it fails on this rank, the others hear of it instead of waiting."""
        asked = self._asked
        try:
            yield
        except BaseException as error:
            if self._asked == asked:
                self._fail("staged", error)
            raise

    def commit(self, make: Callable[[tuple[bytes, int], Callable[[], object]], int]) -> int:
        """Make a commit on all ranks, or on none.

        Raises:
            RankError: a rank failed. Where it could say so before any root was written, the step can be discarded and
                tried again on all ranks. Otherwise nobody commits any more, by `close()` either.
        """
        number = self.number + 1
        agreed = False

        def agree() -> None:
            nonlocal agreed
            self._ask("staged", number, None)
            agreed = True

        try:
            with self.step():
                generation = make((self.run, number), agree)
        except BaseException as error:
            if agreed:
                # All write their roots now, and this one failed: whether it is there is known after reopening.
                self._end()
                self._fail("written", error)
            raise
        self._ask("written", number, None)
        self.number = number
        return generation

    def share(self, about: str, value: Any) -> list[Any]:
        """What each rank says of something, by rank: a small JSON value."""
        try:
            return self.exchange.tell(about, value)
        except BaseException:
            self._end()
            raise

    def any(self, about: str, here: bool) -> bool:
        """Whether it is so on any rank: an overflow, for one."""
        return any(self.share(about, here))

    def _ask(self, phase: str, number: int, error: BaseException | None) -> None:
        """Hear whether all ranks are as far; raise where one is not."""
        self._asked += 1
        failed = None if error is None else shortened(error)
        answers = self.share(phase, {"commit": number, "failed": failed})
        ranks = tuple(rank for rank, answer in enumerate(answers) if answer["failed"] is not None)
        apart = {rank: answer["commit"] for rank, answer in enumerate(answers) if answer["commit"] != number}
        if apart:
            self._end()
            raise RankError(f"commit {number} of rank {self.exchange.rank} meets others: {apart}", ranks=tuple(apart))
        if not ranks:
            return
        if phase == "written":
            self._end()
        if error is None:
            reasons = "; ".join(f"rank {rank}: {answers[rank]['failed']}" for rank in ranks)
            remedy = (
                "it is discarded on all ranks: call zero_grad() on each, and go on"
                if phase == "staged"
                else "some may have it: start all of them again, and the run goes on at the last step that all have"
            )
            raise RankError(f"the step could not be {phase} on every rank, and {remedy} ({reasons})", ranks=ranks)

    def _end(self) -> None:
        """Leave on storage what is there: which commit all ranks have is found when they are opened again."""
        if self._store is not None:
            self._store.end()

    def _fail(self, phase: str, error: BaseException) -> None:
        """Tell the others what happened here; it is raised anyway."""
        try:
            self._ask(phase, self.number + 1, error)
        except RankError as others:
            error.add_note(f"the other ranks: {others}")
