"""Tests runs of several ranks: closed and resumed, and with a rank that fails, whose disk is full, or who dies."""

import contextlib
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from support.hidden_folder import make_hidden
from support.rank_models import backward, offloaded, train
from support.ranks import on_ranks
from torch import distributed

from memascend.checkpoint.reader import Checkpoint, identity_of
from memascend.checkpoint.shares import TensorFiles
from memascend.distributed.groups import Line

# A run takes minutes where ten others want the processors.
pytestmark = pytest.mark.timeout(900)
SECONDS = 250
TIMEOUT = 30.0
STEPS = 4
# Micro-batches of a step, whatever the number of ranks.
MICROS = 6


def run(folder, **options):
    return offloaded(folder, **{"timeout": TIMEOUT, "dtype": torch.float32, "gradients": "ssd", **options})


def whole(folder):
    trained, optimizer = run(f"{folder}/whole")
    with optimizer:
        return train(trained, optimizer, STEPS, MICROS)


def met(do):
    """What was raised, whose it was, whether in time, and the words."""
    began = time.monotonic()
    try:
        do()
    except Exception as error:
        took = time.monotonic() - began
        return [type(error).__name__, *getattr(error, "ranks", ()), took < 2 * TIMEOUT], str(error)
    return None, ""


# --- closed and resumed ----------------------------------------------------------------------


def resumes(folder, cases):
    """Of each case, whether a run that was closed and resumed has the bits of one that was not."""
    found = []
    for number, options in enumerate(cases):
        trained, optimizer = offloaded(f"{folder}/{number}-whole", **options)
        values = [*train(trained, optimizer, 4), *state_of(trained, optimizer)]
        optimizer.close()
        for life, until in enumerate((1, 3, 4)):
            trained, optimizer = offloaded(f"{folder}/{number}-parts", existing="resume", **options)
            assert optimizer.user_state == ({"step": optimizer.steps - 1} if life else None)
            parts = [*train(trained, optimizer, until), *state_of(trained, optimizer)]
            optimizer.close()
        found.append(len(parts) == len(values) and all(map(same_bits, parts, values)))
    return found


def state_of(trained, optimizer):
    return [tensor for one in trained.parameters() for tensor in optimizer.state_of(one).values()]


# --- one rank fails --------------------------------------------------------------------------


def failing(*_, **__):
    raise OSError(5, "as if the drive were gone")


def fails(folder):
    """What ranks meet where rank 1 fails: in step(), in a gather, in a backward; and whether a step is done again."""
    faulty = distributed.get_rank() == 1
    found, values = {}, whole(folder)
    trained, optimizer = run(f"{folder}/run")
    train(trained, optimizer, 1, MICROS)
    backward(trained, 1, MICROS)
    buffers = optimizer._session.run.buffers
    if faulty:
        buffers.stage = failing
    found["step"] = met(optimizer.step)
    if faulty:
        del buffers.stage
    optimizer.zero_grad()
    found["again"] = all(map(same_bits, train(trained, optimizer, STEPS, MICROS), values))
    if faulty:
        optimizer._session.run.residency.read_into = failing
    found["gather"] = met(lambda: backward(trained, STEPS))
    found["after"] = met(optimizer.step)
    optimizer.close()
    trained, optimizer = run(f"{folder}/run", existing="resume")
    if faulty:
        optimizer._session.run.gradients._arrive = failing
    found["backward"] = met(lambda: backward(trained, STEPS))
    optimizer.close()
    with run(f"{folder}/run", existing="resume")[1] as optimizer:
        found["resumed"] = optimizer.steps
    return found


def resumes_and_fails(folder, cases):
    return resumes(folder, cases), fails(folder)


def test_a_run_is_resumed_and_a_rank_that_fails_ends_its_step_on_both_by_its_name(tmp_path):
    cases = [{}, {"durability": "none", "host_memory": "1GiB"}, {"host_memory": "1GiB", "log_steps": 3}]
    for rank, (resumed, found) in enumerate(on_ranks(2, resumes_and_fails, tmp_path, cases, seconds=SECONDS)):
        assert resumed == [True] * len(cases)
        for where in ("step", "gather", "backward"):
            error, words = found[where]
            assert error == (["OSError", True] if rank else ["RankError", 1, True]), (where, found)
            assert "as if the drive were gone" in words, (where, found)
        assert found["again"]
        assert found["after"][0][0] == "RankError", found
        assert found["resumed"] == STEPS


