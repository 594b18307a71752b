"""Tests runs that go on with another number of ranks: the bits of the run that never stopped, and what is refused."""

import os
import signal
from pathlib import Path

import pytest
import torch
from support import rank_models
from support.bits import same_bits
from support.forked_child import in_child
from support.rank_models import Odd, offloaded, said
from support.ranks import on_ranks
from support.stores import filled
from torch import distributed, nn

import memascend
from memascend.distributed.control_plane import Alone, Exchange
from memascend.distributed.reshard import Earlier, EarlierValues, find_earlier, left_over, remove_store
from memascend.distributed.rows import Layout
from memascend.engine import Record, Store

MICRO_BATCHES = 12
LEFT_OPEN = []
LOGGED = {"host_memory": "1GiB", "log_steps": 16}


class Counted(Odd):
    """Odd, with a buffer that each forward changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, tokens):
        self.seen += 1
        return super().forward(tokens)


class Blocks(nn.Sequential):
    """Rows that two, three and four ranks divide into whole blocks of 256 elements."""

    def __init__(self):
        square = [nn.Linear(96, 96, bias=False) for _ in range(2)]
        super().__init__(
            nn.Embedding(96, 32), nn.Linear(32, 96, bias=False), nn.Tanh(), square[0], nn.Tanh(), square[1]
        )


def several(trained, lr):
    return [torch.optim.SGD(trained[::2], lr=lr, momentum=0.9), torch.optim.AdamW(trained[1::2], lr=lr)]


def train(folder, name, until, plain, options):
    """Go on to a step: from which one, all values then, and which stores there are."""
    folder = Path(folder, name)
    folder.mkdir(exist_ok=True)
    options = {"existing": "resume", "gradients": "ssd", **options}
    kinds = {"several": several, "RMSprop": torch.optim.RMSprop, "AdamW": torch.optim.AdamW}
    options["kind"] = kinds[options.get("kind", "AdamW")]
    options["dtype"] = getattr(torch, options.get("dtype", "bfloat16"))
    kind = Blocks if options.get("state") == "8bit" else Counted
    model, optimizer = offloaded(folder, of=kind, shards=not plain, **options)
    began, user_state = optimizer.steps, optimizer.user_state
    values = rank_models.train(model, optimizer, until, MICRO_BATCHES)
    if "log_steps" in options:
        # As where it is killed: what is held is in the log alone.
        LEFT_OPEN.append(optimizer)
    else:
        optimizer.close()
    distributed.barrier()
    return began, user_state, values, there(folder)


def there(folder):
    """The stores in a folder, as paths in it."""
    return sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*.store"))


def stores(count):
    return ["memascend.store"] if count == 1 else [f"rank-{rank}-of-{count}/memascend.store" for rank in range(count)]


def train_whole(folder, until, options):
    """One process that never stops: its values, and what one has that stops after the first step."""
    whole = train(folder, "whole", until, True, options)[2]
    train(folder, "run", 1, True, options)
    return whole


def go_on(tmp_path, counts, options):
    """A run with one number of ranks after the other has the bits of one process that never stops."""
    (whole,) = on_ranks(1, train_whole, tmp_path, len(counts), options)
    for step, (count, plain) in list(enumerate(counts))[1:]:
        found = on_ranks(count, train, tmp_path, "run", step + 1, plain, options)
        for rank, (began, user_state, _, left) in enumerate(found):
            assert began == step
            old = rank if rank < counts[step - 1][0] else 0
            assert user_state == {"rank": old, "step": step - 1}
            assert left == stores(count)
    for _, _, values, _ in found:
        assert all(map(same_bits, values, whole))


@pytest.mark.parametrize("options", [{}, {"kind": "several"}], ids=str)
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, options):
    go_on(tmp_path, [(1, True), (2, False)], options)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32", "gradients": "ram"},
        {"host_memory": "1GiB", "log_steps": 3},
        {"kind": "RMSprop", "durability": "none"},
        {"kind": "several"},
        {"state": "8bit"},
        {"state": "8bit", **LOGGED},
        {"state": "bf16"},
        {"state": "bf16", **LOGGED},
        {"state": "bf16", "rounding": "stochastic", "master_dtype": None, "seed": 3, **LOGGED},
    ],
    ids=str,
)
def test_runs_go_on_with_four_two_three_and_one(tmp_path, options):
    """With the log each life ends before what it holds is written to the store, and the next one replays it."""
    go_on(tmp_path, [(1, True), (4, False), (2, False), (3, False), (1, True), (2, False), (1, False)], options)


def test_a_store_of_another_replica_that_a_rank_uses_is_not_left_over(tmp_path):
    file = tmp_path / "replica-1/memascend.store"
    file.parent.mkdir()
    file.touch()
    assert left_over(str(tmp_path), Layout(0, 1, 1)) == [file]
    assert left_over(str(tmp_path), Layout(0, 1, 1), {f"{file.parent}/"}) == []


def test_a_store_that_is_removed_is_so_after_a_loss_of_power(tmp_path, monkeypatch):
    file, flushed = tmp_path / "memascend.store", []
    file.touch()
    monkeypatch.setattr(os, "fsync", lambda of: flushed.append((os.readlink(f"/proc/self/fd/{of}"), file.exists())))
    remove_store(file)
    assert flushed == [(str(tmp_path), False)]


# --- what goes wrong -------------------------------------------------------------------------


def gone(folder, point, until, options):
    """Ranks are gone at a point of going over to another number of them; the error of this one, and the stores then.

    See `_break_at`.
    """
    _break_at(point, distributed.get_rank())
    try:
        error = said(lambda: train(folder, "run", until, False, options))
    except OSError as met:
        error = str(met)
    return error, there(Path(folder, "run"))


def _break_at(point, rank):
    """Points of going over: "read", "first root", "root", "none" and "half"."""
    tell, remove = Exchange.tell, Earlier.remove

    def failing(*_):
        raise OSError(5, "as if the drive were gone")

    def told(self, about, said, **given):
        if point == "root" and about == "written":
            # Only once a kill cannot come before this rank's root.
            _die()
        answers = tell(self, about, said, **given)
        if about == "staged" and rank:
            _die()
        return answers

    def removed(self):
        if point == "half" and rank == 0:
            # Those that one rank reads are gone.
            remove(self)
        distributed.barrier()
        _die()

    if point == "read" and rank == 1:
        # It cannot read what it has of the earlier stores.
        EarlierValues._read = failing
    elif point == "root" or (point == "first root" and rank == 1):
        # All have written the first root of the new stores but it; or all are killed, and rank 0 alone has its root.
        Exchange.tell = told
    elif point in ("none", "half"):
        # All are killed once all have committed: before the others are removed, or in the midst.
        Earlier.remove = removed


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_stores_that_were_never_filled_are_ignored_and_damaged_ones_are_not(tmp_path):
    paths = [tmp_path / f"rank-{rank}-of-2" / "memascend.store" for rank in range(2)]
    records = [Record(name="w", values=torch.zeros(3), state={})]
    for path in paths:
        path.parent.mkdir()
    filled(paths[0], records).close()
    # As a process leaves it that is killed before its first commit.
    in_child(lambda: LEFT_OPEN.append(Store.create(paths[1], records)))
    with pytest.raises(memascend.ConfigError, match="its first write did not finish"):
        find_earlier(str(tmp_path), "resume", Alone(), Layout(0, 1, 1))
    assert find_earlier(str(tmp_path), "replace", Alone(), Layout(0, 1, 1)) is None
    paths[1].write_bytes(b"another file")
    assert find_earlier(str(tmp_path), "resume", Alone(), Layout(0, 1, 1)).files == paths


def test_what_goes_wrong_leaves_the_earlier_stores(tmp_path):
    ((_, _, whole, _),) = on_ranks(1, train, tmp_path, "whole", 2, True, {})
    on_ranks(3, train, tmp_path, "run", 1, False, {"timeout": 20.0})
    for error, left in on_ranks(2, gone, tmp_path, "read", 2, {"timeout": 20.0}):
        assert "as if the drive were gone" in error
        assert set(stores(3)) <= set(left)
    first, _ = on_ranks(2, gone, tmp_path, "first root", 2, {"timeout": 20.0}, ends=(0, -9))
    assert first[0].startswith("RankError"), first
    assert set(stores(3)) <= set(first[1])
    for error, left in on_ranks(2, gone, tmp_path, "", 2, {"timeout": 20.0, "kind": "several"}):
        assert "the earlier stores are of AdamW, and the optimizer is SGD + AdamW" in error
        assert set(stores(3)) <= set(left)
    for _, _, values, left in on_ranks(2, train, tmp_path, "run", 2, False, {"timeout": 20.0}):
        assert all(map(same_bits, values, whole))
        assert left == stores(2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("counts", "point", "last"),
    [
        ((4, 2), "root", 1), ((2, 4), "root", 2), ((1, 2, 3), "root", 3), ((4, 2), "none", 4), ((2, 4), "none", 1),
        ((1, 2, 3), "none", 2), ((4, 2), "half", 3), ((2, 4), "half", 4), ((1, 2, 3), "half", 1),
    ],
    ids=str,
)  # fmt: skip
def test_it_goes_on_from_every_point_of_that(tmp_path, counts, point, last):
    """All ranks of each number but the first are killed there, and `last` go on with the bits of all."""
    ((_, _, whole, _),) = on_ranks(1, train, tmp_path, "whole", 2, True, {})
    first, *others = counts
    on_ranks(first, train, tmp_path, "run", 1, False, {})
    for count in others:
        # A rank without a shot of its own is told of the others'.
        on_ranks(count, gone, tmp_path, point, 2, {"timeout": 20.0}, ends=(0, -9))
    for began, _, values, left in on_ranks(last, train, tmp_path, "run", 2, False, {}):
        assert began == 1
        assert all(map(same_bits, values, whole))
        # Of those that were never filled a warning says that they can go: what looks unfilled may be damaged.
        unfilled = {file for count in others if point == "root" and count != last for file in stores(count)}
        assert set(left) - unfilled == set(stores(last))
