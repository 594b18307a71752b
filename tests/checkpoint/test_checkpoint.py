"""Tests checkpoints: exact continuation in another store, files, failed and killed saves, and memory use."""

import contextlib
import ctypes
import errno
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from support.bits import same_states
from support.chains import batch, everything, offloaded, train
from support.chains import values as state
from support.lives import forked_life
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import memascend
from memascend.checkpoint import files, shares
from memascend.checkpoint import reader as checkpoints
from memascend.checkpoint.files import new_folder, replace_folder
from memascend.errors import ConfigError, CorruptionError, StorageError, UsageError
from memascend.storage import checksum_of
from memascend.text import Progress


class Mixed(torch.nn.Module):
    """A model with tied weights, running statistics, a frozen layer, a convolution and an empty parameter."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(40, 16)
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.batch = torch.nn.BatchNorm2d(8)
        self.frozen = torch.nn.Linear(16, 16).requires_grad_(False)
        self.head = torch.nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight
        self.none = torch.nn.Parameter(torch.zeros(0))

    def forward(self, tokens, images):
        x = self.frozen(self.embed(tokens))
        y = self.batch(self.conv(images))
        return self.head(x).float().square().mean() + y.float().square().mean() * 3 + self.none.float().sum()


def made(dtype=torch.bfloat16, optimizer=torch.optim.AdamW, seed=0, **options):
    torch.manual_seed(seed)
    model = Mixed().to(dtype)
    model.conv.to(memory_format=torch.channels_last)
    if optimizer is torch.optim.Adafactor:  # torch's Adafactor would divide by the 0 elements of `none`
        del model.none
        model.none = torch.zeros(1)
    return model, optimizer([p for p in model.parameters() if p.requires_grad], **options)


def batches(dtype):
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 40, (2, 5), generator=random), torch.randn(2, 3, 6, 6, generator=random).to(dtype))
        for _ in range(6)
    ]


def trained(model, optimizer, first, last, dtype=torch.bfloat16):
    losses = train(model, optimizer, batches(dtype)[first:last], lambda model, inputs: model(*inputs))
    return [loss.item() for loss in losses]


SEEDED = {"master_dtype": None, "rounding": "stochastic", "seed": 5}
KINDS = [
    pytest.param(torch.bfloat16, torch.optim.AdamW, {}, id="bf16"),
    pytest.param(torch.float16, torch.optim.AdamW, {}, id="fp16"),
    pytest.param(torch.float32, torch.optim.SGD, {}, id="no state"),
    pytest.param(torch.bfloat16, torch.optim.NAdam, {}, id="scalars"),
    pytest.param(torch.float32, torch.optim.Adafactor, {}, id="odd shapes"),
    pytest.param(torch.bfloat16, torch.optim.AdamW, {"master_dtype": None}, id="no master"),
    pytest.param(torch.bfloat16, torch.optim.AdamW, SEEDED, id="seed"),
]


@pytest.mark.parametrize(("dtype", "kind", "offload"), KINDS)
def test_training_resumes_bit_for_bit_from_a_checkpoint_in_another_store(tmp_path, monkeypatch, dtype, kind, offload):
    monkeypatch.setattr(files, "FILE_BYTES_MAX", 700)
    model, optimizer = made(dtype, kind, lr=1e-2)
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "one", gradients="ssd", **offload)
    with optimizer:
        trained(model, optimizer, 0, 3, dtype)
        optimizer.param_groups[0]["lr"] = 5e-3
        optimizer.user_state = {"position": 3}
        optimizer.save(tmp_path / "saved")
        # With fp16, the first steps overflow and are skipped, so `steps` may be less than 3.
        steps = optimizer.steps
        identity = optimizer.state_dict()
        before = everything(model, optimizer)
        losses = trained(model, optimizer, 3, 6, dtype)
        after = everything(model, optimizer)
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 1
    other, optimizer = made(dtype, kind, seed=7, lr=1e-2)
    with pytest.warns(UserWarning, match="lr"):
        other, optimizer = memascend.offload(
            other,
            optimizer,
            storage=[tmp_path / "two", tmp_path / "three"],
            gradients="ram",
            host_memory="64MiB",
            checkpoint=tmp_path / "saved",
            # The checkpoint's seed replaces this seed.
            **{**offload, "seed": 0},
        )
    with optimizer:
        assert optimizer.steps == steps > 0
        assert optimizer.user_state == {"position": 3}
        assert optimizer.param_groups[0]["lr"] == 5e-3
        assert same_states(everything(other, optimizer), before)
        optimizer.load_state_dict(identity)
        assert trained(other, optimizer, 3, 6, dtype) == losses
        assert same_states(everything(other, optimizer), after)
        with pytest.raises(UsageError, match=rf"is of step {steps} of store .*checkpoint="):
            optimizer.load_state_dict(identity)


class Turned(torch.nn.Module):
    """A module with a transposed and a permuted parameter. The strides of neither parameter match a memory format."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.transposed = torch.nn.Parameter(torch.randn(5, 4).t())
        self.permuted = torch.nn.Parameter(torch.randn(2, 3, 4).permute(1, 2, 0))

    def forward(self, x):
        return ((x @ self.transposed).sum() + self.permuted.sum(dim=(0, 2)) @ x.sum(dim=0)).square()


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram"])
def test_transposed_parameters_keep_values_and_strides_through_checkpoints(tmp_path, gradients):
    def loss_of(model, seed):
        return model(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)))

    plain = Turned()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), range(4), loss_of)
    values = {name: tensor.detach().clone() for name, tensor in Turned().named_parameters()}
    with torch.device("meta"):
        model = Turned()
    model, optimizer = offloaded(tmp_path / "one", model, weights=lambda name, _: values[name], gradients=gradients)
    with optimizer:
        train(model, optimizer, range(2), loss_of)
        optimizer.save(tmp_path / "saved")
    model, optimizer = offloaded(None, Turned(), checkpoint=tmp_path / "saved", gradients=gradients)
    with optimizer:
        train(model, optimizer, range(2, 4), loss_of)
        found = model.state_dict()
        for name, wanted in plain.named_parameters():
            assert torch.equal(found[name], wanted)
            assert found[name].stride() == wanted.stride()


