"""Makes groups of ranks, names ranks that are missing, and moves rows through a group, extent by extent."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import distributed

from memascend.distributed.rendezvous import (
    LOOK_SECONDS,
    WORD_SECONDS,
    answered,
    come,
    gone,
    have_all_come,
    look_seconds,
    meet,
    store_failed,
    values_of_ranks,
)
from memascend.errors import RankError
from memascend.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


# The share of the timeout in which ranks report that they made no group: each has waited as long as the others.
_PART_AFTER = 0.25
_SECONDS_AFTER_MAX = 5.0
# With two ranks, the other one is always at fault.
_PAIR = 2
# The word of a rank that has made the group, or is about to.
_MADE = "made"


class Meeting:
    """The ranks of one opening of a run, which make groups together, through keys of their own in torch's store."""

    def __init__(self, timeout: float) -> None:
        """Agree on the keys; all ranks do so together. See `rendezvous.meet` for its errors."""
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self._prefix = meet(_store(), self.rank, self.size, timeout)
        # The number of groups that were made, equal on all ranks.
        self._groups = 0
        # torch names groups by this count, and gloo's keys by that name: an earlier attempt has left the lowest ones.
        digest = self._prefix.rpartition("/")[2]
        distributed.distributed_c10d._world.group_count = int(digest, 16) >> 16  # noqa: SLF001

    def make_group(self, timeout: float, parts: Sequence[Sequence[int]] | None = None) -> Any:
        """Make a group of all ranks, or of each of some parts, and return this rank's; all ranks do so together.

        gloo does not report which rank is missing. So the ranks look for each other before and after, through the store
        with which torch's own group was made. They wait `timeout` seconds, including the search for missing ranks.

        Raises:
            RankError: no group was made; the error names the missing ranks, unless the store is gone, too.
        """
        number, self._groups = self._groups, self._groups + 1
        after = min(timeout * _PART_AFTER, _SECONDS_AFTER_MAX)
        group, why = None, "it did not come"
        missing: tuple[int, ...] = ()
        apart: dict[int, str] = {}
        try:
            _, missing = self._all_at(f"{number}/begins", "", timeout)
            if not missing:
                until = time.monotonic() + timeout
                group, why = _made(parts, timeout - after)
                # A rank that has made the group may be ahead of one that still waits for a dead rank.
                seconds = max(after, until - time.monotonic())
                apart, missing = self._all_at(f"{number}/ends", why, seconds)
                if not apart and not missing:
                    return group
        except RuntimeError as error:
            why, missing, apart = f"{why}; {store_failed(error)}", (), {}
        let_go(group)
        self.left_by(missing)
        if missing or not apart:
            raise gone(missing, timeout, why)
        # Ranks without the group did not reach each other if the others made it.
        some = tuple(apart) if len(apart) < self.size else ()
        raise RankError(
            f"{', '.join(f'rank {rank}' for rank in some) or 'the ranks'} could not connect with each other within "
            f"{timeout:g} s, before all ranks could talk; nothing was changed "
            f"({'; '.join(f'rank {rank}: {word}' for rank, word in apart.items())})",
            ranks=some,
        )

    def _all_at(self, moment: str, why: str, seconds: float) -> tuple[dict[int, str], tuple[int, ...]]:
        """At a moment of making a group: which ranks have none and why, and the ranks at fault if some come too late.

        `why` this rank has none; "" if all is well.
        """
        prefix, until = f"{self._prefix}/{moment}", time.monotonic() + seconds

        def look() -> tuple[dict[int, str], list[int]]:
            store = _store()
            store.set(f"{prefix}/{self.rank}", why or _MADE)
            if why:
                store.set(f"{prefix}/apart", why)
            come(store, prefix, self.size)
            while not (is_there := have_all_come(store, prefix)) and time.monotonic() < until:
                time.sleep(look_seconds(self.size))
            if is_there and not store.check([f"{prefix}/apart"]):
                return {}, []
            # One by one, which is much for the store.
            words = values_of_ranks(store, prefix, self.size, each=True)
            apart = {rank: word for rank, word in enumerate(words) if word not in ("", _MADE)}
            return apart, [rank for rank, word in enumerate(words) if not word]

        apart, missing = answered(look, seconds + WORD_SECONDS)
        return apart, self.at_fault(missing) if missing else ()

    def alarm(self) -> None:
        """Leave a sign for all ranks that one of them has given up."""
        # If the store is gone, ranks that lose others still notify their neighbours.
        with contextlib.suppress(RuntimeError):
            answered(lambda: _store().set(f"{self._prefix}/alarm", "given up"), WORD_SECONDS)

    def has_alarm(self) -> bool:
        """Whether a rank has given up."""
        return bool(_store().check([f"{self._prefix}/alarm"]))

    def left_by(self, blamed: Iterable[int]) -> None:
        """Leave a note that this rank stopped because of others, so that ranks that wait for it name those."""
        note = json.dumps(sorted(blamed))
        # If the store is gone, no rank waits.
        with contextlib.suppress(RuntimeError):
            answered(lambda: _store().set(self._note_of(self.rank), note), 2 * WORD_SECONDS)

    def at_fault(self, missing: Iterable[int]) -> tuple[int, ...]:
        """The ranks at fault: missing ranks that left no note, and the ranks that the notes of the others blame."""
        gone = {*missing}
        # What ranks that left blame, by rank.
        notes: dict[int, list[int]] = {}
        until = time.monotonic() + WORD_SECONDS

        def silent() -> set[int]:
            return gone.union(*notes.values()) - notes.keys() - {self.rank}

        def listen() -> None:
            store = _store()
            while silent() and time.monotonic() < until:
                for rank in silent():
                    if store.check([self._note_of(rank)]):
                        notes[rank] = json.loads(store.get(self._note_of(rank)))
                time.sleep(LOOK_SECONDS)

        if self.size > _PAIR:
            # If the store is gone, the notes that were read so far must do.
            with contextlib.suppress(RuntimeError):
                answered(listen, 2 * WORD_SECONDS)
        return tuple(sorted(silent() or gone))

    def _note_of(self, rank: int) -> str:
        return f"{self._prefix}/left/{rank}"


