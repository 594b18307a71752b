"""Tests the words by which ranks agree, and the details that follow where they do not."""

import ast
import time
from types import SimpleNamespace

import pytest
from support.ranks import on_ranks
from torch import distributed

from memascend.distributed import control_plane
from memascend.distributed.control_plane import Agreement, Exchange, Message, Word
from memascend.distributed.rows import Layout
from memascend.errors import RankError

TIMEOUT = 8.0


def agrees(_):
    """What ranks hear of each other, and how many messages each takes."""
    exchange, sent, found = Exchange(TIMEOUT), [], []
    send, rank = distributed.isend, distributed.get_rank()
    distributed.isend = lambda tensor, *given, **named: (sent.append(tensor.nbytes), send(tensor, *given, **named))[1]

    def count(do):
        sent.clear()
        found.append((do(), len(sent)))

    count(lambda: exchange.tell("the same", ["one", None, 1.5]))
    sums = exchange.add([rank, 1 << 700])
    more = exchange.add([-1])
    count(lambda: exchange.tell("the same", None) and [*sums, *more])
    count(lambda: exchange.tell("others", rank))
    # Sums that no word has room for.
    sums = exchange.add([rank, 1 << 7000])
    count(lambda: exchange.tell("the same", None) and [*sums])
    exchange.close()
    return repr(found)


@pytest.mark.parametrize("count", [2, 5])
def test_ranks_that_agree_send_one_word_up_and_down_a_tree(tmp_path, count):
    found = [ast.literal_eval(each) for each in on_ranks(count, agrees, tmp_path)]
    ranks = range(count)
    said = [["one", None, 1.5]] * count, [sum(ranks), count << 700, -count], [*ranks], [sum(ranks), count << 7000]
    for each in found:
        assert [one for one, _ in each] == [*said]
    words, details = 2 * (count - 1), count * (count - 1)
    sends = [sum(each[at][1] for each in found) for at in range(4)]
    assert sends == [words, words, words + details, words + 2 * details]


def test_a_word_has_one_size_whatever_ranks_say():
    one, other = (Word.of(Message(1, "said", "x", None, [(1 << 1500) + more])) for more in (0, 1))
    assert one.to_tensor().numel() == Word(2, 0, "", []).to_tensor().numel() == control_plane._WORD_BYTES
    assert one.and_of(other).state == 0
    assert Word.of(Message(1, "said", "x", None, [1 << 1600])).state == 1
    # In it is space for two digits more.
    grown = Word.of(Message(1, "said", "x", None, [10**463]))
    assert grown.state == 0
    for _ in range(12):
        grown = grown.and_of(grown)
    assert (grown.state, grown.sums) == (1, [])


def waits(_, hangs):
    """Whom ranks name where one does not come, though they wait for others, and came at other times."""
    rank, exchange = distributed.get_rank(), Exchange(TIMEOUT)
    began = time.monotonic()
    if rank == 3:
        # Where it was only slow, all hear of each other in the end, and give up nevertheless.
        time.sleep(TIMEOUT * (2.5 if hangs else 0.83))
        if hangs:
            return None
    else:
        # Rank 0 has waited for half of the time when rank 6 comes.
        time.sleep(TIMEOUT * rank / 12)
    try:
        exchange.tell("a step", None)
    except RankError as error:
        return list(error.ranks), str(error), time.monotonic() - began
    return None


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [True, False])
def test_a_rank_that_does_not_come_is_named_by_ranks_that_do_not_wait_for_it(tmp_path, hangs):
    found = on_ranks(7, waits, tmp_path, hangs)
    for rank, each in enumerate(found):
        if rank == 3 and hangs:
            continue
        ranks, words, seconds = each
        assert ranks == [3], words
        assert seconds < TIMEOUT * (1 + rank / 12) + 2, words


def stages(_, digests):
    """What ranks meet where they stage rows that others stage, too."""
    rank, exchange = distributed.get_rank(), Exchange(TIMEOUT)
    store = SimpleNamespace(share=lambda _: None, end=lambda: None, digest=lambda: digests[rank])
    agreement = Agreement(exchange, store, b"", 0, b"", b"", Layout(rank, len(digests) // 2, 2))
    try:
        agreement.commit(lambda _, agree: agree() or 1)
    except RankError as error:
        return list(error.ranks), str(error)
    finally:
        # Otherwise this process may be gone before its last word has left.
        exchange.close()
    return agreement.number


@pytest.mark.parametrize(
    ("digests", "apart"), [([1, 2, 1, 2, 1, 2], None), ([1, 1, 2, 1, 1, 1], [2]), ([1, 2, 2, 1, 1, 2], [2, 3])]
)
def test_replicas_that_stage_other_values_end_a_step_on_all(tmp_path, digests, apart):
    for found in on_ranks(6, stages, tmp_path, digests):
        if apart is None:
            assert found == 1
        else:
            assert found[0] == apart, found
            assert "computed other values" in found[1]


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
