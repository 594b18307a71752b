"""Commits a step on all ranks or on none: they agree before their roots are written, and again after that."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

from memascend.errors import RankError
from memascend.ranks.exchange import DISCARDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memascend.engine import Store
    from memascend.engine.shared_commits import CommitOfRank
    from memascend.ranks.exchange import Exchange

_IDENTITY_BYTES = 16
# The way on after a commit of which some ranks may have the root.
_UNKNOWN = "some ranks may have the step: start all of them again, and the run goes on at the last that all have"


class Agreement:
    """The commits of one run that several ranks make together. See `SharedCommits` of the engine.

    Nobody stages a step before all have written the root of the one before. So ranks are never more than one commit
    apart, and the two slots of each store hold the newest that all of them have.
    """

    def __init__(self, exchange: Exchange, run: bytes, number: int, identity: bytes, nonce: bytes) -> None:
        """Agree on what comes after a commit that all ranks have.

        Args:
            exchange: how the ranks talk.
            run: which run it is, 16 bytes, the same on all ranks.
            number: of the last commit, the same on all ranks; 0 before the first.
            identity: of the last commit, or of the one that first values are from; the same on all ranks.
            nonce: drawn at this opening, the same on all ranks: what another opening of the same stores commits has
                other identities.
        """
        self.exchange = exchange
        self.run = run
        self.number = number
        self.identity = identity
        self._nonce = nonce
        self._store: Store | None = None

    def lead(self, store: Store) -> None:
        """Take charge of the commits of this rank's store."""
        self._store = store
        store.share(self)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """What leads to a commit: where it fails on this rank, the others hear of it instead of waiting."""
        known = self.exchange.failures
        try:
            yield
        except BaseException as error:
            if self.exchange.failures == known:
                self.exchange.fail(error)
            if self.exchange.broken is not None:
                self._end()
            raise

    def commit(self, make: Callable[[CommitOfRank, Callable[[], object]], int]) -> int:
        """Make a commit on all ranks, or on none.

        Raises:
            RankError: a rank failed. Where it could say so before any root was written, the step can be discarded and
                tried again on all ranks. Otherwise nobody commits any more, by `close()` either.
        """
        number = self.number + 1
        said = self.identity + self._nonce + number.to_bytes(8, "little")
        identity = hashlib.blake2b(said, digest_size=_IDENTITY_BYTES).digest()
        agreed = False

        def agree() -> None:
            nonlocal agreed
            self._ask("staged", number, DISCARDED)
            agreed = True

        with self.step():
            try:
                generation = make((self.run, number, identity, self.exchange.rank, self.exchange.size), agree)
                self._ask("written", number, _UNKNOWN)
            except BaseException:
                if agreed:
                    # All write their roots now, and this one failed, or another: who has it is known after reopening.
                    self._end()
                raise
        self.number, self.identity = number, identity
        return generation

    def _ask(self, phase: str, number: int, remedy: str) -> None:
        """Hear whether all ranks are as far; raise where one is not."""
        numbers = self.exchange.tell(phase, number, remedy=remedy)
        apart = {rank: other for rank, other in enumerate(numbers) if other != number}
        if apart:
            self._end()
            raise RankError(f"commit {number} of rank {self.exchange.rank} meets others: {apart}", ranks=tuple(apart))

    def _end(self) -> None:
        """Leave on storage what is there: which commit all ranks have is found when they are opened again."""
        if self._store is not None:
            self._store.end()