def _made(parts: Sequence[Sequence[int]] | None, seconds: float) -> tuple[Any, str]:
    """The group, or the reason why there is none. gloo may try for several times the timeout that it is given."""
    timeout, rank = timedelta(seconds=seconds), distributed.get_rank()

    def make() -> Any:
        if parts is None:
            return distributed.new_group(backend="gloo", timeout=timeout)
        # torch has all ranks make each group, those that are not in it, too.
        made = [distributed.new_group(list(part), backend="gloo", timeout=timeout) for part in parts]
        return next(group for part, group in zip(parts, made, strict=True) if rank in part)

    try:
        return answered(make, seconds), ""
    except RuntimeError as error:
        return None, str(error).splitlines()[0][:200]


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()  # noqa: SLF001


def let_go(group: Any) -> None:
    """Leave a group, which ends the waits of other ranks for this one. None, and a second call, do nothing."""
    if group is not None:
        # The user may have destroyed it already.
        with contextlib.suppress(ValueError, AssertionError):
            distributed.destroy_process_group(group)


# In place of the number of a tensor: no more pieces follow.
_END = -1


class StoppedError(Exception):
    """Rows did not arrive, since a rank failed, is gone or hangs; the line is closed, and ranks report which it was."""

    def __init__(self, why: RuntimeError) -> None:
        super().__init__(str(why).splitlines()[0][:200])
        self.is_late = "Timed out" in str(why)


class Line:
    """Moves rows from each rank to the first one, over a gloo group of its own.

    A rank sends pieces and then an end, as often as both sides know. gloo sends nothing that the first rank does not
    await, so it receives one piece at a time. A rank that fails closes the line, so that no other rank waits for it.
    """

    def __init__(self, meeting: Meeting, timeout: float) -> None:
        """`timeout`: seconds that one rank waits for another."""
        self._meeting = meeting
        self._seconds = timeout
        self._group: Any = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def open(self) -> Self:
        """Make the group if there is none, as at first and after a failure; all ranks do so together."""
        if self._group is None:
            self._group = self._meeting.make_group(self._seconds)
        return self

    def close(self) -> None:
        """Leave the group, which ends the waits of other ranks for this one."""
        group, self._group = self._group, None
        let_go(group)

    def send(self, tensor: int, start: int, values: torch.Tensor) -> None:
        """Send elements of a tensor to the first rank.

        Raises:
            StoppedError: they did not arrive.
        """
        self._move(distributed.isend, torch.tensor([tensor, start, values.nbytes], device="cpu"), 0)
        if values.nbytes:
            self._move(distributed.isend, bytes_of(values), 0)

    def end(self) -> None:
        """End a series of pieces.

        Raises:
            StoppedError: the first rank does not know.
        """
        self._move(distributed.isend, torch.tensor([_END, 0, 0], device="cpu"), 0)

    def pieces(self, rank: int, dtypes: list[torch.dtype]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The pieces of a rank up to its next end, on the first rank; `dtypes` are those of the tensors.

        Each is the number of its tensor, the number of its first element, and its elements, in memory that the next
        piece overwrites.

        Raises:
            StoppedError: they did not arrive.
        """
        while True:
            header = torch.empty(3, dtype=torch.int64, device="cpu")
            self._move(distributed.irecv, header, rank)
            tensor, start, nbytes = header.tolist()
            if tensor == _END:
                return
            if len(self._memory) < nbytes:
                self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            values = self._memory[:nbytes]
            if nbytes:
                self._move(distributed.irecv, values, rank)
            yield tensor, start, values.view(dtypes[tensor])

    def _move(self, begin: Any, memory: torch.Tensor, rank: int) -> None:
        try:
            begin(memory, rank, group=self._group).wait(timedelta(seconds=self._seconds))
        except RuntimeError as error:
            # Ranks that wait for this one notice when its connections close, with the last reference to the group.
            traceback.clear_frames(error.__traceback__)
            self.close()
            raise StoppedError(error) from error
