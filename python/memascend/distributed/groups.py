"""Makes groups of ranks, finds out which ranks are missing, and moves rows to the first rank piece by piece."""

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


# The share of the timeout, but at most `_SECONDS_AFTER_MAX`, in which ranks report whether they have made a group. In
# the rest of the timeout, ranks make the group.
_PART_AFTER = 0.25
_SECONDS_AFTER_MAX = 5.0
# If there are only two ranks, the missing rank is always at fault, so no notes are read.
_PAIR = 2
# A rank writes this value to torch's store if the rank has made the group, or is about to make it.
_MADE = "made"


class Meeting:
    """The ranks that open a run. They make groups together. Each opening uses separate keys in torch's store."""

    def __init__(self, timeout: float) -> None:
        """Agrees with all ranks on a prefix for keys; a collective call. Raises the errors of `rendezvous.meet`."""
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self._prefix = meet(_store(), self.rank, self.size, timeout)
        # The number of calls of `make_group`; equal on all ranks.
        self._groups = 0
        # torch derives a group's name from this count, and gloo's keys contain the name. An earlier attempt may have
        # left keys with low counts, so this attempt begins at a count derived from the prefix.
        digest = self._prefix.rpartition("/")[2]
        distributed.distributed_c10d._world.group_count = int(digest, 16) >> 16  # noqa: SLF001

    def make_group(self, timeout: float, parts: Sequence[Sequence[int]] | None = None) -> Any:
        """Makes a group of all ranks, or a group for each list of ranks in `parts`; a collective call.

        Returns the group that this rank belongs to. gloo does not report which rank is missing. So each rank writes a
        key to torch's store before and after it makes the group, and waits until all ranks have written theirs. A rank
        waits at most `timeout` seconds until all ranks begin, and then about as long until all ranks have the group.

        Raises:
            RankError: a rank has no group, or torch's store does not answer. The error names the ranks that are missing
                or could not connect, if these are known.
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
                # This rank may have made the group while another rank still waits for a dead rank. So this rank waits
                # as long as the other rank may wait.
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
        # If some ranks have made the group, name only the ranks that have not: these could not connect.
        some = tuple(apart) if len(apart) < self.size else ()
        raise RankError(
            f"{', '.join(f'rank {rank}' for rank in some) or 'the ranks'} could not connect with other ranks within "
            f"{timeout:g} s; committed steps are unchanged: check the network between the ranks, and start all ranks "
            f"again ({'; '.join(f'rank {rank}: {word}' for rank, word in apart.items())})",
            ranks=some,
        )

    def _all_at(self, moment: str, why: str, seconds: float) -> tuple[dict[int, str], tuple[int, ...]]:
        """Waits at most `seconds` until all ranks have reached `moment`, a point before or after they make a group.

        Returns the ranks that could not make a group, each with its reason. Also returns the ranks at fault if some
        ranks did not come in time. `why` is the reason why this rank could not make a group, or "" if nothing went
        wrong on this rank.
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
            # Reading the value of each rank separately is much work for the store, so do it only after a failure.
            words = values_of_ranks(store, prefix, self.size, each=True)
            apart = {rank: word for rank, word in enumerate(words) if word not in ("", _MADE)}
            return apart, [rank for rank, word in enumerate(words) if not word]

        apart, missing = answered(look, seconds + WORD_SECONDS)
        return apart, self.at_fault(missing) if missing else ()

    def alarm(self) -> None:
        """Sets an alarm in torch's store, so that all ranks stop waiting for a `Word` of an `Exchange`."""
        # Ignore errors: if the store is gone, `Exchange` still notifies the neighbours of this rank.
        with contextlib.suppress(RuntimeError):
            answered(lambda: _store().set(f"{self._prefix}/alarm", "given up"), WORD_SECONDS)

    def has_alarm(self) -> bool:
        """True if a rank has set the alarm."""
        return bool(_store().check([f"{self._prefix}/alarm"]))

    def left_by(self, blamed: Iterable[int]) -> None:
        """Stores a note that this rank stopped because of the ranks `blamed`.

        `at_fault` on other ranks reads this note.
        """
        note = json.dumps(sorted(blamed))
        # Ignore errors: if the store is gone, no rank can read the note.
        with contextlib.suppress(RuntimeError):
            answered(lambda: _store().set(self._note_of(self.rank), note), 2 * WORD_SECONDS)

    def at_fault(self, missing: Iterable[int]) -> tuple[int, ...]:
        """Returns the ranks at fault.

        Suspects are the ranks in `missing` and the ranks that the notes of suspects blame, without this rank. Suspects
        that have left no note are at fault. If all suspects have left notes, all ranks in `missing` are at fault.
        """
        gone = {*missing}
        # By number of a rank that left a note: the ranks that the note blames.
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
    """Returns this rank's group, or None and the reason.

    The wait is bounded by `seconds`, because gloo may wait for several times its timeout.
    """
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
    """Leaves a group, so that other ranks stop waiting for this rank. `group` may be None, or a group already left."""
    if group is not None:
        # The user may have destroyed the group already.
        with contextlib.suppress(ValueError, AssertionError):
            distributed.destroy_process_group(group)


# Marks the end of a series of pieces, in place of a tensor's number.
_END = -1


class StoppedError(Exception):
    """Rows did not arrive, because a rank failed, is gone or hangs. The `Line` is closed."""

    def __init__(self, why: RuntimeError) -> None:
        super().__init__(str(why).splitlines()[0][:200])
        self.is_late = "Timed out" in str(why)


class Line:
    """Moves rows from each rank to the first rank, over a separate gloo group.

    A rank sends a series of pieces, and then an end marker. The sender and the first rank know the number of series.
    gloo sends a piece only while the first rank waits for this piece, so the first rank holds one piece at a time. A
    rank that fails closes its `Line`, so that no other rank waits for the failed rank.
    """

    def __init__(self, meeting: Meeting, timeout: float) -> None:
        """`timeout` is the number of seconds that a rank waits for another rank."""
        self._meeting = meeting
        self._seconds = timeout
        self._group: Any = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def open(self) -> Self:
        """Makes the group if there is no group: before the first use, and after a failure. A collective call."""
        if self._group is None:
            self._group = self._meeting.make_group(self._seconds)
        return self

    def close(self) -> None:
        """Leaves the group, so that other ranks stop waiting for this rank."""
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
        """Yields the pieces that `rank` sends to the first rank, up to the next end marker.

        A piece has the number of its tensor, the index of its first element, and its elements. The next piece
        overwrites the memory of the elements. `dtypes` has the dtype of each tensor.

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
            # Other ranks wait until this rank's connections close. A frame of the traceback that refers to the group
            # would keep the connections open.
            traceback.clear_frames(error.__traceback__)
            self.close()
            raise StoppedError(error) from error
