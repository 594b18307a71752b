"""Makes each commit of a run on all ranks, or on no rank."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from memascend.distributed.control_plane import DIGEST_BYTES, DISCARDED, ranks_text
from memascend.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memascend.distributed.control_plane import Exchange
    from memascend.distributed.rows import Layout
    from memascend.storage import Store
    from memascend.storage.store import CommitOfRank

_IDENTITY_BYTES = 16
# Advice in errors about replicas whose values differ at the first commit.
_OTHER_VALUES = "these are the first values of the run: give all ranks the same seed or the same files"
# Advice in errors about a commit that only some ranks may have.
_UNKNOWN = (
    'some ranks may have the step: start all ranks again with existing="resume", to continue after the last step that '
    "all ranks have"
)


@dataclass(eq=False)
class Agreement:
    """Makes the commits of one run; all ranks make each commit together.

    No rank stages a step before all ranks have written the root of the previous step. So ranks are never more than one
    commit apart, and each store still has the newest commit that all ranks have.
    """

    exchange: Exchange
    store: Store  # this rank's store
    run: bytes  # the run's id, 16 bytes
    number: int  # the number of the last commit; 0 before the first
    # The identity of the last commit. Before the first commit: the identity of the commit from which the store was
    # filled, or zeros.
    identity: bytes
    nonce: bytes  # random bytes of this opening: commits of another opening of these stores get other identities
    layout: Layout
    # The number and identity of the commits that this rank makes alone while it fills its store. None if all ranks
    # commit together.
    _own: tuple[int, bytes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.store.share(self)

    def alone(self, number: int, identity: bytes) -> None:
        """Until `together()` is called, this rank makes its commits alone, with this number and identity."""
        self._own = number, identity

    def together(self) -> None:
        """From now on, all ranks make each commit together."""
        self._own = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Wraps a commit and the work before it.

        If this rank fails, the other ranks get the error and do not wait for this rank.
        """
        try:
            with self.exchange.part():
                yield
        except BaseException:
            if self.exchange.broken is not None:
                # End the store without a commit. The next opening finds the newest commit that all ranks have.
                self.store.end()
            raise

    def commit(self, make: Callable[[CommitOfRank, Callable[[], object]], int]) -> int:
        """Makes a commit together with all other ranks. After `alone()`, makes the commit on this rank only.

        Raises:
            RankError: another rank failed or is gone, ranks are at different commits, or ranks with the same rows
                computed different values. If a rank reported an error, or values differ, before any rank wrote a root,
                all ranks can discard the step and try again. Otherwise no rank commits again, not even in `close()`.
        """
        if self._own is not None:
            return make((self.run, *self._own, self.exchange.rank, self.layout.shards), lambda: None)
        number = self.number + 1
        data = self.identity + self.nonce + number.to_bytes(8, "little")
        identity = hashlib.blake2b(data, digest_size=_IDENTITY_BYTES).digest()
        agreed = False

        def agree() -> None:
            nonlocal agreed
            digest = self.store.digest() if self.layout.replicas > 1 else 0
            apart = self.exchange.add([self.summand_of(digest)])
            self._ask("staged", number, DISCARDED)
            if any(apart):
                self.reject(digest, DISCARDED if self.number else _OTHER_VALUES)
            agreed = True

        with self.step():
            try:
                generation = make((self.run, number, identity, self.exchange.rank, self.layout.shards), agree)
                self._ask("written", number, _UNKNOWN)
            except BaseException:
                if agreed:
                    # Some ranks may have written their roots. The next opening finds out which ranks have the commit.
                    self.store.end()
                raise
        self.number, self.identity = number, identity
        return generation

    def _ask(self, phase: str, number: int, remedy: str) -> None:
        """Waits until all ranks have reached `phase`. Ends the store and raises if ranks are at different commits."""
        numbers = self.exchange.all_gather(phase, number, remedy=remedy)
        apart = {rank: other for rank, other in enumerate(numbers) if other != number}
        if apart:
            self.store.end()
            raise RankError(
                f"rank {self.exchange.rank} is at commit {number}, and other ranks are at other commits ({apart}, by "
                "rank): start all ranks again",
                ranks=tuple(apart),
            )

    def summand_of(self, digest: int) -> int:
        """Returns this rank's summand. The sum over all ranks is 0 if ranks with the same rows have equal digests.

        A rank of the first replica multiplies its hash by the number of other replicas. A rank of any other replica
        negates its hash. The hash includes the shard, so that differences of several shards do not cancel each other.
        """
        layout = self.layout
        data = hashlib.blake2b(json.dumps([digest, layout.shard]).encode(), digest_size=DIGEST_BYTES).digest()
        return int.from_bytes(data, "little") * (-1 if layout.replica else layout.replicas - 1)

    def reject(self, digest: int, remedy: str = DISCARDED) -> NoReturn:
        """Raises the error for ranks with the same rows that computed different values; a collective call."""
        digests, shards = self.exchange.all_gather("the digests", digest), self.layout.shards
        apart = tuple(rank for rank, one in enumerate(digests) if one != digests[rank % shards])
        first = apart[0] % shards
        raise RankError(
            f"{ranks_text(apart)} computed other values than rank {first} and its replica for the same rows: give all "
            "replicas the same learning rates and other options, the same version of torch and the same kind of "
            f"processor; {remedy}",
            ranks=apart,
        )
