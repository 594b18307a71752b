"""Tests checkpoints: a run goes on elsewhere, bit for bit; other tools read the files; what is damaged is refused."""

import json
import random
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from support.bits import same_states
from support.chains import batch, everything, offloaded, train
from support.chains import values as state
from support.checkpoints import Mixed, made, trained
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import memascend
from memascend.checkpoint import files as tensorfile
from memascend.checkpoint import reader as checkpoints
from memascend.checkpoint import shares
from memascend.errors import ConfigError, CorruptionError, UsageError
from memascend.storage import checksum_of
from memascend.text import Progress

KINDS = [
    pytest.param(torch.bfloat16, torch.optim.AdamW, {}, {}, id="bf16"),
    pytest.param(torch.float16, torch.optim.AdamW, {}, {}, id="fp16"),
    pytest.param(torch.float32, torch.optim.SGD, {}, {}, id="no state"),
    pytest.param(torch.bfloat16, torch.optim.NAdam, {}, {}, id="scalars"),
    pytest.param(torch.float32, torch.optim.Adafactor, {}, {}, id="odd shapes"),
    pytest.param(torch.bfloat16, torch.optim.AdamW, {}, {"master_dtype": None}, id="no master"),
    pytest.param(
        torch.bfloat16, torch.optim.AdamW, {}, {"master_dtype": None, "rounding": "stochastic", "seed": 5}, id="seed"
    ),
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
            # The stored one stands.
            **{**offload, "seed": 0},
        )
    with optimizer:
        assert optimizer.steps == steps > 0
        assert optimizer.user_state == {"position": 3}
        assert optimizer.param_groups[0]["lr"] == 5e-3
        assert same_states(everything(other, optimizer), before)
        optimizer.load_state_dict(identity)
        assert trained(other, optimizer, dtype, 3, 6) == losses
        assert same_states(everything(other, optimizer), after)
        with pytest.raises(UsageError, match=rf"is of step {steps} of store .*checkpoint="):
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


def test_another_order_of_dimensions_goes_and_comes_whole(tmp_path):
    def conv(memory_format):
        torch.manual_seed(0)
        # A parameter of several chunks.
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
    # Row-major, as all other tools expect it.
    with safe_open(tmp_path / "saved" / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("0.weight"), before["0.weight"])
    model, optimizer = conv(torch.contiguous_format)
    given = model[0].weight.stride()
    assert given != stride
    model, optimizer = memascend.offload(model, optimizer, checkpoint=tmp_path / "saved")
    with optimizer:
        assert model[0].weight.stride() == given
        assert same_states(everything(model, optimizer), before)


def test_a_bar_goes_to_its_end(tmp_path, monkeypatch):
    bars = []

    class Bar(Progress):
        def __init__(self, what, nbytes, stream=None):
            super().__init__(what, nbytes, stream)
            self.said = (what, nbytes)
            bars.append(self)

    for module in (shares, checkpoints):
        monkeypatch.setattr(module, "Progress", Bar)
    _, optimizer = memascend.offload(*made(torch.bfloat16, torch.optim.AdamW))
    with optimizer:
        optimizer.save(tmp_path / "saved")
    checkpoints.Checkpoint(tmp_path / "saved").verify()
    assert [bar.said[0] for bar in bars] == ["saving the checkpoint", "checking the checkpoint"]
    assert all(bar._done == bar.said[1] > 0 for bar in bars)


def test_names_are_those_of_the_state_dict_where_blocks_are_wrapped_for_checkpointing(tmp_path):
    """The files load into models with and without such wrappers, which rename parameters."""

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


# --- its files -----------------------------------------------------------------------------------------


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
    values = state(model)
    with pytest.raises(error, match=match):
        memascend.offload(model, optimizer, storage=store, existing="replace", checkpoint=folder, **options)
    assert store.read_bytes() == before
    assert same_states(state(model), values)
    with pytest.raises(error, match=match):
        memascend.offload(model, optimizer, storage=tmp_path / "new", checkpoint=folder, **options)
    assert not (tmp_path / "new").exists()


def test_a_start_whose_commit_fails_leaves_values_and_buffers(saved, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise memascend.StorageError("no space")

    model, optimizer = made(torch.bfloat16, torch.optim.AdamW, seed=5)
    before = state(model)
    monkeypatch.setattr(memascend.engine.Engine, "commit", fails)
    with pytest.raises(memascend.StorageError, match="no space"):
        memascend.offload(model, optimizer, storage=tmp_path / "new", checkpoint=saved[0])
    assert same_states(state(model), before)


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


def test_each_part_of_a_tensor_that_several_ranks_wrote_counts(saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    path = folder / "memascend" / "manifest.json"
    manifest, first = json.loads(path.read_bytes()), checksum_of(saved[1]["embed.weight"][0])
    parts = manifest["files"]["model.safetensors"]["tensors"]["embed.weight"] = [[0, first], [32, first]]
    path.write_bytes(checkpoints.render_manifest(manifest))
    with pytest.raises(CorruptionError, match=r"'embed.weight' in .* is damaged") as caught:
        checkpoints.Checkpoint(folder).verify()
    assert caught.value.nbytes == saved[1]["embed.weight"].nbytes - parts[1][0]


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
        ({"version": 3}, "version 3"),
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
