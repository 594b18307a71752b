"""Makes groups of ranks, names ranks that are missing, and moves rows through a group, extent by extent."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from memascend.distributed.rendezvous import LOOK_SECONDS, WORD_SECONDS, answered, gone, meet, store_failed
from memascend.errors import RankError
from memascend.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence


# The share of the timeout in which ranks report that they made no group: each has waited as long as the others.
_PART_AFTER = 0.25
_SECONDS_AFTER_MAX = 5.0
# With two ranks, the other one is always at fault.
_PAIR = 2
# The word of a rank that has made the group.
_MADE = "made"


class _Next:
    """Counts the groups of one opening of a run, equally on all ranks."""

    # Of the keys in torch's store.
    prefix = "memascend"
    number = 0

    @classmethod
    def take(cls) -> int:
        """The number of the group that is being made."""
        cls.number += 1
        return cls.number - 1


def begin(timeout: float) -> None:
    """Begin to make the groups of a run; all ranks do so together. See `rendezvous.meet` for its errors."""
    _Next.prefix = meet(_store(), distributed.get_rank(), distributed.get_world_size(), timeout)
    _Next.number = 0
    # torch names groups by this count, and gloo's keys by that name: an earlier attempt has left the lowest ones.
    digest = _Next.prefix.rpartition("/")[2]
    distributed.distributed_c10d._world.group_count = int(digest, 16) >> 16  # noqa: SLF001


def make_group(timeout: float, ranks: Sequence[int] | None = None) -> Any:
    """Make a group; all ranks do so together.

    gloo does not report which rank is missing. So the ranks look for each other before and after, through the store
    with which torch's own group was made.

    Args:
        timeout: seconds that ranks wait for each other, including the search for missing ranks.
        ranks: in their order; None: all.

    Raises:
        RankError: no group was made; the error names the missing ranks, unless the store is gone, too.
    """
    members = None if ranks is None else list(ranks)
    number, group, why = _Next.take(), None, "it did not come"
    after = min(timeout * _PART_AFTER, _SECONDS_AFTER_MAX)
    missing: tuple[int, ...] = ()
    try:
        missing = _missing(number, "begins", "here", timeout)
        until = time.monotonic() + timeout
        if not missing:
            group, why = _met(members, timeout - after)
            # A rank that has made the group may be ahead of one that still waits for a dead rank.
            seconds = max(after, until - time.monotonic())
            missing = _missing(number, "ends", why if group is None else _MADE, seconds)
            apart = {} if missing else _without_group(number)
            if not missing and not apart:
                return group
            if apart:
                let_go(group)
                raise _apart(apart, timeout)
    except RankError:
        raise
    except RuntimeError as error:
        why = f"{why}; {store_failed(error)}"
    let_go(group)
    left_by(missing)
    raise gone(missing, timeout, why)


def _apart(why: Mapping[int, str], timeout: float) -> RankError:
    """The error of ranks that made no group and say why. If others made it, these ranks did not reach each other."""
    some = tuple(why) if len(why) < distributed.get_world_size() else ()
    named = ", ".join(f"rank {rank}" for rank in some) or "the ranks"
    reasons = "; ".join(f"rank {rank}: {said}" for rank, said in why.items())
    return RankError(
        f"{named} could not connect with each other within {timeout:g} s, before all ranks could talk; nothing was "
        f"changed ({reasons})",
        ranks=some,
    )


def left_by(blamed: Iterable[int]) -> None:
    """Leave a note that this rank stopped because of others, so that ranks that wait for it name those."""
    key, said = _left(_Next.number, distributed.get_rank()), json.dumps(sorted(blamed))
    # If the store is gone, no rank waits.
    with contextlib.suppress(RuntimeError):
        answered(lambda: _store().set(key, said), 2 * WORD_SECONDS)


def at_fault(missing: Iterable[int], number: int | None = None, seconds: float = WORD_SECONDS) -> tuple[int, ...]:
    """The ranks at fault: missing ranks that left no note, and the ranks that the notes of the others blame.

    Call `left_by()` first if other ranks may wait for this one.

    Args:
        missing: at least one rank.
        number: of the group that the ranks were to make; None: of the next, for ranks that use an existing one.
        seconds: how long to wait for the first note; the others come soon after.
    """
    gone, own = {*missing}, distributed.get_rank()
    if distributed.get_world_size() == _PAIR:
        # There is no other rank.
        return tuple(gone)
    asked = _Next.number if number is None else number

    def silent(left: dict[int, list[int]]) -> set[int]:
        return gone.union(*left.values()) - left.keys() - {own}

    soon = time.monotonic() + WORD_SECONDS

    def wanted(left: dict[int, list[int]]) -> set[int]:
        return silent(left) if not left or time.monotonic() < soon else set()

    return tuple(sorted(silent(_notes(asked, wanted, seconds)) or gone))


def lost_each_other(ranks: Collection[int], seconds: float) -> tuple[int, ...]:
    """Which of these ranks blame each other, by the notes that they leave within `seconds`."""

    def mutual(left: dict[int, list[int]]) -> set[int]:
        return {rank for rank, blamed in left.items() if any(rank in left.get(other, ()) for other in blamed)}

    def wanted(left: dict[int, list[int]]) -> set[int]:
        # Ranks that lost nobody leave no note.
        return set() if mutual(left) else {*ranks} - left.keys()

    return tuple(sorted(mutual(_notes(_Next.number, wanted, seconds))))


def _notes(number: int, wanted: Callable[[dict[int, list[int]]], set[int]], seconds: float) -> dict[int, list[int]]:
    """The ranks that others blame in their notes; `wanted` says whose notes are looked for, from those found so far."""
    left: dict[int, list[int]] = {}

    def listen() -> None:
        # If the store is gone, the notes read so far must do.
        with contextlib.suppress(RuntimeError):
            store, until = _store(), time.monotonic() + seconds
            while wanted(left) and time.monotonic() < until:
                for rank in wanted(left):
                    if store.check([_left(number, rank)]):
                        left[rank] = json.loads(store.get(_left(number, rank)))
                time.sleep(LOOK_SECONDS)

    # The store may be in a process that hangs.
    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    listening.join(seconds + WORD_SECONDS)
    return dict(left)


def _met(members: list[int] | None, seconds: float) -> tuple[Any, str]:
    """The group, or the reason why there is none. gloo may try for several times the timeout that it is given."""
    # Set once: the group, or None if the time ran out first; a group made later is destroyed.
    met: dict[str, Any] = {}
    why = f"no group within {seconds:g} s"

    def make() -> None:
        nonlocal why
        try:
            group = distributed.new_group(members, backend="gloo", timeout=timedelta(seconds=seconds))
        except RuntimeError as error:
            why = str(error).splitlines()[0][:200]
            return
        if met.setdefault("group", group) is not group:
            let_go(group)

    making = threading.Thread(target=make, daemon=True)
    making.start()
    making.join(seconds)
    return met.setdefault("group", None), why


def _missing(number: int, moment: str, said: str, seconds: float) -> tuple[int, ...]:
    """Ranks that do not reach this moment of making a group in time; `said` is what the others read of this one."""
    keys, until = _keys(number, moment), time.monotonic() + seconds

    def look() -> list[int]:
        store = _store()
        store.set(keys[distributed.get_rank()], said)
        while not store.check(keys):
            if time.monotonic() > until:
                return [rank for rank, key in enumerate(keys) if not store.check([key])]
            time.sleep(LOOK_SECONDS)
        return []

    missing = answered(look, seconds + WORD_SECONDS)
    return at_fault(missing, number) if missing else ()


def _without_group(number: int) -> dict[int, str]:
    """The ranks that made no group, and what they say."""
    keys = _keys(number, "ends")
    said = answered(lambda: [_store().get(key).decode() for key in keys], WORD_SECONDS)
    return {rank: words for rank, words in enumerate(said) if words != _MADE}


def _left(number: int, rank: int) -> str:
    return f"{_Next.prefix}/{number}/left/{rank}"


def _keys(number: int, moment: str) -> list[str]:
    return [f"{_Next.prefix}/{number}/{moment}/{rank}" for rank in range(distributed.get_world_size())]


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()  # noqa: SLF001


def let_go(group: Any) -> None:
    """Leave a group, which ends the waits of other ranks for this one. None, and a second call, do nothing."""
    if group is not None:
        # The user may have destroyed it already.
        with contextlib.suppress(ValueError, AssertionError):
            distributed.destroy_process_group(group)


_PIECE, _END, _FAILED = range(3)
_GO_ON, _STOP = range(2)


class StoppedError(Exception):
    """The first rank stopped the transfer: it or another rank failed, and all ranks are notified afterwards."""


class Piece(NamedTuple):
    """Consecutive elements of a tensor that both sides know."""

    tensor: int  # its number
    start: int  # its first element
    values: torch.Tensor  # the elements, in memory that the next piece overwrites


class Line:
    """Moves rows from each rank to the first one, over a gloo group of its own.

    A rank sends pieces and then an end, as often as both sides know. The first rank answers each, so that it receives
    one piece at a time and can stop the sender. A failure on one side leaves no rank waiting.
    """

    def __init__(self, timeout: float) -> None:
        """Make the group; all ranks do so together. `timeout`: seconds that one rank waits for another."""
        self._timeout = timeout
        self._group: Any = make_group(timeout)
        self.rank = distributed.get_rank()
        self.world_size = distributed.get_world_size()
        # Senders that sent their last piece, failed, or are gone.
        self._over: set[int] = set()
        self.broken: RankError | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        let_go(group)

    # --- on each rank but the first ------------------------------------------------------

    def send(self, tensor: int, start: int, values: torch.Tensor) -> None:
        """Send elements of a tensor.

        Raises:
            StoppedError: the first rank stopped the transfer.
        """
        self._tell([_PIECE, tensor, start, values.nbytes])
        if values.nbytes:
            self._waited(0, lambda: distributed.isend(bytes_of(values), 0, group=self._group))
        self._hear_answer()

    def end(self) -> None:
        """End a series of pieces.

        Raises:
            StoppedError: the first rank stopped the transfer.
        """
        self._tell([_END, 0, 0, 0])
        self._hear_answer()

    def fail(self) -> None:
        """Report that this rank failed; the others are notified of the error afterwards."""
        self._tell([_FAILED, 0, 0, 0])

    def _tell(self, header: list[int]) -> None:
        self._waited(0, lambda: distributed.isend(torch.tensor(header, device="cpu"), 0, group=self._group))

    def _hear_answer(self) -> None:
        answer = torch.empty(1, dtype=torch.int64, device="cpu")
        self._waited(0, lambda: distributed.irecv(answer, 0, group=self._group))
        if answer.item() == _STOP:
            raise StoppedError

    # --- on the first rank -----------------------------------------------------------------

    def pieces(self, rank: int, dtypes: list[torch.dtype]) -> Iterator[Piece]:
        """The pieces of a rank up to its next end; `dtypes` are those of the tensors that both sides know.

        Raises:
            StoppedError: that rank failed.
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
        """Receive the last end of each rank.

        Raises:
            StoppedError: a rank failed.
        """
        for rank in range(1, self.world_size):
            for _ in self.pieces(rank, []):
                pass
            self._over.add(rank)
        self._over.clear()

    def stop(self) -> None:
        """Stop all ranks that still send."""
        for rank in range(1, self.world_size):
            if rank in self._over:
                continue
            with contextlib.suppress(RankError):
                kind, *_ = self._received(rank)
                if kind != _FAILED:
                    self._answer(rank, _STOP)
        self._over.clear()

    def _received(self, rank: int) -> tuple[int, int, int, torch.Tensor]:
        header = torch.empty(4, dtype=torch.int64, device="cpu")
        self._waited(rank, lambda: distributed.irecv(header, rank, group=self._group))
        kind, tensor, start, nbytes = header.tolist()
        if len(self._memory) < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        values = self._memory[:nbytes]
        if nbytes:
            self._waited(rank, lambda: distributed.irecv(values, rank, group=self._group))
        return kind, tensor, start, values

    def _answer(self, rank: int, answer: int) -> None:
        self._waited(rank, lambda: distributed.isend(torch.tensor([answer], device="cpu"), rank, group=self._group))

    def _waited(self, rank: int, begin: Callable[[], Any]) -> None:
        """Begin to send or receive, and wait until it completes."""
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
