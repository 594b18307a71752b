"""Stores the tokens of a run in an unlinked file, so that memory does not grow with the data."""

from __future__ import annotations

import hashlib
import mmap
import tempfile
from array import array
from typing import TYPE_CHECKING

import torch

from memascend.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from memascend.cli.train.encoding import Tokens

_TOKEN_BYTES = 4
# What no loss is taken on, by torch's default.
_IGNORED = -100


class Sequences(Closing):
    """Sequences of tokens by number. What is not learnt is stored with its bits inverted, as a negative number."""

    def __init__(self, made: Iterable[Tokens], folder: Path) -> None:
        """Write all of them to a file in `folder`, which has no name."""
        self._starts = array("Q", [0])
        digest = hashlib.sha256()
        self._map: mmap.mmap | None = None
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as this
        try:
            for tokens in made:
                packed = array(
                    "i", (one if learnt else ~one for one, learnt in zip(tokens.ids, tokens.learnt, strict=True))
                )
                data = packed.tobytes()
                self._file.write(data)
                digest.update(len(packed).to_bytes(8, "little") + data)
                self._starts.append(self._starts[-1] + len(packed))
            self._file.flush()
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        except BaseException:
            self.close()
            raise
        # Of all tokens, and which are learnt.
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels of one."""
        assert self._map is not None
        start, end = self._starts[number], self._starts[number + 1]
        stored = torch.frombuffer(self._map, dtype=torch.int32, offset=start * _TOKEN_BYTES, count=end - start).long()
        hidden = stored < 0
        return torch.where(hidden, ~stored, stored), torch.where(hidden, _IGNORED, stored)

    def length(self, number: int) -> int:
        """Tokens of one."""
        return self._starts[number + 1] - self._starts[number]

    def close(self) -> None:
        """The file is gone."""
        if self._map is not None:
            self._map.close()
            self._map = None
        self._file.close()
