"""Tests checkpoints: saved, resumed bit for bit, loaded by others, refused where damaged, whole whatever happens."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from support.bits import same_states

import memascend
from memascend.checkpoint import folder_swap
from memascend.checkpoint import reader as checkpoints
from memascend.checkpoint import safetensors_writer as tensorfile
from memascend.checkpoint import writer as saving
from memascend.errors import ConfigError, CorruptionError, StorageError, UsageError
from memascend.progress import Progress


class Mixed(torch.nn.Module):
    """Tied, with running statistics, a frozen part, and convolutions in another order of dimensions."""

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


def made(dtype, optimizer, seed=0, **options):
    torch.manual_seed(seed)
    model = Mixed().to(dtype)
    model.conv.to(memory_format=torch.channels_last)
    if optimizer is torch.optim.Adafactor:  # torch's own divides by their number of elements
        del model.none
        model.none = torch.zeros(1)
    return model, optimizer([p for p in model.parameters() if p.requires_grad], **options)


def batches(dtype):
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 40, (2, 5), generator=random), torch.randn(2, 3, 6, 6, generator=random).to(dtype))
        for _ in range(6)
    ]


def trained(model, optimizer, dtype, first, last):
    losses = []
    for batch in batches(dtype)[first:last]:
        loss = model(*batch)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything(model, optimizer):
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter in owned:
            found |= {f"{name}: {of}": torch.as_tensor(v).clone() for of, v in optimizer.state_of(parameter).items()}
    return found


KINDS = [
    pytest.param(torch.bfloat16, torch.optim.AdamW, {}, {}, id="bf16"),
    pytest.param(torch.float16, torch.optim.AdamW, {}, {}, id="fp16"),
    pytest.param(torch.float32, torch.optim.Adam, {"weight_decay": 0.1}, {}, id="fp32"),
    pytest.param(torch.bfloat16, torch.optim.SGD, {"momentum": 0.9}, {}, id="momentum"),
    pytest.param(torch.float32, torch.optim.SGD, {}, {}, id="no state"),
    pytest.param(torch.bfloat16, torch.optim.NAdam, {}, {}, id="scalars"),
    pytest.param(torch.float32, torch.optim.Adafactor, {}, {}, id="odd shapes"),
    pytest.param(torch.bfloat16, torch.optim.AdamW, {}, {"master_dtype": None}, id="no master"),
]


@pytest.mark.parametrize(("dtype", "kind", "options", "offload"), KINDS)
def test_it_goes_on_bit_for_bit_elsewhere(tmp_path, monkeypatch, dtype, kind, options, offload):
    monkeypatch.setattr(tensorfile, "FILE_BYTES_MAX", 700)
    model, optimizer = made(dtype, kind, lr=1e-2, **options)
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "one", gradients="ssd", **offload)
    with optimizer:
        trained(model, optimizer, dtype, 0, 3)
        optimizer.param_groups[0]["lr"] = 5e-3
        optimizer.user_state = {"position": 3}
        optimizer.save(tmp_path / "saved")
        # fp16 skips steps at first.
        steps = optimizer.steps
        identity = optimizer.state_dict()
        before = everything(model, optimizer)
        losses = trained(model, optimizer, dtype, 3, 6)
        after = everything(model, optimizer)
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 1
    other, optimizer = made(dtype, kind, seed=7, lr=1e-2, **options)
    with pytest.warns(UserWarning, match="lr"):
        other, optimizer = memascend.offload(
            other,
            optimizer,
            storage=[tmp_path / "two", tmp_path / "three"],
            gradients="ram",
            host_memory="64MiB",
            checkpoint=tmp_path / "saved",
            **offload,
        )
    with optimizer:
        assert optimizer.steps == steps > 0
        assert optimizer.user_state == {"position": 3}
        assert optimizer.param_groups[0]["lr"] == 5e-3
        assert same_states(everything(other, optimizer), before)
        optimizer.load_state_dict(identity)
        assert trained(other, optimizer, dtype, 3, 6) == losses
        assert same_states(everything(other, optimizer), after)
        with pytest.raises(UsageError, match=rf"the checkpoint \S+ is of step {steps} of store"):
            optimizer.load_state_dict(identity)


class Turned(torch.nn.Module):
    """A transposed and a permuted parameter, of orders that no memory format has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.transposed = torch.nn.Parameter(torch.randn(5, 4).t())
        self.permuted = torch.nn.Parameter(torch.randn(2, 3, 4).permute(1, 2, 0))

    def forward(self, x):
        return ((x @ self.transposed).sum() + self.permuted.sum(dim=(0, 2)) @ x.sum(dim=0)).square()


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram"])
def test_transposed_parameters_go_and_come_whole_also_from_meta(tmp_path, gradients):
    def steps(model, optimizer, seeds):
        for seed in seeds:
            model(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = Turned()
    torch_adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    steps(plain, torch_adamw, range(4))
    values = {name: tensor.detach().clone() for name, tensor in Turned().named_parameters()}
    with torch.device("meta"):
        model = Turned()
    model, optimizer = memascend.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        storage=tmp_path / "one",
        weights=lambda name, _: values[name],
        gradients=gradients,
    )
    with optimizer:
        steps(model, optimizer, range(2))
        optimizer.save(tmp_path / "saved")
    model = Turned()
    model, optimizer = memascend.offload(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), checkpoint=tmp_path / "saved", gradients=gradients
    )
    with optimizer:
        steps(model, optimizer, range(2, 4))
        found = model.state_dict()
        for name, wanted in plain.named_parameters():
            assert torch.equal(found[name], wanted)
            assert found[name].stride() == wanted.stride()