def test_channels_last_checkpoint_loads_into_a_contiguous_model(tmp_path):
    def conv(memory_format):
        torch.manual_seed(0)
        # The weight of the first layer is so large that its optimizer state has several chunks.
        model = torch.nn.Sequential(torch.nn.Conv2d(16, 1500, 5), torch.nn.Conv2d(1500, 3, 1))
        model = model.to(torch.bfloat16).to(memory_format=memory_format)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(model, _):
        images = torch.randn(1, 16, 6, 6, generator=torch.Generator().manual_seed(2)).bfloat16()
        return model(images).float().square().mean()

    model, optimizer = conv(torch.channels_last)
    stride = model[0].weight.stride()
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "one")
    with optimizer:
        train(model, optimizer, [0], loss_of)
        optimizer.save(tmp_path / "saved")
        before = everything(model, optimizer)
        assert before["0.weight"].stride() == model[0].weight.stride() == stride
    # The checkpoint's file has the tensor in row-major order, which other tools expect.
    with safe_open(tmp_path / "saved" / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("0.weight"), before["0.weight"])
    model, optimizer = conv(torch.contiguous_format)
    given = model[0].weight.stride()
    assert given != stride
    model, optimizer = memascend.offload(model, optimizer, checkpoint=tmp_path / "saved")
    with optimizer:
        assert model[0].weight.stride() == given
        assert same_states(everything(model, optimizer), before)


def test_progress_bars_of_save_and_verify_reach_their_total(tmp_path, monkeypatch):
    bars = []

    class Bar(Progress):
        def __init__(self, what, nbytes, stream=None):
            super().__init__(what, nbytes, stream)
            self.message = (what, nbytes)
            bars.append(self)

    for module in (shares, checkpoints):
        monkeypatch.setattr(module, "Progress", Bar)
    _, optimizer = memascend.offload(*made())
    with optimizer:
        optimizer.save(tmp_path / "saved")
    checkpoints.Checkpoint(tmp_path / "saved").verify()
    assert [bar.message[0] for bar in bars] == ["saving the checkpoint", "checking the checkpoint"]
    assert all(bar._done == bar.message[1] > 0 for bar in bars)


