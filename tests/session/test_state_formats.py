"""Tests runs with state in fewer bits outside of the usual loop: damage, other values, state dicts."""

import pytest
import torch
from support.stores import damage

import memascend
from memascend import engine

STATES = ("bf16", "8bit")
KINDS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def begin(path, state, kind="adamw", **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(70, 90), torch.nn.Tanh(), torch.nn.Linear(90, 70, bias=False)
    ).bfloat16()
    more = {"momentum": 0.9} if kind == "sgd" else {}
    optimizer = KINDS[kind](model.parameters(), lr=1e-2, **more)
    return memascend.offload(model, optimizer, storage=path, state=state, host_memory="64MiB", **options)


def train(model, optimizer, steps=2):
    for step in range(steps):
        inputs = torch.randn(5, 70, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("state", "of"), [("bf16", "exp_avg_sq"), ("8bit", "exp_avg"), ("8bit", "exp_avg_absmax"),
                                           ("8bit", "rounded_up")])  # fmt: skip
def test_a_flipped_bit_is_an_error_that_names_the_parameter(tmp_path, state, of):
    model, optimizer = begin(tmp_path / "store", state)
    train(model, optimizer)
    optimizer.close()
    with engine.Store.open(tmp_path / "store") as store:
        tensor = store.read("0.weight")[1][of]
    damage(tmp_path / "store", tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()[:64], 5)
    with pytest.raises(memascend.CorruptionError, match=r"0\.weight"):
        shown(tmp_path / "store", state)


def shown(path, state):
    """What is held is read when the store is opened, all else when it is needed."""
    model, optimizer = begin(path, state, existing="resume")
    with optimizer:
        return optimizer.state_of(model[0].weight)


@pytest.mark.parametrize("state", STATES)
def test_state_is_shown_in_float32(tmp_path, state):
    model, optimizer = begin(tmp_path / "store", state)
    train(model, optimizer)
    states = [optimizer.state_of(parameter) for parameter in model.parameters()]
    assert {tensor.dtype for one in states for tensor in one.values()} == {torch.float32}
    assert all(one.keys() == {"step", "exp_avg", "exp_avg_sq", "master"} for one in states)
    assert all(float(one["exp_avg_sq"].min()) >= 0 for one in states)
    optimizer.close()


def test_a_store_says_its_formats(tmp_path):
    model, optimizer = begin(tmp_path / "store", "8bit")
    train(model, optimizer, 1)
    optimizer.close()
    with engine.Store.open(tmp_path / "store") as store:
        formats = {entry["name"]: entry["format"] for entry in store.entries()}
    assert formats["0.weight"] == formats["2.weight"] == "compact 8bit"
    assert formats["0.bias"] in ("", "compact")
