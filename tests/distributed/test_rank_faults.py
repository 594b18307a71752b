"""Tests faults of whole runs: full disks, flipped bits, ranks killed while they save."""

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
from support.ranks import on_ranks
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import memascend
from memascend.checkpoint.files import TensorFile
from memascend.checkpoint.reader import identity_of
from memascend.distributed.groups import Line

# A run takes minutes where ten others want the processors.
pytestmark = pytest.mark.timeout(900)
SECONDS = 250

TIMEOUT = 30.0
STEPS = 4


def offloaded(folder, existing="refuse", timeout=TIMEOUT, **options):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(48, 32), *blocks, nn.Linear(32, 48))
    for block in model:
        fully_shard(block)
    for module in (*model, fully_shard(model)):
        module.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"gradients": "ssd", **options}
    return memascend.offload(model, optimizer, storage=folder, existing=existing, timeout=timeout, **options)


def train(model, optimizer, until):
    """Six micro-batches a step, whatever the number of ranks."""
    rank, count = distributed.get_rank(), distributed.get_world_size()
    while optimizer.steps < until:
        for number in range(rank, 6, count):
            generator = torch.Generator().manual_seed(100 * optimizer.steps + number)
            tokens = torch.randint(0, 48, (2, 6), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            (loss / 6).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def whole(folder):
    model, optimizer = offloaded(f"{folder}/whole")
    values = train(model, optimizer, STEPS)
    optimizer.close()
    return values


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


def met(do):
    """What was raised, whose it was, and how long that took."""
    began = time.monotonic()
    try:
        do()
    except memascend.MemascendError as error:
        took = time.monotonic() - began
        return [type(error).__name__, *getattr(error, "ranks", ()), took < 2 * TIMEOUT]
    return None


def flip(path):
    """Every bit of the second half of a file; again, and it is as it was."""
    with path.open("r+b") as file:
        middle = path.stat().st_size // 2
        file.seek(middle)
        values = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        file.seek(middle)
        file.write(values.bitwise_not().numpy().tobytes())
        os.fsync(file.fileno())


def full_and_flipped(folder):
    values, rank, found = whole(folder), distributed.get_rank(), {}
    run, saved = f"{folder}/run", Path(folder, "saved")
    with full(rank == 1):
        found["made"] = met(lambda: offloaded(run))
    found["left"] = len(list(Path(run).rglob("*.store")))
    model, optimizer = offloaded(run)
    train(model, optimizer, 1)
    optimizer.save(saved)
    before = str(identity_of(saved))
    train(model, optimizer, 2)
    with full(rank == 0):
        found["saved"] = met(lambda: optimizer.save(saved))
    found["earlier"] = str(identity_of(saved)) == before
    train(model, optimizer, 3)
    store = Path(run, "rank-1-of-2/memascend.store")
    distributed.barrier()
    if rank == 1:
        flip(store)
    distributed.barrier()
    found["flipped"] = met(lambda: train(model, optimizer, STEPS))
    optimizer.close()
    distributed.barrier()
    if rank == 1:
        flip(store)
    distributed.barrier()
    model, optimizer = offloaded(run, "resume")
    found["steps"] = optimizer.steps
    found["same"] = all(map(same_bits, train(model, optimizer, STEPS), values))
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
    model, optimizer = offloaded(f"{folder}/run", **held)
    train(model, optimizer, 3)
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
    found["refused"] = [met(lambda: offloaded(f"{folder}/killed", "resume", **held)) for _ in range(2)]
    found["as it was"] = store.read_bytes() == before
    optimizer = offloaded(f"{folder}/killed", "previous", **held)[1]
    found["steps"] = optimizer.steps
    optimizer.close()
    return found


def test_a_damaged_log_of_one_rank_leaves_the_commit_before_to_all(tmp_path):
    first, second = on_ranks(2, damaged_log, tmp_path, seconds=SECONDS)
    assert second["refused"] == [["CorruptionError", True]] * 2
    assert first["refused"] == [["ConfigError", True]] * 2
    for found in (first, second):
        assert (found["as it was"], found["steps"]) == (True, 2)


def killed_in_save(folder, victim):
    rank = distributed.get_rank()
    model, optimizer = offloaded(f"{folder}/run", "resume" if victim else "refuse")
    train(model, optimizer, 1 + victim)
    if not victim:
        optimizer.save(f"{folder}/saved")
    train(model, optimizer, 2 + victim)
    owner, name = (TensorFile, "write") if rank == 0 else (Line, "send")
    own, calls = getattr(owner, name), []

    def killing(*arguments):
        calls.append(1)
        if rank == victim and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*arguments)

    setattr(owner, name, killing)
    found = met(lambda: optimizer.save(f"{folder}/saved"))
    optimizer.close()
    return found


def resumed(folder):
    model, optimizer = offloaded(f"{folder}/run", "resume")
    steps, values = optimizer.steps, train(model, optimizer, STEPS)
    optimizer.close()
    return steps, values


@pytest.mark.slow
def test_a_rank_killed_in_the_midst_of_a_save(tmp_path):
    """The earlier checkpoint is whole, and the run goes on where it was committed."""
    values = on_ranks(2, whole, tmp_path, seconds=SECONDS)[0]
    for victim in (0, 1):
        other = on_ranks(2, killed_in_save, tmp_path, victim, ends=(0, -signal.SIGKILL), seconds=SECONDS)[1 - victim]
        assert other == ["RankError", victim, True]
        assert identity_of(tmp_path / "saved")["step"] == 1
    for steps, found in on_ranks(2, resumed, tmp_path, seconds=SECONDS):
        assert steps == 3
        assert all(map(same_bits, found, values))


def hanging_in_save(folder, timeout):
    """Rank 1 hangs while all send their rows to rank 0, which waits for it and is waited for by rank 2."""
    rank, over = distributed.get_rank(), Path(folder, "over")
    model, optimizer = offloaded(f"{folder}/run", timeout=timeout)
    train(model, optimizer, 1)

    def hang(*_):
        until = time.monotonic() + SECONDS
        while not Path(over, "0").exists() or not Path(over, "2").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        raise memascend.UsageError("it hung")

    if rank == 1:
        Line.send = hang
    found = met(lambda: optimizer.save(f"{folder}/saved"))
    over.mkdir(exist_ok=True)
    Path(over, str(rank)).touch()
    optimizer.close()
    return found[:2], Path(folder, "saved").exists()


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_save_is_named_on_all_others(tmp_path):
    first, _, third = on_ranks(3, hanging_in_save, tmp_path, 6.0, seconds=SECONDS)
    assert first == third == (["RankError", 1], False)