def test_checkpoint_loads_with_and_without_checkpoint_wrapper(tmp_path):
    """A checkpoint loads into models with and without checkpoint_wrapper(), although the wrapper renames parameters."""

    def run(*, wraps, steps, **options):
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4).eval()) for _ in range(2)]
        model = torch.nn.Sequential(*(checkpoint_wrapper(block) if wraps else block for block in blocks))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        names = list(model.state_dict())
        model, optimizer = memascend.offload(model, optimizer, **options)
        seeds = range(optimizer.steps, steps)
        train(model, optimizer, seeds, lambda model, seed: model(batch(seed, 4)).square().mean())
        optimizer.save(tmp_path / f"saved-{wraps}-{steps}")
        optimizer.close()
        return names, load_file(tmp_path / f"saved-{wraps}-{steps}" / "model.safetensors")

    names, _ = run(wraps=True, steps=1, storage=tmp_path / "one")
    for wraps in (False, True):
        storage = tmp_path / f"other-{wraps}"
        _, found = run(wraps=wraps, steps=2, storage=storage, checkpoint=tmp_path / "saved-True-1")
        assert sorted(found) == sorted(names)
        _, expected = run(wraps=wraps, steps=2, storage=tmp_path / f"whole-{wraps}")
        assert all(torch.equal(found[name], expected[name]) for name in names)


# --- a checkpoint's files ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves a checkpoint after two steps; returns the checkpoint's folder, and the run's values and optimizer state."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model, optimizer = made()
    model, optimizer = memascend.offload(model, optimizer)
    with optimizer:
        trained(model, optimizer, 0, 2)
        optimizer.save(folder / "saved")
        return folder / "saved", everything(model, optimizer)


def test_safetensors_tools_read_the_checkpoint(saved):
    folder, values = saved
    model = Mixed().to(torch.bfloat16)
    load_model(model, folder / "model.safetensors")
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())
    with safe_open(folder / "memascend" / "state.safetensors", framework="pt") as state:
        assert torch.equal(state.get_tensor("embed.weight.exp_avg"), values["embed.weight: exp_avg"])
        assert torch.equal(state.get_tensor("embed.weight.master"), values["embed.weight: master"])
        assert state.get_tensor("embed.weight.updates").item() == 2


def test_checkpoint_passed_as_weights_starts_at_step_0(saved, tmp_path):
    folder, values = saved
    with torch.device("meta"):
        model = Mixed().to(torch.bfloat16)
    model.frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "run", weights=folder)
    with optimizer:
        assert optimizer.steps == 0
        assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())


def refused(folder, tmp_path, error, match, **options):
    """Requires that offload() rejects a checkpoint and changes neither the model nor an existing store."""
    store = tmp_path / "there"
    if not store.exists():
        model, optimizer = made(seed=3)
        memascend.offload(model, optimizer, storage=store)[1].close()
    before = store.read_bytes()
    model, optimizer = made(optimizer=options.pop("kind", torch.optim.AdamW), seed=5)
    values = state(model)
    with pytest.raises(error, match=match):
        memascend.offload(model, optimizer, storage=store, existing="replace", checkpoint=folder, **options)
    assert store.read_bytes() == before
    assert same_states(state(model), values)
    with pytest.raises(error, match=match):
        memascend.offload(model, optimizer, storage=tmp_path / "new", checkpoint=folder, **options)
    assert not (tmp_path / "new").exists()


def test_offload_whose_first_commit_fails_keeps_values_and_buffers(saved, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise memascend.StorageError("no space")

    model, optimizer = made(seed=5)
    before = state(model)
    monkeypatch.setattr(memascend.engine.Engine, "commit", fails)
    with pytest.raises(memascend.StorageError, match="no space"):
        memascend.offload(model, optimizer, storage=tmp_path / "new", checkpoint=saved[0])
    assert same_states(state(model), before)


def test_flipped_bit_in_any_checkpoint_file_is_detected(saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    dice = random.Random(4)
    for path in (folder / "model.safetensors", folder / "memascend" / "state.safetensors"):
        whole = path.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        places = [0, 9, header - 70, header, len(whole) - 1, *(dice.randrange(len(whole)) for _ in range(6))]
        for place in places:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << dice.randrange(8)]) + whole[place + 1 :])
            found = checkpoints.Checkpoint(folder)
            with pytest.raises(CorruptionError, match=path.name):
                found.verify()
        refused(folder, tmp_path, CorruptionError, path.name)
        path.write_bytes(whole)
    path = folder / "memascend" / "manifest.json"
    whole = path.read_bytes()
    for place in [*range(200), *(dice.randrange(len(whole)) for _ in range(100))]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << dice.randrange(7)]) + whole[place + 1 :])
        with pytest.raises(CorruptionError, match=r"manifest.json"):
            checkpoints.Checkpoint(folder)
    path.write_bytes(whole)
    checkpoints.Checkpoint(folder).verify()


