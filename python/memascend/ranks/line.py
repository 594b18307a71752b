"""Carries tensors from every rank to the first one, piece by piece, each answered before the next."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from memascend.errors import RankError
from memascend.ranks.groups import bytes_of, let_go, make_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
