"""Tests how checkpoints are written: whole whatever fails or is killed, one process at a time, in flat memory."""

import contextlib
import ctypes
import errno
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from support.checkpoints import batches, made, trained
from support.lives import forked_life

import memascend
from memascend.checkpoint import files, shares
from memascend.checkpoint import reader as checkpoints
from memascend.checkpoint.files import new_folder, put_in_place
from memascend.errors import ConfigError, StorageError, UsageError


@pytest.fixture
def running(tmp_path):
    model, optimizer = made(torch.bfloat16, torch.optim.AdamW)
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "run")
    with optimizer:
        yield model, optimizer


@pytest.fixture
def target(tmp_path):
    return tmp_path / "saved"


def test_only_between_steps_and_never_over_something_else(running, tmp_path):
    model, optimizer = running
    model(*batches(torch.bfloat16)[0]).backward()
    with pytest.raises(UsageError, match="a step is staged"):
        optimizer.save(tmp_path / "saved")
    optimizer.step()
    optimizer.zero_grad()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="something else than a checkpoint"):
        optimizer.save(tmp_path / "mine")
    with pytest.raises(ConfigError, match="does not exist"):
        optimizer.save(tmp_path / "nowhere" / "saved")
    assert sorted(os.listdir(tmp_path)) == ["mine", "run"]
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    optimizer.save(tmp_path / "empty")
    checkpoints.Checkpoint(tmp_path / "empty").verify()
    assert sorted(os.listdir(tmp_path)) == ["empty", "mine", "run"]


def test_what_fails_leaves_the_old_one(running, tmp_path, monkeypatch):
    model, optimizer = running
    folder = tmp_path / "saved"
    optimizer.save(folder)
    (folder / "tokenizer.json").write_text("mine")
    (folder / "more").mkdir()
    (folder / "more" / "notes").write_text("mine")
    trained(model, optimizer, torch.bfloat16, 0, 1)

    def step():
        found = checkpoints.Checkpoint(folder)
        found.verify()
        assert (folder / "tokenizer.json").read_text() == (folder / "more" / "notes").read_text() == "mine"
        assert sorted(os.listdir(tmp_path)) == ["run", "saved"]
        return found.manifest["step"]

    written = []

    def full(descriptor, part, offset, real=os.pwrite):
        written.append(descriptor)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, part, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match="No space left") as error:
            optimizer.save(folder)
        assert error.value.errno == errno.ENOSPC
    assert step() == 0
    with monkeypatch.context() as patch:
        patch.setattr(files, "_exchange", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.save(folder)
    assert step() == 0
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 20, 1 << 20, 100))
        with pytest.raises(StorageError, match="100 free"):
            optimizer.save(folder)
    with monkeypatch.context() as patch:
        patch.setattr(files, "_exchange", lambda *_: False)
        optimizer.save(folder)
    assert step() == 1
    trained(model, optimizer, torch.bfloat16, 1, 2)
    optimizer.save(folder)
    assert step() == 2


def killed_at_random_moments(folder, kills):
    """What an interpreter of its own does, because it forks."""

    def save(begun):
        model, optimizer = made(torch.bfloat16, torch.optim.AdamW)
        model, optimizer = memascend.offload(model, optimizer)
        while True:
            trained(model, optimizer, torch.bfloat16, 0, 1)
            optimizer.save(folder)
            begun()

    dice, seen = random.Random(int(kills)), set()
    for _ in range(int(kills)):
        assert forked_life(save, dice.uniform(0, 0.2))
        found = checkpoints.Checkpoint(folder)
        found.verify()
        seen.add((found.manifest["store"], found.manifest["step"]))
    model, optimizer = made(torch.bfloat16, torch.optim.AdamW)
    model, optimizer = memascend.offload(model, optimizer, checkpoint=folder)
    with optimizer:
        optimizer.save(folder)
    left = [name for name in os.listdir(folder.parent) if "memascend-saving" in name]
    assert not left, "what a killed process left is gone with the next save"
    print("seen", len(seen))


PROGRAM = """
import pathlib, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from checkpoint import test_writer
getattr(test_writer, sys.argv[2])(pathlib.Path(sys.argv[3]), sys.argv[4])
"""


@pytest.fixture
def elsewhere(loaded, tmp_path):
    """Calls a function of this file in an interpreter of its own; the last words that it says."""

    def call(function, folder, argument, timeout=250):
        words = Path(__file__).parent.parent, function.__name__, folder, argument
        return loaded(PROGRAM, *words, env={"TMPDIR": str(tmp_path)}, timeout=timeout).split()[-2:]

    return call


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_killed_at_any_moment_there_is_a_whole_one(tmp_path, elsewhere, kills):
    found = elsewhere(killed_at_random_moments, tmp_path / "saved", kills, timeout=250 if kills < 10 else 580)
    assert found == ["seen", str(kills)], "each child saved"


