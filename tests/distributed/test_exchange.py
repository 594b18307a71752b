"""Tests the words by which ranks agree, and the details that follow where they do not."""

import time
from types import SimpleNamespace

import pytest
from support.rank_models import position
from support.ranks import on_ranks, ranks
from torch import distributed

from memascend.distributed import control_plane
from memascend.distributed.control_plane import Agreement, Exchange
from memascend.distributed.rows import Layout
from memascend.errors import RankError

TIMEOUT = 8.0


def agrees(_):
    """Ranks hear of each other, and have exact sums, also where these are too long for a word, or become so."""
    exchange, (rank, count) = Exchange(TIMEOUT), position()
    assert exchange.tell("the same", ["one", None, 1.5]) == [["one", None, 1.5]] * count
    # The first ones are in a word, the second ones grow beyond it as they are added up.
    for number in (1 << 700, 6 * 10**458, 1 << 7000):
        sums, more = exchange.add([rank, number]), exchange.add([-1])
        exchange.tell("the same", None)
        assert (sums, more) == ([sum(range(count)), count * number], [-count])
    assert exchange.tell("others", rank) == [*range(count)]
    exchange.close()


@pytest.mark.parametrize("count", [2, 5])
def test_ranks_hear_of_each_other_and_add_up(tmp_path, count):
    on_ranks(count, agrees, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [True, False])
@ranks(7)
def test_a_rank_that_does_not_come_is_named_by_ranks_that_do_not_wait_for_it(folder, hangs):  # noqa: ARG001
    """Rank 3 is named where it does not come, though ranks wait for others, and came at other times."""
    rank, exchange = distributed.get_rank(), Exchange(TIMEOUT)
    began = time.monotonic()
    # Rank 0 has waited for half of the time when rank 6 comes. Where rank 3 was only slow, all hear of each other in
    # the end, and give up nevertheless.
    time.sleep(TIMEOUT * ((2.5 if hangs else 0.83) if rank == 3 else rank / 12))
    if rank == 3 and hangs:
        return
    with pytest.raises(RankError) as raised:
        exchange.tell("a step", None)
    assert raised.value.ranks == (3,), raised.value
    assert time.monotonic() - began < TIMEOUT * (1 + rank / 12) + 2


@pytest.mark.parametrize(
    ("digests", "apart"), [([1, 2, 1, 2, 1, 2], ()), ([1, 1, 2, 1, 1, 1], (2,)), ([1, 2, 2, 1, 1, 2], (2, 3))]
)
@ranks(6)
def test_replicas_that_stage_other_values_end_a_step_on_all(folder, digests, apart):  # noqa: ARG001
    """Ranks stage rows that others stage, too; those that computed other values are named on all."""
    rank, exchange = distributed.get_rank(), Exchange(TIMEOUT)
    store = SimpleNamespace(share=lambda _: None, end=lambda: None, digest=lambda: digests[rank])
    agreement = Agreement(exchange, store, b"", 0, b"", b"", Layout(rank, len(digests) // 2, 2))
    try:
        if apart:
            with pytest.raises(RankError, match="computed other values") as raised:
                agreement.commit(lambda _, agree: agree() or 1)
            assert raised.value.ranks == apart
        else:
            agreement.commit(lambda _, agree: agree() or 1)
            assert agreement.number == 1
    finally:
        # Otherwise this process may be gone before its last word has left.
        exchange.close()


@pytest.mark.parametrize("arrived", [True, False])
def test_a_text_that_arrived_counts_although_its_sender_is_gone(monkeypatch, arrived):
    """Gloo raises an error for a message that is there, if the connection is closed before the wait returns."""
    text = control_plane._padded('[1, "said", null, "first", [], 0.0]')

    class Work:
        def __init__(self, room):
            self.room = room

        def wait(self, _):
            if self.room is not None:
                count = text.numel() if arrived else text.numel() // 2
                self.room[:count] = text[:count]
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(distributed, "irecv", lambda room, *_, **__: Work(room))
    monkeypatch.setattr(distributed, "isend", lambda *_, **__: Work(None))
    exchange, lost, room = object.__new__(Exchange), {}, control_plane._room()
    exchange._move(None, {1: room}, {1: text}, lost, time.monotonic() + 1)
    assert lost == ({} if arrived else {1: "its process ended, or its connection"})
    exchange.timeout = TIMEOUT
    monkeypatch.setattr(control_plane, "Word", lambda *words: words)
    lost_word = control_plane._LOST_WORD
    assert (exchange._received(None, 1) == lost_word) is not arrived
