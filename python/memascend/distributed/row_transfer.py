"""Moves rows and figures between ranks, piece by piece."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from memascend.distributed.control_plane import bytes_of, let_go, make_group
from memascend.errors import ConfigError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import TypeVar

    from memascend.distributed.control_plane import Exchange
    from memascend.errors import MemascendError

    _T = TypeVar("_T")


_PIECE, _END, _FAILED = range(3)


_GO_ON, _STOP = range(2)


class StoppedError(Exception):
    """The first rank wants no more: something failed there, or on another rank, which all hear of afterwards."""


class Piece(NamedTuple):
    """Some elements of a tensor that both sides know."""

    tensor: int  # its number
    start: int  # its first element
    values: torch.Tensor  # the elements, on memory that is taken again for the next piece


class Line:
    """What goes from each rank to the first one, over a group of gloo of its own.

    A rank sends pieces and then an end, as often as both sides know. Each is answered, so that nobody is sent more than
    it has room for, and who sends hears that it is enough. What fails on one side leaves no rank waiting.
    """

    def __init__(self, timeout: float) -> None:
        """Make the group; all ranks do so together. `timeout` is how many seconds one waits for another."""
        self._timeout = timeout
        self._group: Any = make_group(timeout)
        self.rank = distributed.get_rank()
        self.world_size = distributed.get_world_size()
        # Of the ranks that send: those that sent their last, could not go on, or are gone.
        self._over: set[int] = set()
        self.broken: RankError | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Let the group go."""
        group, self._group = self._group, None
        let_go(group)

    # --- on each rank but the first ------------------------------------------------------

    def send(self, tensor: int, start: int, values: torch.Tensor) -> None:
        """Send elements of a tensor.

        Raises:
            StoppedError: no more is wanted.
        """
        self._tell([_PIECE, tensor, start, values.nbytes])
        if values.nbytes:
            self._waited(0, lambda: distributed.isend(bytes_of(values), 0, group=self._group))
        self._hear_answer()

    def end(self) -> None:
        """What belongs together was sent.

        Raises:
            StoppedError: no more is wanted.
        """
        self._tell([_END, 0, 0, 0])
        self._hear_answer()

    def fail(self) -> None:
        """Say that this rank cannot go on; what failed, all hear afterwards."""
        self._tell([_FAILED, 0, 0, 0])

    def _tell(self, header: list[int]) -> None:
        self._waited(0, lambda: distributed.isend(torch.tensor(header), 0, group=self._group))

    def _hear_answer(self) -> None:
        answer = torch.empty(1, dtype=torch.int64)
        self._waited(0, lambda: distributed.irecv(answer, 0, group=self._group))
        if answer.item() == _STOP:
            raise StoppedError

    # --- on the first rank -----------------------------------------------------------------

    def pieces(self, rank: int, dtypes: list[torch.dtype]) -> Iterator[Piece]:
        """What a rank sends up to its next end; `dtypes` are those of the tensors that both sides know.

        Raises:
            StoppedError: that rank could not go on.
        """
        while True:
            kind, tensor, start, values = self._received(rank)
            if kind == _FAILED:
                self._over.add(rank)
                raise StoppedError
            self._answer(rank, _GO_ON)
            if kind == _END:
                return
            yield Piece(tensor, start, values.view(dtypes[tensor]))

    def finish(self) -> None:
        """Hear the last end of each rank, after which it sends no more.

        Raises:
            StoppedError: a rank could not go on.
        """
        for rank in range(1, self.world_size):
            for _ in self.pieces(rank, []):
                pass
            self._over.add(rank)
        self._over.clear()

    def stop(self) -> None:
        """Tell all who still send that it is enough."""
        for rank in range(1, self.world_size):
            if rank in self._over:
                continue
            with contextlib.suppress(RankError):
                kind, *_ = self._received(rank)
                if kind != _FAILED:
                    self._answer(rank, _STOP)
        self._over.clear()

    def _received(self, rank: int) -> tuple[int, int, int, torch.Tensor]:
        header = torch.empty(4, dtype=torch.int64)
        self._waited(rank, lambda: distributed.irecv(header, rank, group=self._group))
        kind, tensor, start, nbytes = header.tolist()
        if len(self._memory) < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        values = self._memory[:nbytes]
        if nbytes:
            self._waited(rank, lambda: distributed.irecv(values, rank, group=self._group))
        return kind, tensor, start, values

    def _answer(self, rank: int, answer: int) -> None:
        self._waited(rank, lambda: distributed.isend(torch.tensor([answer]), rank, group=self._group))

    def _waited(self, rank: int, begin: Callable[[], Any]) -> None:
        """Begin to send or receive, and wait for it."""
        try:
            begin().wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            self._over.add(rank)
            self.broken = RankError(
                f"rank {rank} is gone, or did not answer within {self._timeout:g} s, while rows were gathered; what "
                f"is committed is as it was ({error})",
                ranks=(rank,),
            )
            raise self.broken from error


class Passed(NamedTuple):
    """What goes from one rank to another."""

    source: int  # the rank that has it
    target: int  # the rank that gets it
    sent: torch.Tensor | None  # the tensor, at the source
    got: torch.Tensor | None  # where it comes to, at the target


class Transfer:
    """Moves pieces over a group of gloo of its own; a rank that closes it in the midst is missed by name."""

    def __init__(self, exchange: Exchange | None) -> None:
        """Make the group; all ranks do so together. `exchange` is None for one rank."""
        self._exchange = exchange
        self._rank = 0 if exchange is None else exchange.rank
        self._group: Any = None
        if exchange is not None:
            self._group = make_group(exchange.timeout)

    def move(self, pieces: Sequence[Passed]) -> None:
        """Move all pieces that this rank sends or gets. Those of two ranks are in the same order on both.

        Raises:
            RankError: a rank failed, or is gone.
        """
        try:
            coming = self._moved(pieces)
        except RuntimeError as error:
            # Whoever waits for this one hears of it: connections close with the last of who knows the group.
            traceback.clear_frames(error.__traceback__)
            self.close()
            assert self._exchange is not None
            raise self._exchange.lost(f"moving rows ({str(error).splitlines()[0][:200]})", 5.0) from error
        for got, memory in coming:
            got.copy_(memory.view(got.dtype).view(got.shape))

    def _moved(self, pieces: Sequence[Passed]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What came from other ranks, beside where it belongs."""
        works, coming = [], []
        tags: Counter[tuple[int, int]] = Counter()
        for piece in pieces:
            if piece.source == piece.target:
                if piece.source == self._rank and piece.got is not None and piece.sent is not None:
                    piece.got.copy_(piece.sent)
                continue
            tag = tags[piece.source, piece.target]
            tags[piece.source, piece.target] += 1
            if piece.source == self._rank and piece.sent is not None:
                memory = bytes_of(piece.sent.contiguous())
                works.append((distributed.isend(memory, piece.target, group=self._group, tag=tag), memory))
            elif piece.target == self._rank and piece.got is not None:
                memory = torch.empty(piece.got.nbytes, dtype=torch.uint8)
                works.append((distributed.irecv(memory, piece.source, group=self._group, tag=tag), memory))
                coming.append((piece.got, memory))
        for work, _ in works:
            if work is not None:
                work.wait()
        return coming

    def close(self) -> None:
        """Let the group go; who waits in it for this rank waits no longer."""
        group, self._group = self._group, None
        let_go(group)


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
        return self.exchange.tell("the findings", mine)