def test_verify_checks_each_part_of_a_tensor_that_several_ranks_wrote(saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    path = folder / "memascend" / "manifest.json"
    manifest, first = json.loads(path.read_bytes()), checksum_of(saved[1]["embed.weight"][0])
    parts = manifest["files"]["model.safetensors"]["tensors"]["embed.weight"] = [[0, first], [32, first]]
    path.write_bytes(checkpoints.render_manifest(manifest))
    with pytest.raises(CorruptionError, match=r"'embed.weight' in .* is damaged") as caught:
        checkpoints.Checkpoint(folder).verify()
    assert caught.value.nbytes == saved[1]["embed.weight"].nbytes - parts[1][0]


def test_partial_or_mismatched_checkpoint_is_rejected(saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    refused(tmp_path, tmp_path, ConfigError, "is not a checkpoint")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    refused(folder, tmp_path, CorruptionError, rf"has {len(whole) - 1} bytes")
    weights.unlink()
    refused(folder, tmp_path, CorruptionError, "is partial: model.safetensors is missing")
    weights.write_bytes(whole)
    refused(
        folder, tmp_path, ConfigError, "was saved with AdamW, but this run's optimizer is Adam", kind=torch.optim.Adam
    )
    refused(folder, tmp_path, ConfigError, "the optimizer state .* does not fit this run: ", master_dtype=None)
    path = folder / "memascend" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for change, match in (
        ({"version": 3}, "version 3"),
        ({"format": "other"}, "'other'"),
        ({"step": "3"}, r"malformed \(no valid step\)"),
        ({"files": {"../model.safetensors": manifest["files"]["model.safetensors"]}}, r"malformed \(the entry of"),
        ({"files": {"model.safetensors": {"bytes": 1}}}, r"malformed \(the entry of"),
    ):
        path.write_bytes(checkpoints.render_manifest({**manifest, **change}))
        refused(folder, tmp_path, CorruptionError, match)


def test_resumed_store_takes_precedence_over_the_checkpoint(saved, tmp_path):
    model, optimizer = made(seed=3)
    options = {"storage": tmp_path / "run", "existing": "resume", "checkpoint": saved[0]}
    model, optimizer = memascend.offload(model, optimizer, **options)
    with optimizer:
        assert optimizer.steps == 2
        trained(model, optimizer, 2, 3)
    model, optimizer = made(seed=3)
    model, optimizer = memascend.offload(model, optimizer, **options)
    with optimizer:
        assert optimizer.steps == 3


# --- writing of checkpoints ----------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path):
    model, optimizer = made()
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "run")
    with optimizer:
        yield model, optimizer


@pytest.fixture
def target(tmp_path):
    return tmp_path / "saved"


def test_save_rejects_a_staged_step_and_a_folder_with_other_files(running, tmp_path):
    model, optimizer = running
    model(*batches(torch.bfloat16)[0]).backward()
    with pytest.raises(UsageError, match="a step is staged"):
        optimizer.save(tmp_path / "saved")
    optimizer.step()
    optimizer.zero_grad()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="files that are not a checkpoint"):
        optimizer.save(tmp_path / "mine")
    with pytest.raises(ConfigError, match="does not exist"):
        optimizer.save(tmp_path / "nowhere" / "saved")
    assert sorted(os.listdir(tmp_path)) == ["mine", "run"]
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    optimizer.save(tmp_path / "empty")
    checkpoints.Checkpoint(tmp_path / "empty").verify()
    assert sorted(os.listdir(tmp_path)) == ["empty", "mine", "run"]


def test_failed_save_keeps_the_old_checkpoint(running, tmp_path, monkeypatch):
    model, optimizer = running
    folder = tmp_path / "saved"
    optimizer.save(folder)
    (folder / "tokenizer.json").write_text("mine")
    (folder / "more").mkdir()
    (folder / "more" / "notes").write_text("mine")
    trained(model, optimizer, 0, 1)

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
        with pytest.raises(StorageError, match="only 100 bytes are available"):
            optimizer.save(folder)
    with monkeypatch.context() as patch:
        patch.setattr(files, "_exchange", lambda *_: False)
        optimizer.save(folder)
    assert step() == 1
    trained(model, optimizer, 1, 2)
    optimizer.save(folder)
    assert step() == 2


def killed_at_random_moments(folder, kills):
    """Kills child processes that save, and verifies the checkpoint after each kill.

    This function forks, so call it by `elsewhere`, in another process.
    """

    def save(begun):
        model, optimizer = made()
        model, optimizer = memascend.offload(model, optimizer)
        while True:
            trained(model, optimizer, 0, 1)
            optimizer.save(folder)
            begun()

    dice, seen = random.Random(int(kills)), set()
    for _ in range(int(kills)):
        assert forked_life(save, dice.uniform(0, 0.2))
        found = checkpoints.Checkpoint(folder)
        found.verify()
        seen.add((found.manifest["store"], found.manifest["step"]))
    model, optimizer = made()
    model, optimizer = memascend.offload(model, optimizer, checkpoint=folder)
    with optimizer:
        optimizer.save(folder)
    left = [name for name in os.listdir(folder.parent) if "memascend-saving" in name]
    assert not left, "the next save left files of a killed process"
    print("seen", len(seen))


