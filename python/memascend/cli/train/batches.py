"""Puts sequences into batches, in an order that seed and epoch alone decide."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memascend.cli.train.sequences import Sequences

_IGNORED = -100
# Sequences that wait for a row that fills them.
_OPEN_MAX = 64


def seed_of(seed: int, what: str, number: int) -> int:
    """A seed of its own for each thing that is random, so that none depends on where another stands."""
    named = f"{seed}/{what}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the model is given at once; the shorter rows are padded at their ends."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    # Of each token in its row, where several rows are in one sequence: what they are told apart by.
    position_ids: torch.Tensor | None = None

    @classmethod
    def of(cls, rows: list[tuple[torch.Tensor, torch.Tensor]], padding: int) -> Batch:
        """Rows of (ids, labels) beside each other."""
        length = max(len(ids) for ids, _ in rows)
        made = cls(
            input_ids=torch.full((len(rows), length), padding),
            attention_mask=torch.zeros(len(rows), length, dtype=torch.long),
            labels=torch.full((len(rows), length), _IGNORED),
        )
        for row, (ids, labels) in enumerate(rows):
            made.input_ids[row, : len(ids)] = ids
            made.attention_mask[row, : len(ids)] = 1
            made.labels[row, : len(ids)] = labels
        return made

    @classmethod
    def of_packs(cls, packs: list[list[tuple[torch.Tensor, torch.Tensor]]], padding: int) -> Batch:
        """Several rows in each sequence, with positions that begin again at 0: attention then stays within a row."""
        joined = []
        for rows in packs:
            ids, labels = (torch.cat(column) for column in zip(*rows, strict=True))
            starts = torch.tensor([0, *(len(row) for row, _ in rows[:-1])]).cumsum(0)
            # Nothing foretells a row's first token.
            labels[starts] = _IGNORED
            joined.append((ids, labels))
        made = cls.of(joined, padding)
        # Each token of padding is a row of its own.
        positions = torch.zeros_like(made.input_ids)
        for number, rows in enumerate(packs):
            own = torch.cat([torch.arange(len(ids)) for ids, _ in rows])
            positions[number, : len(own)] = own
        return replace(made, position_ids=positions)

    @classmethod
    def of_padding(cls, padding: int) -> Batch:
        """The least that a model computes a loss of, for a rank that has to compute with the others and has no rows."""
        ids = torch.full((2,), padding)
        return cls.of([(ids, ids)], padding)

    @property
    def tokens(self) -> int:
        """Tokens, without padding."""
        return int(self.attention_mask.sum())

    @property
    def learnt(self) -> int:
        """Tokens that a loss is taken on; nothing foretells a row's first."""
        return int((self.labels[:, 1:] != _IGNORED).sum())


def alone(sequences: Sequences) -> list[list[int]]:
    """Each row by itself."""
    return [[number] for number in range(len(sequences))]


def packed(sequences: Sequences, length: int, seed: int) -> list[list[int]]:
    """Rows put together into sequences of a length at most, in an order that the seed decides.

    Each goes into the first of those that wait which has room for it.
    """
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed_of(seed, "packing", 0)))
    made: list[list[int]] = []
    waiting: deque[tuple[int, list[int]]] = deque()
    for row in order.tolist():
        own = sequences.length(row)
        for at, (room, pack) in enumerate(waiting):
            if own <= room:
                pack.append(row)
                waiting[at] = room - own, pack
                break
        else:
            made.append([row])
            waiting.append((length - own, made[-1]))
            if len(waiting) > _OPEN_MAX:
                waiting.remove(min(waiting))
    return made


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Which sequences each step learns from."""

    sequences: Sequences  # all of them
    packs: list[list[int]]  # the numbers of those that are computed as one
    batch: int  # how many are computed at once
    accumulate: int  # batches of a step; an epoch's last step has what is left
    epochs: float  # passes, the last one perhaps not whole
    seed: int  # of the order
    padding: int  # the token that shorter rows end with
    steps_max: int | None = None  # in place of `epochs`
    is_packed: bool = False  # whether several rows may be in one sequence

    @property
    def steps_of_epoch(self) -> int:
        """Steps of one pass."""
        return math.ceil(len(self.packs) / (self.batch * self.accumulate))

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.steps_max or max(1, math.ceil(self.epochs * self.steps_of_epoch))

    def of_step(self, step: int) -> list[Batch]:
        """The batches of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_of_epoch)
        order = self.order(epoch)
        together = self.batch * self.accumulate
        return list(self._batches(order[place * together : (place + 1) * together]))

    def in_file_order(self) -> Iterator[Batch]:
        """All of them once, as an evaluation takes them."""
        return self._batches(range(len(self.packs)))

    def order(self, epoch: int) -> list[int]:
        """The sequences of a pass."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "order", epoch))
        found: list[int] = torch.randperm(len(self.packs), generator=generator).tolist()
        return found

    def _batches(self, numbers: Iterable[int]) -> Iterator[Batch]:
        chosen = list(numbers)
        for start in range(0, len(chosen), self.batch):
            packs = [
                [self.sequences[row] for row in self.packs[number]] for number in chosen[start : start + self.batch]
            ]
            if self.is_packed:
                yield Batch.of_packs(packs, self.padding)
            else:
                yield Batch.of([row for (row,) in packs], self.padding)
