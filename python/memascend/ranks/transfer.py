"""Moves pieces of tensors between ranks, each from one rank to one other."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from memascend.ranks.groups import bytes_of, let_go, make_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.ranks.exchange import Exchange


class Piece(NamedTuple):
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

    def move(self, pieces: Sequence[Piece]) -> None:
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

    def _moved(self, pieces: Sequence[Piece]) -> list[tuple[torch.Tensor, torch.Tensor]]:
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
