"""Makes groups of ranks, finds out which ranks are missing, and moves rows through a group, extent by extent."""

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


# The share of the timeout that is kept for reports of ranks that made no group. In the
# rest of the timeout, all ranks wait for the group.
_PART_AFTER = 0.25
_SECONDS_AFTER_MAX = 5.0
# The smallest number of ranks. Of two ranks, the missing one is always at fault, so no notes are read.
_PAIR = 2
# The value that a rank writes to the store if it has made the group, or is about to make it.
_MADE = "made"


class Meeting:
    """The ranks that open a run. They make groups together, through keys in torch's store that no other opening has."""

    def __init__(self, timeout: float) -> None:
        """Agrees with all ranks on the prefix of the keys; a collective call with the errors of `rendezvous.meet`."""
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self._prefix = meet(_store(), self.rank, self.size, timeout)
        # The number of groups that were made; equal on all ranks.
        self._groups = 0
        # torch names a group by this count, and gloo's keys contain that name. An earlier attempt has left keys with
        # low counts, so this attempt begins at a count derived from the prefix.
        digest = self._prefix.rpartition("/")[2]
        distributed.distributed_c10d._world.group_count = int(digest, 16) >> 16  # noqa: SLF001

    def make_group(self, timeout: float, parts: Sequence[Sequence[int]] | None = None) -> Any:
        """Makes a group of all ranks, or one of each of `parts`; returns this rank's group. A collective call.

        gloo does not report which rank is missing. So each rank writes a key to the store of torch's own group, before
        and after it makes the group, and looks for the keys of the others. `timeout` seconds include this search.

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
                # A rank that has made the group may be ahead of a rank that still waits for a dead one.
                seconds = max(after, until - time.monotonic())
                apart, missing = self._all_at(f"{number}/ends", why, seconds)
                if not apart and not missing:
                    return group
        except RuntimeError as error:
            why, missing, apart = f"{why}; {store_failed(error)}", (), {}
        leave_group(group)
        self.left_by(missing)
        if missing or not apart:
            raise gone(missing, timeout, why)
        # If some ranks have made the group, the ranks without it could not connect.
        some = tuple(apart) if len(apart) < self.size else ()
        raise RankError(
            f"{', '.join(f'rank {rank}' for rank in some) or 'the ranks'} could not connect with each other within "
            f"{timeout:g} s, before all ranks could talk; nothing was changed "
            f"({'; '.join(f'rank {rank}: {word}' for rank, word in apart.items())})",
            ranks=some,
        )

    def _all_at(self, moment: str, why: str, seconds: float) -> tuple[dict[int, str], tuple[int, ...]]:
        """Waits for all ranks at one moment of making a group; returns ranks without one, and ranks at fault.

        `why` is the reason why this rank has no group, "" if all is well. The ranks without a group are keys of a dict
        with their reasons. Ranks at fault are returned only if some ranks came too late.
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
            # Reading one value at a time is much work for the store, so it is done only after a failure.
            words = values_of_ranks(store, prefix, self.size, each=True)
            apart = {rank: word for rank, word in enumerate(words) if word not in ("", _MADE)}
            return apart, [rank for rank, word in enumerate(words) if not word]

        apart, missing = answered(look, seconds + WORD_SECONDS)
        return apart, self.at_fault(missing) if missing else ()

    def alarm(self) -> None:
        """Sets an alarm in the store: this rank has given up."""
        # Without the store, `Exchange` still notifies the neighbours of this rank.
        with contextlib.suppress(RuntimeError):
            answered(lambda: _store().set(f"{self._prefix}/alarm", "given up"), WORD_SECONDS)

    def has_alarm(self) -> bool:
        """True if a rank has given up."""
        return bool(_store().check([f"{self._prefix}/alarm"]))

    def left_by(self, blamed: Iterable[int]) -> None:
        """Stores a note that this rank stopped because of the ranks `blamed`: errors of other ranks name them."""
        note = json.dumps(sorted(blamed))
        # If the store is gone, no rank waits for the note.
        with contextlib.suppress(RuntimeError):
            answered(lambda: _store().set(self._note_of(self.rank), note), 2 * WORD_SECONDS)

    def at_fault(self, missing: Iterable[int]) -> tuple[int, ...]:
        """Returns the ranks at fault: missing ranks without a note, and ranks that notes of missing ranks blame."""
        gone = {*missing}
        # By rank that left a note: the ranks that it blames.
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
            # If the store is gone, use the notes that were read so far.
            with contextlib.suppress(RuntimeError):
                answered(listen, 2 * WORD_SECONDS)
        return tuple(sorted(silent() or gone))

    def _note_of(self, rank: int) -> str:
        return f"{self._prefix}/left/{rank}"


