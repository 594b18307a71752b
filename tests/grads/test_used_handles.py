"""Tests handles of gradients that an update has used already."""

import copy
import math

import pytest
import torch
from support.gradient_handles import DTYPES, gradient, handle_of
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from memascend.errors import UsageError

pytestmark = pytest.mark.usefixtures("process_hooks")


def fused_of(tensor):
    return handle_of(tensor, fused=True)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_used_gradient_answers_its_norm_and_clipping_that_changes_nothing(dtype, foreach):
    values = [gradient((64,), dtype, seed) for seed in range(3)]
    parameters = [torch.nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = fused_of(value)
    norm = clip_grad_norm_(parameters, math.inf, foreach=foreach)
    exact = torch.linalg.vector_norm(torch.stack([value.double().norm() for value in values]))
    assert norm.dtype == dtype
    torch.testing.assert_close(norm.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)
    clip_grad_value_(parameters, math.inf, foreach=foreach)
    with pytest.raises(UsageError, match=r"max_grad_norm= to offload\(\) \(and set the Trainer's to 0\)"):
        clip_grad_norm_(parameters, 1e-3, foreach=foreach)
    with pytest.raises(UsageError, match="gradients='ssd'"):
        clip_grad_norm_(parameters, math.inf, 1.0, foreach=foreach)
    assert parameters[0].grad.gradient.operations == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: g.mul_(0.5), "max_grad_norm="),
        (lambda g: g.mul_(math.nan), "max_grad_norm="),
        (lambda g: g.mul_(torch.tensor(0.5)), "max_grad_norm="),
        (lambda g: g.clamp_(-1, 1), "max_grad_norm="),
        (lambda g: g.copy_(torch.ones(3)), "gradients='ssd'"),
        (lambda g: g.mul_(torch.ones(3)), "gradients='ssd'"),
        (lambda g: g.add_(torch.ones(3)), r"accumulation_steps=.*gradients='ssd'"),
        (lambda g: g.zero_(), r"set_to_none=False.*gradients='ssd'"),
        (lambda g: torch._foreach_zero_([g]), r"set_to_none=False.*gradients='ssd'"),
        (lambda g: g.clone(), "gradients='ssd'"),
        (lambda g: g + 1, "gradients='ssd'"),
        (lambda g: g.tolist(), "gradients='ssd'"),
        (copy.deepcopy, "gradients='ssd'"),
        (lambda g: g.norm(1), "gradients='ssd'"),
        (lambda g: torch.linalg.vector_norm(g, 2, dim=0), "gradients='ssd'"),
        (lambda g: torch.zeros(3).copy_(g), "gradients='ssd'"),
        (
            lambda g: torch._amp_foreach_non_finite_check_and_unscale_([g], torch.zeros(1), torch.ones(1)),
            r"loss_scale=.*gradients='ssd'",
        ),
    ],
)
def test_a_used_gradient_refuses_what_it_cannot_do(call, words):
    handle = fused_of(torch.ones(3))
    with pytest.raises(UsageError, match=words):
        call(handle)
    assert handle.backing.seen
    assert handle.gradient.operations == []


def test_a_module_with_used_gradients_goes_to_where_it_is():
    """Lightning does so when training has ended: each gradient's `.data` becomes that gradient."""
    module = torch.nn.Linear(3, 3)
    for parameter in module.parameters():
        parameter.grad = fused_of(torch.ones_like(parameter))
    kept = module.weight.grad
    assert module.cpu() is module
    assert module.weight.grad is kept
    assert kept.gradient.operations == []


def test_a_second_backward_on_a_used_gradient_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = fused_of(torch.ones(3))
    with pytest.raises(UsageError, match=r"accumulation_steps=.*gradients='ssd'"):
        parameter.sum().backward()


def test_a_used_gradient_can_be_printed_and_measured():
    handle = fused_of(torch.tensor([3.0, 4.0]))
    assert "already used" in repr(handle)
    assert handle.norm().item() == 5.0
    assert torch.linalg.vector_norm(handle, 2, dtype=torch.float64).dtype == torch.float64
    assert torch._foreach_norm([handle], 2, torch.float64)[0].dtype == torch.float64
    assert torch.zeros_like(handle).tolist() == [0.0, 0.0]


def test_a_gradient_may_become_used_later():
    handle = handle_of(torch.ones(3))
    handle.add_(torch.ones(3))
    handle.backing.fused = True
    assert handle.norm().item() == pytest.approx(math.sqrt(12))
    with pytest.raises(UsageError):
        handle.add_(torch.ones(3))
