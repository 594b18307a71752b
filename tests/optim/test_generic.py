"""Tests single updates: what they are made from, what they refuse, where they run."""

import pytest
import torch
from optim.conftest import layout_of, update_of
from support.bits import same_bits

from memascend.errors import ConfigError, UsageError
from memascend.optim import generic
from memascend.optim.rules import Arithmetic, EngineRule
from memascend.optim.state import StateFormats


def test_state_without_its_optimizers_options_is_kept():
    parameter = torch.nn.Parameter(torch.randn(30))
    optimizer = torch.optim.Adam([parameter], amsgrad=True)
    parameter.grad = torch.randn(30)
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = False
    assert "max_exp_avg_sq" in layout_of(optimizer, parameter).tensors
    optimizer.state[parameter].pop("max_exp_avg_sq")
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ConfigError, match="no 'max_exp_avg_sq'"):
        generic.import_state(optimizer, parameter, layout_of(optimizer, parameter))


def test_an_options_change_that_moves_the_state_is_refused(streamed_part):
    parameter = torch.nn.Parameter(torch.randn(30))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    group = optimizer.param_groups[0]
    streamed = streamed_part(optimizer, parameter, None)
    group["momentum"] = 0
    with pytest.raises(UsageError, match="momentum"):
        streamed.step(optimizer, group, torch.ones(30))
    group["momentum"] = 0.9
    streamed.step(optimizer, group, torch.ones(30))
    group["momentum"] = 0
    streamed.step(optimizer, group, torch.ones(30))
    assert torch.equal(streamed.state["momentum_buffer"], torch.ones(30))
    plain = torch.optim.SGD([parameter], lr=0.1)
    streamed = streamed_part(plain, parameter, None)
    streamed.step(plain, plain.param_groups[0], torch.ones(30))
    plain.param_groups[0]["momentum"] = 0.9
    with pytest.raises(UsageError, match="momentum_buffer"):
        streamed.step(plain, plain.param_groups[0], torch.ones(30))


def test_an_update_has_the_options_of_the_moment_when_it_was_made(streamed_part):
    lr = torch.tensor(0.5)
    parameter = torch.nn.Parameter(torch.zeros(5000))
    optimizer = torch.optim.SGD([parameter], lr=lr)
    streamed = streamed_part(optimizer, parameter, None)
    function = update_of(optimizer, optimizer.param_groups[0], streamed.layout, first=True)
    lr.fill_(100)
    optimizer.param_groups[0]["weight_decay"] = 9
    streamed.apply(function, torch.ones(5000), whole=False)
    assert torch.equal(streamed.values, torch.full((5000,), -0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_round_to_the_gradients_type_and_the_scale_does_not(streamed_part, dtype):
    parameter = torch.nn.Parameter(torch.randn(5000).to(dtype))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    streamed = streamed_part(optimizer, parameter, torch.float32)
    gradient = torch.randn(5000).to(dtype)
    factors = (0.3, 1.7)
    scaled = gradient.clone()
    for factor in factors:
        scaled.mul_(factor)
    wanted = (parameter.detach().float() - scaled.float() * 0.77).to(dtype)
    streamed.step(optimizer, optimizer.param_groups[0], gradient, factors=factors, grad_scale=0.77)
    assert same_bits(streamed.values, wanted)


def test_the_engines_own_numbers_are_for_adam_and_adamw_alone():
    def options(kind, dtype=torch.bfloat16, master_dtype=torch.float32, **given):
        parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = kind([parameter], **given)
        rule = Arithmetic(optimizer, master_dtype, frozenset(), StateFormats(), {}).of(parameter)
        return rule.options() if isinstance(rule, EngineRule) else None

    class Mine(torch.optim.AdamW):
        pass

    adamw, adam = torch.optim.AdamW, torch.optim.Adam
    given = {"lr": 0.5, "betas": (0.5, 0.75), "decoupled": True, "maximize": False}
    assert options(adamw, lr=torch.tensor(0.5), betas=(0.5, 0.75)).items() >= given.items()
    assert options(adam, dtype=torch.float32, master_dtype=None, maximize=True)["maximize"] is True
    assert options(adam)["decoupled"] is False
    assert options(adam, decoupled_weight_decay=True)["decoupled"] is True
    assert options(adamw, dtype=torch.float16, master_dtype=None) is None
    assert options(adamw, dtype=torch.float64) is None
    assert options(adamw, amsgrad=True) is None
    assert options(Mine) is None
    assert options(torch.optim.NAdam) is None


def test_a_whole_parameter_costs_what_is_said():
    parameter = torch.nn.Parameter(torch.zeros(100, 10, dtype=torch.bfloat16))
    optimizer = torch.optim.Adafactor([parameter])
    kept = layout_of(optimizer, parameter)
    # The values and the gradient, the master and the gradient in its type, a factor for each row and column, the step.
    assert kept.whole_bytes == 1000 * (2 + 2 + 4 + 4) + 4 * (100 + 10) + 4
    assert kept.stored_bytes == kept.whole_bytes - 4000
    assert layout_of(optimizer, parameter, None).whole_bytes == 1000 * (2 + 2) + 2 * (100 + 10) + 4