@contextlib.contextmanager
def full(here):
    """No file of this process grows beyond 16 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def flip(path):
    """Every bit of the second half of a file; again, and it is as it was."""
    with path.open("r+b") as file:
        middle = path.stat().st_size // 2
        file.seek(middle)
        values = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        file.seek(middle)
        file.write(values.bitwise_not().numpy().tobytes())
        os.fsync(file.fileno())


def flip_on(rank, path):
    distributed.barrier()
    if distributed.get_rank() == rank:
        flip(path)
    distributed.barrier()


def full_and_flipped(folder):
    values, rank, found = whole(folder), distributed.get_rank(), {}
    place, saved = f"{folder}/run", Path(folder, "saved")
    with full(rank == 1):
        found["made"], _ = met(lambda: run(place))
    found["left"] = len(list(Path(place).rglob("*.store")))
    trained, optimizer = run(place)
    train(trained, optimizer, 1, MICROS)
    optimizer.save(saved)
    before = str(identity_of(saved))
    train(trained, optimizer, 2, MICROS)
    with full(rank == 0):
        found["saved"], _ = met(lambda: optimizer.save(saved))
    found["earlier"] = str(identity_of(saved)) == before
    train(trained, optimizer, 3, MICROS)
    store = Path(place, "rank-1-of-2/memascend.store")
    flip_on(1, store)
    found["flipped"], _ = met(lambda: train(trained, optimizer, STEPS, MICROS))
    optimizer.close()
    flip_on(1, store)
    trained, optimizer = run(place, existing="resume")
    found["steps"] = optimizer.steps
    found["same"] = all(map(same_bits, train(trained, optimizer, STEPS, MICROS), values))
    optimizer.close()
    return found


def test_a_full_disk_and_flipped_bits_end_on_all_ranks(tmp_path):
    """Each names its rank in time, nothing is left, and what was committed goes on to the right bits."""
    first, second = on_ranks(2, full_and_flipped, tmp_path, seconds=SECONDS)
    for found in (first, second):
        assert (found["left"], found["earlier"], found["steps"], found["same"]) == (0, True, 3, True)
    assert second["made"] == ["StorageError", True]
    assert first["made"] == ["RankError", 1, True] or first["made"] == ["ConfigError", True]
    assert first["saved"] == ["StorageError", True]
    assert second["saved"][0] == "RankError"
    assert second["flipped"] == ["CorruptionError", True]
    assert first["flipped"] == ["RankError", 1, True]


def damaged_log(folder):
    """Steps that a killed run's log has on two ranks, and one of rank 1's last gradients with its bits flipped."""
    rank, found = distributed.get_rank(), {}
    held = {"host_memory": "1GiB", "log_steps": 16}
    trained, optimizer = run(f"{folder}/run", **held)
    train(trained, optimizer, 3, MICROS)
    own = f"rank-{rank}-of-2"
    shutil.copytree(f"{folder}/run/{own}", f"{folder}/killed/{own}")
    optimizer.close()
    store = Path(folder, "killed", own, "memascend.store")
    before = bytearray(store.read_bytes())
    if rank == 1:
        heads = [at for at in range(0, len(before), 4096) if before[at : at + 8] == b"mascstep"]
        newest = max(heads, key=lambda at: int.from_bytes(before[at + 16 : at + 24], "little"))
        before[newest - 4096] ^= 1
        store.write_bytes(before)
    distributed.barrier()
    # A program that is started again and again.
    again = {"existing": "resume", **held}
    found["refused"] = [met(lambda: run(f"{folder}/killed", **again))[0] for _ in range(2)]
    found["as it was"] = store.read_bytes() == before
    with run(f"{folder}/killed", **{**again, "existing": "previous"})[1] as optimizer:
        found["steps"] = optimizer.steps
    return found


def test_a_damaged_log_of_one_rank_leaves_the_commit_before_to_all(tmp_path):
    first, second = on_ranks(2, damaged_log, tmp_path, seconds=SECONDS)
    assert second["refused"] == [["CorruptionError", True]] * 2
    assert first["refused"] == [["ConfigError", True]] * 2
    for found in (first, second):
        assert (found["as it was"], found["steps"]) == (True, 2)


# --- one rank is gone while all save ---------------------------------------------------------


def killed_in_save(folder, victim, place):
    """Ranks write their own rows to `saved`; to `hidden/saved`, which one of them has not, they send them."""
    rank = distributed.get_rank()
    make_hidden(folder)
    trained, optimizer = run(f"{folder}/run-{victim}")
    train(trained, optimizer, 1, MICROS)
    optimizer.save(f"{folder}/{place}")
    train(trained, optimizer, 2, MICROS)
    owner, name = (Line, "send") if rank and place != "saved" else (TensorFiles, "put")
    own, calls = getattr(owner, name), []

    def killing(*arguments):
        calls.append(1)
        if rank == victim and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*arguments)

    setattr(owner, name, killing)
    found, _ = met(lambda: optimizer.save(f"{folder}/{place}"))
    optimizer.close()
    return found


def resumed(folder, name):
    trained, optimizer = run(f"{folder}/{name}", existing="resume")
    with optimizer:
        steps, values = optimizer.steps, train(trained, optimizer, STEPS, MICROS)
        optimizer.save(f"{folder}/saved")
        return steps, values


@pytest.mark.slow
@pytest.mark.parametrize("place", ["saved", "hidden/saved"])
def test_a_rank_killed_in_the_midst_of_a_save(tmp_path, place):
    """The earlier checkpoint is whole, and the run goes on where it was committed."""
    values = on_ranks(2, whole, tmp_path, seconds=SECONDS)[0]
    for victim in (0, 1):
        ends = (0, -signal.SIGKILL)
        other = on_ranks(2, killed_in_save, tmp_path, victim, place, ends=ends, seconds=SECONDS)[1 - victim]
        assert other == ["RankError", victim, True]
        assert identity_of(tmp_path / place)["step"] == 1
        Checkpoint(tmp_path / place).verify()
    for steps, found in on_ranks(2, resumed, tmp_path, "run-1", seconds=SECONDS):
        assert steps == 2
        assert all(map(same_bits, found, values))
    # What the killed ranks had written is gone with the next save.
    assert not list(tmp_path.glob(".saved*"))


def hanging_in_save(folder, timeout):
    """Rank 1 hangs while all write their rows."""
    trained, optimizer = run(f"{folder}/run", timeout=timeout)
    train(trained, optimizer, 1, MICROS)
    if distributed.get_rank() == 1:
        TensorFiles.put = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    found, _ = met(lambda: optimizer.save(f"{folder}/saved"))
    optimizer.close()
    return found[:2], Path(folder, "saved").exists()


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_save_is_named_on_all_others(tmp_path):
    first, _, third = on_ranks(3, hanging_in_save, tmp_path, 6.0, seconds=SECONDS, ends=(0, -signal.SIGKILL))
    assert first == third == (["RankError", 1], False)