PROGRAM = """
import pathlib, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from checkpoint import test_checkpoint
getattr(test_checkpoint, sys.argv[2])(pathlib.Path(sys.argv[3]), sys.argv[4])
"""


@pytest.fixture
def elsewhere(loaded, tmp_path):
    """Returns `call`, which runs a function of this file in another process.

    `call` returns the last two words of the output of this process.
    """

    def call(function, folder, argument, timeout=250):
        words = Path(__file__).parent.parent, function.__name__, folder, argument
        return loaded(PROGRAM, *words, env={"TMPDIR": str(tmp_path)}, timeout=timeout).split()[-2:]

    return call


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_checkpoint_stays_complete_when_saving_processes_are_killed(tmp_path, elsewhere, kills):
    found = elsewhere(killed_at_random_moments, tmp_path / "saved", kills, timeout=250 if kills < 10 else 580)
    assert found == ["seen", str(kills)], "a child saved no checkpoint"


# The number of the option `M_ARENA_MAX` in glibc's malloc.h.
M_ARENA_MAX = -8
WIDTH = 1_100_000


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # The embedding is one unit. It has almost all parameters of the model.
        self.embed = torch.nn.EmbeddingBag(WIDTH, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))


def grows(folder, step):
    """Prints the memory that offload() and save() add to the process, and the memory that the plan has for units."""
    from memory.measured import Sampler, status

    # Each heap of malloc keeps freed memory, so the test allows only two heaps.
    assert ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2) == 1
    with torch.device("meta"):
        model = Wide().to(torch.bfloat16)
    how = {"checkpoint": folder / "saved"} if step == "load" else {"weights": folder / "weights.safetensors"}
    # Before `base` is measured, a small run allocates the memory that torch and its threads allocate only once.
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


def test_memory_of_save_and_load_does_not_grow_with_the_model(tmp_path, elsewhere):
    torch.manual_seed(0)
    values = {"embed.weight": torch.randn(WIDTH, 16).bfloat16()}
    for layer in range(2):
        values[f"layers.{layer}.weight"] = torch.randn(16, 16).bfloat16()
        values[f"layers.{layer}.bias"] = torch.zeros(16).bfloat16()
    save_file(values, tmp_path / "weights.safetensors")
    values_bytes = values["embed.weight"].nbytes
    for step in ("save", "load"):
        grown, held = map(int, elsewhere(grows, tmp_path, step))
        # The arena has room for the values of the largest unit. The optimizer state is six times as large as these
        # values, but streams through small buffers.
        assert values_bytes <= held
        assert grown - held < 32 << 20 < values_bytes, (grown, held)
        if step == "save":
            (tmp_path / "savedsave").rename(tmp_path / "saved")
    one, other = (tmp_path / name / "memascend" / "state.safetensors" for name in ("saved", "savedload"))
    assert one.read_bytes() == other.read_bytes()


class Configuration:
    """Stands in for a config of transformers. save() writes the model's config beside the weights."""

    def save_pretrained(self, folder):
        (folder / "config.json").write_text(str(self.architectures))


def test_save_syncs_every_file_before_and_the_parent_after_the_exchange(running, tmp_path, target, monkeypatch):
    """Requires that a folder with the target's name is complete, even after a loss of power."""
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
def test_second_saver_is_rejected_and_changes_nothing(target, is_there):
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
        replace_folder(target, new)
        assert new.exists() == is_there, "`new` has the earlier checkpoint until the end"
        with pytest.raises(UsageError, match="another process is saving"), new_folder(target):
            pass
    assert (target / "part").read_text() == "mine"
    assert (target.stat().st_mode & 0o777 == 0o710) == is_there
    assert [*target.parent.iterdir()] == [target]


def test_new_folder_removes_the_files_of_a_killed_saver(target):
    with contextlib.suppress(KeyError), new_folder(target) as new:
        raise KeyError
    new.mkdir()
    (new / "part").write_text("left")
    new.with_name(".saved.memascend-lock").touch()
    with new_folder(target) as new:
        assert not any(new.iterdir())