@pytest.mark.parametrize("turned", [False, True])
def test_another_order_of_dimensions_goes_and_comes_whole(tmp_path, turned):
    def conv(memory_format):
        torch.manual_seed(0)
        # A parameter of several chunks.
        model = torch.nn.Sequential(torch.nn.Conv2d(16, 1500, 5), torch.nn.Conv2d(1500, 3, 1))
        model = model.to(torch.bfloat16).to(memory_format=memory_format)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model, optimizer):
        images = torch.randn(1, 16, 6, 6, generator=torch.Generator().manual_seed(2)).bfloat16()
        loss = model(images).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model, optimizer = conv(torch.channels_last)
    stride = model[0].weight.stride()
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "one")
    with optimizer:
        step(model, optimizer)
        optimizer.save(tmp_path / "saved")
        before = everything(model, optimizer)
        assert before["0.weight"].stride() == model[0].weight.stride() == stride
        losses = [step(model, optimizer) for _ in range(2)]
        after = everything(model, optimizer)
    # Row-major, as all other tools expect it.
    with safe_open(tmp_path / "saved" / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("0.weight"), before["0.weight"])
    model, optimizer = conv(torch.channels_last if turned else torch.contiguous_format)
    given = model[0].weight.stride()
    assert (given == stride) == turned
    model, optimizer = memascend.offload(model, optimizer, checkpoint=tmp_path / "saved")
    with optimizer:
        assert model[0].weight.stride() == given
        assert same_states(everything(model, optimizer), before)
        found = [step(model, optimizer) for _ in range(2)]
        if turned:  # convolutions of another layout are other kernels
            assert found == losses
            assert same_states(everything(model, optimizer), after)
        model.state_dict()


def test_a_bar_goes_to_its_end(tmp_path, monkeypatch):
    bars = []

    class Bar(Progress):
        def __init__(self, what, nbytes, stream=None):
            super().__init__(what, nbytes, stream)
            self.said = (what, nbytes)
            bars.append(self)

    for module in (saving, checkpoints):
        monkeypatch.setattr(module, "Progress", Bar)
    _, optimizer = memascend.offload(*made(torch.bfloat16, torch.optim.AdamW))
    with optimizer:
        optimizer.save(tmp_path / "saved")
    checkpoints.Checkpoint(tmp_path / "saved").verify()
    assert [bar.said[0] for bar in bars] == ["saving the checkpoint", "checking the checkpoint"]
    assert all(bar._done == bar.said[1] > 0 for bar in bars)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after two steps, and what is in it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model, optimizer = made(torch.bfloat16, torch.optim.AdamW)
    model, optimizer = memascend.offload(model, optimizer)
    with optimizer:
        trained(model, optimizer, torch.bfloat16, 0, 2)
        optimizer.save(folder / "saved")
        return folder / "saved", everything(model, optimizer)


