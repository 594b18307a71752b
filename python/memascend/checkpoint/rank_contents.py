"""Combines the rows of several ranks into one checkpoint, which the first rank writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend.checkpoint.contents import UPDATES, Content
from memascend.ranks.line import StoppedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memascend.checkpoint.contents import Put, RankContents
    from memascend.ranks.line import Line
    from memascend.ranks.rows import Rows


class GatheredContents:
    """The contents of all ranks' stores, as the first one has them: whole parameters, and its own buffers.

    They pass through it piece by piece, so that no parameter is whole in anybody's memory.
    """

    def __init__(self, own: RankContents, rows: Mapping[str, Rows], line: Line) -> None:
        """`own` is what the first rank has, `rows` which rows of each parameter those are."""
        self._own = own
        self._rows = rows
        self._line = line
        self._done = False
        self.has_formats = own.has_formats
        self.entries = [_whole(entry, rows.get(entry.name)) for entry in own.entries]

    def read(self, put: Put) -> None:
        """Hand out all of it: of each parameter the rows of one rank after the other.

        Raises:
            StoppedError: another rank could not send what it has, which it tells.
        """
        for entry in self._own.entries:
            self._own.read_entries([entry.name], put)
            if entry.name in self._rows:
                for rank in range(1, self._line.world_size):
                    self._read_from(rank, entry, put)
        self._line.finish()
        self._done = True

    def stop(self) -> None:
        """Let nobody wait any more, where something failed on the way."""
        if not self._done:
            self._done = True
            self._line.stop()

    def _read_from(self, rank: int, entry: Content, put: Put) -> None:
        names = ["", *entry.state]
        dtypes = [entry.values.dtype, *(tensor.dtype for tensor in entry.state.values())]
        for piece in self._line.pieces(rank, dtypes):
            put(entry.name, names[piece.tensor], piece.start, piece.values)


def send_contents(own: RankContents, rows: Mapping[str, Rows], order: Sequence[str], line: Line) -> None:
    """Send what a rank has to the first one, which makes `GatheredContents` of it.

    Args:
        own: what it has.
        rows: which rows of each parameter those are.
        order: the names of the parameters that the first rank has, in its order.
        line: how they are sent.

    Raises:
        StoppedError: the first rank wants no more.
    """
    there = {entry.name: entry for entry in own.entries}
    try:
        for name in order:
            if name in there:
                _send(own, there[name], rows[name], line)
            line.end()
        line.end()
    except StoppedError:
        raise
    except BaseException:
        line.fail()
        raise


def _send(own: RankContents, entry: Content, rows: Rows, line: Line) -> None:
    numbers = {of: number for number, of in enumerate(["", *entry.state])}
    tensors = {"": entry.values, **entry.state}

    def put(name: str, of: str, start: int, values: torch.Tensor) -> None:
        del name
        first = rows.first_of(of, tensors[of])
        # What is not divided is the same on all ranks.
        if of != UPDATES and first is not None:
            line.send(numbers[of], first + start, values)

    own.read_entries([entry.name], put)


def _whole(entry: Content, rows: Rows | None) -> Content:
    if rows is None:
        return entry
    values = torch.empty(rows.whole, dtype=entry.values.dtype, device="meta")
    state = {
        of: torch.empty(rows.whole_of(of, tensor), dtype=tensor.dtype, device="meta")
        for of, tensor in entry.state.items()
    }
    return Content(entry.name, values, state, entry.order)
