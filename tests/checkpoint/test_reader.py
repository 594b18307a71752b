"""Tests the files of a checkpoint: read by other tools, refused where damaged or of another run."""

import json
import random
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from support.bits import same_states
from support.chains import everything
from support.chains import values as state
from support.checkpoints import Mixed, made, trained

import memascend
from memascend.checkpoint import reader as checkpoints
from memascend.errors import ConfigError, CorruptionError
from memascend.storage import checksum_of


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
