"""Compares the loss scale with torch's own scaler, step by step; tests that the scale's state survives JSON."""

import json
import math
import random

import pytest
import torch

from memascend.errors import ConfigError
from memascend.grads.loss_scale import GROWTH_STEPS, LossScale


def torch_sequence(overflows, first=65536.0):
    """Yields the scale of torch's scaler after each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=first)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflowed in overflows:
        scaler.scale(torch.ones(1))
        parameter.grad = torch.tensor([math.inf if overflowed else 1.0])
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_scale()


def our_sequence(scale, overflows):
    for overflowed in overflows:
        scale.update(overflowed)
        yield scale.scale


def test_dynamic_loss_scale_equals_torch_grad_scaler_after_each_step():
    dice = random.Random(0)
    overflows = [dice.random() < 0.001 for _ in range(2 * GROWTH_STEPS + 500)]
    assert list(our_sequence(LossScale("dynamic"), overflows)) == list(torch_sequence(overflows))
    assert any(overflows)


def test_dynamic_loss_scale_equals_torch_at_zero_and_at_its_maximum():
    overflows = [True] * 170
    ours = list(our_sequence(LossScale("dynamic"), overflows))
    assert ours == list(torch_sequence(overflows))
    assert ours[-1] == 0.0

    # The scale does not grow to infinity, but the count of good steps starts again at 0.
    huge = LossScale("dynamic")
    huge.load({"mode": "dynamic", "scale": 2.0**127, "good_steps": GROWTH_STEPS - 1})
    huge.update(False)
    assert huge.state() == {"mode": "dynamic", "scale": 2.0**127, "good_steps": 0}
    theirs = torch_sequence([False] * (GROWTH_STEPS + 1), first=2.0**127)
    assert set(theirs) == {2.0**127}


@pytest.mark.parametrize("setting", [None, 1024, 0.1])
def test_fixed_and_disabled_loss_scale_never_change(setting):
    scale = LossScale(setting)
    before = scale.scale
    for overflowed in [True, False, True] + [False] * (2 * GROWTH_STEPS):
        scale.update(overflowed)
    assert scale.scale == before
    assert scale.enabled is (setting is not None)
    assert before == (1.0 if setting is None else torch.tensor(setting, dtype=torch.float32).item())


def test_inverse_of_the_scale_equals_torch_reciprocal():
    for value in [65536.0, 3.0, 0.1, 1e-30, 1e-44]:
        scale = LossScale(value)
        expected = torch.tensor(value, dtype=torch.float32).double().reciprocal().float().item()
        assert scale.inverse == expected


def test_state_survives_json():
    scale = LossScale("dynamic")
    for overflowed in [True] + [False] * 1500:
        scale.update(overflowed)
    other = LossScale("dynamic")
    other.load(json.loads(json.dumps(scale.state())))
    rest = [False] * 600
    assert list(our_sequence(other, rest)) == list(our_sequence(scale, rest))
    assert other.scale == 65536.0
    # `load` takes the mode from the state.
    scale.load(LossScale(8.0).state())
    assert (scale.mode, scale.scale) == ("fixed", 8.0)


@pytest.mark.parametrize("setting", [0, -1.0, math.inf, math.nan, 1e39, 1e-60, 10**400, True, "static", [1]])
def test_loss_scale_rejects_invalid_settings(setting):
    with pytest.raises(ConfigError, match="loss_scale"):
        LossScale(setting)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"mode": "wild", "scale": 1.0, "good_steps": 0},
        {"mode": "dynamic", "scale": -1.0, "good_steps": 0},
        {"mode": "dynamic", "scale": None, "good_steps": 0},
        {"mode": "fixed", "scale": 0, "good_steps": 0},
        {"mode": "dynamic", "scale": 1.0, "good_steps": GROWTH_STEPS},
        {"mode": "dynamic", "scale": 1.0, "good_steps": 1.5},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(state):
    scale = LossScale("dynamic")
    before = scale.state()
    with pytest.raises(ConfigError):
        scale.load(state)
    assert scale.state() == before
