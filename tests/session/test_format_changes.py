"""Tests runs with state in fewer bits: opened or begun from with another format."""

import json

import pytest
import torch
from support.bits import same_bits, same_states
from support.chains import offloaded, train

import memascend

FORMATS = (None, "bf16", "8bit")
LOSSES = {
    ("fp32", "bf16"): "rounded from 32 bits to bfloat16",
    ("fp32", "8bit"): "rounded from 32 bits to 8 bits",
    ("bf16", "8bit"): "rounded from bfloat16 to 8 bits",
    ("8bit", "bf16"): "rounded from 8 bits to bfloat16",
    ("bf16", "fp32"): "nothing is lost",
    ("8bit", "fp32"): "nothing is lost",
}


def model(seed=0):
    torch.manual_seed(seed)
    # The transposed one is not row-major: blocks are counted as it lies.
    made = torch.nn.Sequential(torch.nn.Linear(70, 90), torch.nn.Tanh(), torch.nn.Linear(90, 70, bias=False))
    made[2].weight = torch.nn.Parameter(torch.randn(90, 70).mul_(0.1).t())
    return made.bfloat16()


def begin(path, state, values=0, **options):
    given = {} if state is None else {"state": state}
    return offloaded(path, model(values), host_memory="64MiB", **given, **options)


def states(trained, optimizer):
    return {name: optimizer.state_of(parameter) for name, parameter in trained.named_parameters()}


@pytest.mark.parametrize("before", FORMATS)
def test_a_resume_in_another_format_says_how_and_harms_nothing(tmp_path, before):
    trained, optimizer = begin(tmp_path / "store", before)
    train(trained, optimizer, range(2))
    left = states(trained, optimizer)
    optimizer.close()
    for after in FORMATS:
        if after == before:
            continue
        with pytest.raises(memascend.ConfigError) as refused:
            begin(tmp_path / "store", after, existing="resume")
        words = str(refused.value)
        assert f"state={before!r}" in words
        assert "checkpoint=" in words
    trained, optimizer = begin(tmp_path / "store", before, existing="resume")
    assert optimizer.steps == 2
    assert all(same_states(left[name], found) for name, found in states(trained, optimizer).items())
    optimizer.close()


@pytest.mark.parametrize(("state", "seed"), [("bf16", 5), ("8bit", None)])
def test_a_start_from_a_checkpoint_of_the_format_has_the_bits(tmp_path, state, seed):
    """The state machine begins from checkpoints of all formats; here the seed is the checkpoint's."""
    trained, optimizer = begin(tmp_path / "one", state, **({} if seed is None else {"seed": seed}))
    train(trained, optimizer, range(3))
    optimizer.save(tmp_path / "saved")
    expected = train(trained, optimizer, range(3, 6))
    left = states(trained, optimizer)
    optimizer.close()
    # A warning is an error here.
    trained, optimizer = begin(tmp_path / "two", state, 1, checkpoint=tmp_path / "saved")
    assert all(map(same_bits, expected, train(trained, optimizer, range(3, 6))))
    assert all(same_states(left[name], found) for name, found in states(trained, optimizer).items())
    optimizer.close()
    manifest = json.loads((tmp_path / "saved" / "memascend" / "manifest.json").read_text())
    assert (manifest["version"], manifest.get("seed")) == (2, seed)


@pytest.mark.parametrize("pair", LOSSES, ids=" to ".join)
def test_another_format_converts_and_says_what_is_lost(tmp_path, pair):
    one, other = (None if state == "fp32" else state for state in pair)
    trained, optimizer = begin(tmp_path / "one", one)
    train(trained, optimizer, range(3))
    optimizer.save(tmp_path / "saved")
    before = states(trained, optimizer)
    optimizer.close()
    with pytest.warns(UserWarning, match=LOSSES[pair]):
        trained, optimizer = begin(tmp_path / "two", other, 1, checkpoint=tmp_path / "saved")
    after = states(trained, optimizer)
    assert optimizer.steps == 3
    for name in before:
        assert same_bits(before[name]["master"], after[name]["master"])
        assert same_bits(before[name]["step"], after[name]["step"])
        for moment in ("exp_avg", "exp_avg_sq"):
            given, found = before[name][moment], after[name][moment]
            if "nothing" in LOSSES[pair]:
                assert same_bits(given, found)
            else:
                assert torch.allclose(given, found, rtol=0.02, atol=float(given.abs().max()) * 0.01), name
    train(trained, optimizer, range(3, 5))
    optimizer.close()


def test_a_master_that_is_given_up_is_said(tmp_path):
    trained, optimizer = begin(tmp_path / "one", "bf16")
    train(trained, optimizer, range(2))
    optimizer.save(tmp_path / "saved")
    optimizer.close()
    with pytest.warns(UserWarning, match="fp32 master weights are dropped"):
        trained, optimizer = begin(
            tmp_path / "two", "bf16", checkpoint=tmp_path / "saved", master_dtype=None, rounding="stochastic"
        )
    train(trained, optimizer, range(2, 4))
    optimizer.close()


def test_the_stored_seed_stands(tmp_path):
    begin(tmp_path / "store", "bf16")[1].close()
    with pytest.warns(UserWarning, match="the stored seed stands: 0, and not 9"):
        _, optimizer = begin(tmp_path / "store", "bf16", existing="resume", seed=9)
    optimizer.close()
