"""Tests runs with state in fewer bits: opened or begun from with another format."""

import json

import pytest
import torch
from support.bits import same_bits, same_states
from support.chains import everything, offloaded, train

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


@pytest.mark.parametrize("before", FORMATS)
def test_a_resume_in_another_format_says_how_and_harms_nothing(tmp_path, before):
    trained, optimizer = begin(tmp_path / "store", before)
    train(trained, optimizer, range(2))
    left = everything(trained, optimizer)
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
    with optimizer:
        assert optimizer.steps == 2
        assert same_states(everything(trained, optimizer), left)


def test_a_start_from_a_checkpoint_has_its_seed(tmp_path):
    """The state machine begins from checkpoints of all formats, each time with their seed."""
    trained, optimizer = begin(tmp_path / "one", "bf16", seed=5)
    train(trained, optimizer, range(3))
    optimizer.save(tmp_path / "saved")
    expected = train(trained, optimizer, range(3, 6))
    left = everything(trained, optimizer)
    optimizer.close()
    # A warning is an error here.
    trained, optimizer = begin(tmp_path / "two", "bf16", 1, checkpoint=tmp_path / "saved")
    assert all(map(same_bits, expected, train(trained, optimizer, range(3, 6))))
    assert same_states(everything(trained, optimizer), left)
    optimizer.close()
    manifest = json.loads((tmp_path / "saved" / "memascend" / "manifest.json").read_text())
    assert (manifest["version"], manifest["seed"]) == (2, 5)


@pytest.mark.parametrize("pair", LOSSES, ids=" to ".join)
def test_another_format_converts_and_says_what_is_lost(tmp_path, pair):
    one, other = (None if state == "fp32" else state for state in pair)
    trained, optimizer = begin(tmp_path / "one", one)
    train(trained, optimizer, range(3))
    optimizer.save(tmp_path / "saved")
    before = everything(trained, optimizer)
    optimizer.close()
    with pytest.warns(UserWarning, match=LOSSES[pair]):
        trained, optimizer = begin(tmp_path / "two", other, 1, checkpoint=tmp_path / "saved")
    after = everything(trained, optimizer)
    assert optimizer.steps == 3
    for name, given in before.items():
        if "exp_avg" in name and "nothing" not in LOSSES[pair]:
            assert torch.allclose(given, after[name], rtol=0.02, atol=float(given.abs().max()) * 0.01), name
        else:
            assert same_bits(given, after[name]), name
    train(trained, optimizer, range(3, 5))
    optimizer.close()


def test_a_master_that_is_given_up_and_a_seed_that_stands_are_said(tmp_path):
    trained, optimizer = begin(tmp_path / "one", "bf16")
    train(trained, optimizer, range(2))
    optimizer.save(tmp_path / "saved")
    optimizer.close()
    options = {"checkpoint": tmp_path / "saved", "master_dtype": None, "rounding": "stochastic"}
    with pytest.warns(UserWarning, match="fp32 master weights are dropped"):
        trained, optimizer = begin(tmp_path / "two", "bf16", **options)
    with optimizer:
        train(trained, optimizer, range(2, 4))
    with pytest.warns(UserWarning, match="the stored seed stands: 0, and not 9"):
        begin(tmp_path / "one", "bf16", existing="resume", seed=9)[1].close()