def _made(parts: Sequence[Sequence[int]] | None, seconds: float) -> tuple[Any, str]:
    """Returns this rank's group, or None and the reason. Bounds the wait: gloo may take several times its timeout."""
    timeout, rank = timedelta(seconds=seconds), distributed.get_rank()

    def make() -> Any:
        if parts is None:
            return distributed.new_group(backend="gloo", timeout=timeout)
        # torch requires that all ranks make each group, including ranks outside of it.
        made = [distributed.new_group(list(part), backend="gloo", timeout=timeout) for part in parts]
        return next(group for part, group in zip(parts, made, strict=True) if rank in part)

    try:
        return answered(make, seconds), ""
    except RuntimeError as error:
        return None, str(error).splitlines()[0][:200]


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()  # noqa: SLF001


def leave_group(group: Any) -> None:
    """Leaves a group, which ends the waits of other ranks for this one. None, and a second call, do nothing."""
    if group is not None:
        # The user may have destroyed the group already.
        with contextlib.suppress(ValueError, AssertionError):
            distributed.destroy_process_group(group)


# Marks the end of a series of pieces, in place of a tensor's number.
_END = -1


class StoppedError(Exception):
    """Rows did not arrive: a rank failed, is gone or hangs. The line is closed; ranks then exchange the cause."""

    def __init__(self, why: RuntimeError) -> None:
        super().__init__(str(why).splitlines()[0][:200])
        self.is_late = "Timed out" in str(why)


class Line:
    """Moves rows from each rank to the first one, over a gloo group of its own.

    A rank sends pieces and then an end marker; both sides know how many such series follow. gloo sends only data that
    the first rank awaits, so the first rank holds one piece at a time. A rank that fails closes the line, so that no
    other rank waits for it.
    """

    def __init__(self, meeting: Meeting, timeout: float) -> None:
        """`timeout` is the number of seconds that one rank waits for another."""
        self._meeting = meeting
        self._seconds = timeout
        self._group: Any = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def open(self) -> Self:
        """Makes the group if none exists, as at first and after a failure; a collective call."""
        if self._group is None:
            self._group = self._meeting.make_group(self._seconds)
        return self

    def close(self) -> None:
        """Leaves the group, which ends the waits of other ranks for this one."""
        group, self._group = self._group, None
        leave_group(group)

    def send(self, tensor: int, start: int, values: torch.Tensor) -> None:
        """Sends elements of tensor number `tensor`, from element `start` on, to the first rank.

        Raises:
            StoppedError: the elements did not arrive.
        """
        self._move(distributed.isend, torch.tensor([tensor, start, values.nbytes], device="cpu"), 0)
        if values.nbytes:
            self._move(distributed.isend, bytes_of(values), 0)

    def end(self) -> None:
        """Sends the end marker of a series of pieces to the first rank.

        Raises:
            StoppedError: the marker did not arrive.
        """
        self._move(distributed.isend, torch.tensor([_END, 0, 0], device="cpu"), 0)

    def pieces(self, rank: int, dtypes: list[torch.dtype]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields, on the first rank, the pieces of a rank up to its next end marker; `dtypes` has each tensor's dtype.

        A piece is the number of its tensor, the number of its first element, and its elements, in memory that the next
        piece overwrites.

        Raises:
            StoppedError: a piece did not arrive.
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
            # Other ranks wait until this rank's connections close; a frame of the traceback that refers to the group
            # would keep them open.
            traceback.clear_frames(error.__traceback__)
            self.close()
            raise StoppedError(error) from error
