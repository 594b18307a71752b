"""Exchanges figures between ranks: flags, words, what each has found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError, RankError
from memascend.ranks.line import Line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeVar

    from memascend.errors import MemascendError
    from memascend.ranks.exchange import Exchange

    _T = TypeVar("_T")


class Figures:
    """What ranks tell each other of what each has found. Every call is made by all ranks, and waits for all."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.rank = exchange.rank
        self.world_size = exchange.size
        self._line: Line | None = None

    def line(self) -> Line:
        """How rows go to the first rank.

        Raises:
            RankError: a rank was gone when rows were gathered before.
        """
        if self._line is None:
            self._line = Line(self.exchange.timeout)
        if self._line.broken is not None:
            raise self._line.broken
        return self._line

    def close(self) -> None:
        """Let all groups go: others that still talk hear that this rank is gone."""
        if self._line is not None:
            self._line.close()
        self.exchange.close()

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank."""
        return any(self.everyone(flag))

    def union(self, words: Iterable[str]) -> set[str]:
        """What any rank says."""
        return {word for theirs in self.everyone(sorted(words)) for word in theirs}

    def together(self, do: Callable[[], _T], other: Callable[[str], MemascendError] = ConfigError) -> _T:
        """Do what may be refused. Where one rank's is, no rank goes on, and each says whose it was.

        Raises:
            MemascendError: another rank refused; as `other` makes it.
        """
        known = self.exchange.failures
        try:
            done = do()
            self.everyone(None)
        except BaseException as error:
            if self.exchange.failures == known:
                self.exchange.fail(error)
            elif isinstance(error, RankError) and self.rank not in error.ranks:
                who = f"rank {error.ranks[0]} refused, and so do all ranks"
                raise other(f"{who} ({self.exchange.reasons})") from error
            raise
        return done

    def everyone(self, mine: Any) -> list[Any]:
        """What each rank says, a JSON value, in the order of ranks."""
        return self.exchange.tell("what each has found", mine)