# Of glibc's malloc.h.
M_ARENA_MAX = -8
WIDTH = 1_100_000


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # A unit as large as it is.
        self.embed = torch.nn.EmbeddingBag(WIDTH, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))


def grows(folder, step):
    """What an interpreter of its own says: the memory that beginning and saving add, and that units have."""
    from memory.measured import Sampler, status

    # Heaps of threads keep what they freed: no more than two.
    assert ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2) == 1
    with torch.device("meta"):
        model = Wide().to(torch.bfloat16)
    how = {"checkpoint": folder / "saved"} if step == "load" else {"weights": folder / "weights.safetensors"}
    # What torch and threads take the first time is not the model's.
    small = torch.nn.Linear(8, 8).to(torch.bfloat16)
    with memascend.offload(small, torch.optim.AdamW(small.parameters()), storage=folder / f"small{step}")[1] as other:
        other.save(folder / f"small{step}.saved")
    base, sampler = status()["RssAnon"], Sampler()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = memascend.offload(model, optimizer, storage=folder / f"run{step}", gradients="ssd", **how)
    with optimizer:
        optimizer.save(folder / f"saved{step}")
        print(sampler.take() - base, optimizer.plan.host["units"])
    sampler.end()


def test_memory_does_not_grow_with_the_model(tmp_path, elsewhere):
    from safetensors.torch import save_file

    torch.manual_seed(0)
    values = {"embed.weight": torch.randn(WIDTH, 16).bfloat16()}
    for layer in range(2):
        values |= {
            f"layers.{layer}.weight": torch.randn(16, 16).bfloat16(),
            f"layers.{layer}.bias": torch.zeros(16).bfloat16(),
        }
    save_file(values, tmp_path / "weights.safetensors")
    values_bytes = values["embed.weight"].nbytes
    for step in ("save", "load"):
        grown, held = map(int, elsewhere(grows, tmp_path, step))
        # The arena holds the values of the largest unit; what moves them, and six times as much state, is small.
        assert values_bytes <= held
        assert grown - held < 32 << 20 < values_bytes, (grown, held)
        if step == "save":
            (tmp_path / "savedsave").rename(tmp_path / "saved")
    one, other = (tmp_path / name / "memascend" / "state.safetensors" for name in ("saved", "savedload"))
    assert one.read_bytes() == other.read_bytes()


class Configuration:
    """As transformers has it: what is written beside the weights."""

    def save_pretrained(self, folder):
        (folder / "config.json").write_text(str(self.architectures))


def test_all_of_it_is_synced_before_it_is_in_place_and_its_name_afterwards(running, tmp_path, target, monkeypatch):
    """After a loss of power a folder whose name is there has all of its bytes."""
    model, optimizer = running
    model.config = Configuration()
    synced = []
    fsync, pwrite = os.fsync, os.pwrite

    def noted(descriptor):
        there = target.stat().st_ino if target.exists() else None
        synced.append((os.fstat(descriptor).st_ino, there))
        fsync(descriptor)

    def written(descriptor, *part):
        synced[:] = [one for one in synced if one[0] != os.fstat(descriptor).st_ino]
        return pwrite(descriptor, *part)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "pwrite", written)
    before = None
    for files_at_once in (16, 1):
        monkeypatch.setattr(shares, "_OPEN_MAX", files_at_once)
        synced.clear()
        optimizer.save(target)
        new = target.stat().st_ino
        assert new != before
        first = {inode for inode, there in synced if there == before}
        parts = [target, *target.rglob("*")]
        assert len(parts) > 4
        assert {path.name for path in parts if path.stat().st_ino not in first} == set()
        assert (tmp_path.stat().st_ino, new) in synced
        before = new


# --- several processes that save to one folder ------------------------------------------------------


@pytest.mark.parametrize("is_there", [False, True])
def test_who_comes_second_takes_nothing_away_also_once_the_folder_is_in_its_place(target, is_there):
    if is_there:
        (target / "memascend").mkdir(parents=True)
        (target / "memascend" / "manifest.json").write_text("{}")
        target.chmod(0o710)
    with new_folder(target) as new:
        (new / "part").write_text("mine")
        for _ in range(2):
            with pytest.raises(UsageError, match="another process is saving"), new_folder(target):
                pass
            assert (new / "part").read_text() == "mine"
        put_in_place(target, new)
        assert new.exists() == is_there, "the earlier one, until the end"
        with pytest.raises(UsageError, match="another process is saving"), new_folder(target):
            pass
    assert (target / "part").read_text() == "mine"
    assert (target.stat().st_mode & 0o777 == 0o710) == is_there
    assert [*target.parent.iterdir()] == [target]


def test_what_a_killed_saver_left_is_gone(target):
    with contextlib.suppress(KeyError), new_folder(target) as new:
        raise KeyError
    new.mkdir()
    (new / "part").write_text("left")
    new.with_name(".saved.memascend-lock").touch()
    with new_folder(target) as new:
        assert not any(new.iterdir())