def test_other_tools_read_it(saved):
    folder, values = saved
    model = Mixed().to(torch.bfloat16)
    load_model(model, folder / "model.safetensors")
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())
    with safe_open(folder / "memascend" / "state.safetensors", framework="pt") as state:
        assert torch.equal(state.get_tensor("embed.weight.exp_avg"), values["embed.weight: exp_avg"])
        assert torch.equal(state.get_tensor("embed.weight.master"), values["embed.weight: master"])
        assert state.get_tensor("embed.weight.updates").item() == 2


def test_as_weights_it_begins_anew(saved, tmp_path):
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
    """It is refused; model, optimizer and the store that is there stay as they are."""
    store = tmp_path / "there"
    if not store.exists():
        model, optimizer = made(torch.bfloat16, torch.optim.AdamW, seed=3)
        memascend.offload(model, optimizer, storage=store)[1].close()
    before = store.read_bytes()
    model, optimizer = made(torch.bfloat16, options.pop("kind", torch.optim.AdamW), seed=5)
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=match):
        memascend.offload(model, optimizer, storage=store, existing="replace", checkpoint=folder, **options)
    assert store.read_bytes() == before
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(error, match=match):
        memascend.offload(model, optimizer, storage=tmp_path / "new", checkpoint=folder, **options)
    assert not (tmp_path / "new").exists()


def test_every_byte_counts(saved, tmp_path):
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


def test_what_is_partial_or_of_another_kind_is_refused(saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    refused(tmp_path, tmp_path, ConfigError, "is no checkpoint")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    refused(folder, tmp_path, CorruptionError, rf"has {len(whole) - 1} bytes")
    weights.unlink()
    refused(folder, tmp_path, CorruptionError, "is partial: model.safetensors is missing")
    weights.write_bytes(whole)
    refused(folder, tmp_path, ConfigError, "is of AdamW, and the optimizer is Adam", kind=torch.optim.Adam)
    refused(folder, tmp_path, ConfigError, "not that of this optimizer and master_dtype", master_dtype=None)
    path = folder / "memascend" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for change, match in (
        ({"version": 2}, "version 2"),
        ({"format": "other"}, "'other'"),
        ({"step": "3"}, "malformed: no step"),
        ({"files": {"../model.safetensors": manifest["files"]["model.safetensors"]}}, "malformed: what it says of"),
        ({"files": {"model.safetensors": {"bytes": 1}}}, "malformed: what it says of"),
    ):
        path.write_bytes(checkpoints.render_manifest({**manifest, **change}))
        refused(folder, tmp_path, CorruptionError, match)


def test_a_store_that_is_resumed_stands_before_it(saved, tmp_path):
    model, optimizer = made(torch.bfloat16, torch.optim.AdamW, seed=3)
    options = {"storage": tmp_path / "run", "existing": "resume", "checkpoint": saved[0]}
    model, optimizer = memascend.offload(model, optimizer, **options)
    with optimizer:
        assert optimizer.steps == 2
        trained(model, optimizer, torch.bfloat16, 2, 3)
    model, optimizer = made(torch.bfloat16, torch.optim.AdamW, seed=3)
    model, optimizer = memascend.offload(model, optimizer, **options)
    with optimizer:
        assert optimizer.steps == 3


@pytest.fixture
def running(tmp_path):
    model, optimizer = made(torch.bfloat16, torch.optim.AdamW)
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "run")
    with optimizer:
        yield model, optimizer


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
    with pytest.raises(ConfigError, match="is not there"):
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
        patch.setattr(folder_swap, "_exchange", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.save(folder)
    assert step() == 0
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 20, 1 << 20, 100))
        with pytest.raises(StorageError, match="has room for 100"):
            optimizer.save(folder)
    with monkeypatch.context() as patch:
        patch.setattr(folder_swap, "_exchange", lambda *_: False)
        optimizer.save(folder)
    assert step() == 1
    trained(model, optimizer, torch.bfloat16, 1, 2)
    optimizer.save(folder)
    assert step() == 2


def saves_until_killed(folder, told):
    """What the child does."""
    model, optimizer = made(torch.bfloat16, torch.optim.AdamW)
    model, optimizer = memascend.offload(model, optimizer)
    while True:
        trained(model, optimizer, torch.bfloat16, 0, 1)
        optimizer.save(folder)
        os.write(told, b"x")


def killed_at_random_moments(folder, kills):
    """What an interpreter of its own does, because it forks."""
    dice = random.Random(kills)
    seen = set()
    for _ in range(kills):
        hears, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                saves_until_killed(folder, told)
            finally:
                os._exit(1)
        os.close(told)
        assert os.read(hears, 1) == b"x", "the child ended by itself"
        time.sleep(dice.uniform(0, 0.2))
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "the child ended by itself"
        os.close(hears)
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


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_killed_at_any_moment_there_is_a_whole_one(tmp_path, loaded, kills):
    program = """
        import pathlib, sys, torch
        torch.set_num_threads(1)
        sys.path.insert(0, sys.argv[1])
        from checkpoint import test_checkpoint
        test_checkpoint.killed_at_random_moments(pathlib.Path(sys.argv[2]), int(sys.argv[3]))
    """
    tests = Path(__file__).parent.parent
    seconds = 100 if kills < 10 else 580
    output = loaded(
        textwrap.dedent(program), tests, tmp_path / "saved", kills, env={"TMPDIR": str(tmp_path)}, timeout=seconds
    )
    assert int(output.split()[-1]) == kills, "each child saved"


FLAT = textwrap.dedent("""
    import ctypes, os, sys, threading, time
    import torch
    import memascend

    # Heaps of threads keep what they freed: no more than two.
    M_ARENA_MAX = -8
    assert ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2) == 1
    torch.set_num_threads(1)
    folder, step = sys.argv[1:]
    WIDTH = 1_000_000

    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            # One that is not looked up by rows: a unit as large as it is.
            self.embed = torch.nn.EmbeddingBag(WIDTH, 16)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

        def forward(self, x):
            return self.layers[1](self.layers[0](self.embed(x))).float().square().mean()

    def anon():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    class Peak:
        def __enter__(self):
            self.base = self.peak = anon()
            self.on = True
            self.thread = threading.Thread(target=self.watch)
            self.thread.start()
            return self

        def watch(self):
            while self.on:
                self.peak = max(self.peak, anon())
                time.sleep(0.002)

        def __exit__(self, *_):
            self.on = False
            self.thread.join()

    with torch.device("meta"):
        model = Wide().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    how = {"checkpoint": folder + "/saved"} if step == "load" else {"weights": folder + "/weights.safetensors"}
    # What torch and threads take the first time is not the model's.
    small = torch.nn.Linear(8, 8).to(torch.bfloat16)
    small, other = memascend.offload(small, torch.optim.AdamW(small.parameters()), storage=folder + "/small" + step)
    other.save(folder + "/small" + step + ".saved")
    other.close()
    with Peak() as peak:
        model, optimizer = memascend.offload(model, optimizer, storage=folder + "/run" + step, gradients="ssd", **how)
        held = optimizer.plan.host["units"]
        optimizer.save(folder + "/saved" + step)
    print(peak.peak - peak.base, held)
    optimizer.close()
""")


def test_memory_does_not_grow_with_the_model(tmp_path, loaded):
    from safetensors.torch import save_file

    torch.manual_seed(0)
    values = {"embed.weight": torch.randn(1_000_000, 16).bfloat16()}
    for layer in range(2):
        values |= {
            f"layers.{layer}.weight": torch.randn(16, 16).bfloat16(),
            f"layers.{layer}.bias": torch.zeros(16).bfloat16(),
        }
    save_file(values, tmp_path / "weights.safetensors")
    values_bytes = values["embed.weight"].nbytes
    for step in ("save", "load"):
        text = loaded(FLAT, tmp_path, step)
        grown, held = map(int, text.split()[-2:])
        # The arena holds the values of the largest unit; what moves them, and six times as much state, is small.
        assert values_bytes <= held
        assert grown - held < 28 << 20 < values_bytes, (grown, held)
        if step == "save":
            (tmp_path / "savedsave").rename(tmp_path / "saved")
    one, other = (tmp_path / name / "memascend" / "state.safetensors" for name in ("saved", "savedload"))
    assert one.read_bytes() == other.read_bytes()
