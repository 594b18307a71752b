"""Tests calls that replace, move or copy an offloaded parameter: prune, parametrize, normalise, tie, fuse, cast."""

import copy

import pytest
import torch
from support.bits import same_bits, same_states
from support.chains import WIDTH, batch, chain, step, values
from torch import nn
from torch.ao.quantization import fuse_modules
from torch.nn.utils import parametrizations, parametrize, prune

from memascend import MemascendError, UsageError, materialized

WAYS = {
    "orthogonal": lambda model: parametrizations.orthogonal(model[0]),
    "old spectral norm": lambda model: nn.utils.spectral_norm(model[0]),
    "weight norm": lambda model: parametrizations.weight_norm(model[0]),
    "unsafe parametrization": lambda model: parametrize.register_parametrization(
        model[0], "weight", nn.Identity(), unsafe=True
    ),
    "prune": lambda model: prune.l1_unstructured(model[0], "weight", 0.5),
    "prune all": lambda model: prune.global_unstructured(
        [(model[0], "weight")], pruning_method=prune.L1Unstructured, amount=0.3
    ),
    "tie": lambda model: setattr(model[1], "weight", model[0].weight),
    "old weight norm": lambda model: nn.utils.weight_norm(model[0]),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("way", WAYS)
def test_prune_tie_and_parametrize_are_rejected_and_change_nothing(training, way):
    model, offloaded = training(units=2)
    before = values(model)
    with pytest.raises(MemascendError, match=r"0\.weight.*(before offload\(\)|and call offload\(\) on it)"):
        WAYS[way](model)
    assert same_states(values(model), before)
    step(model, offloaded)
    assert offloaded.steps == 2


def test_forward_rejects_a_deleted_parameter_until_it_is_restored(training):
    model, offloaded = training(units=2)
    weight = model[0].weight
    del model[0].weight
    with pytest.raises(UsageError, match="deleted, replaced or tied"):
        model[0](batch())
    model[0].weight = weight
    # A module outside of the model may use the parameter.
    head = nn.Linear(WIDTH, WIDTH)
    head.weight = weight
    assert same_bits(head(batch()), nn.functional.linear(batch(), weight, head.bias))
    step(model, offloaded)


def test_weight_pruned_within_materialized_trains_and_resumes(training, taken):
    model, offloaded = training(units=2)
    with materialized(model, modify=True):
        prune.l1_unstructured(model[0], "weight", 0.5)
        prune.remove(model[0], "weight")
        expected = model[0].weight.detach().clone()
    assert int((expected == 0).sum()) == expected.numel() // 2
    assert same_bits(model[0].weight, expected)
    step(model, offloaded)
    offloaded.close()
    taken(chain(2, bias=True), existing="resume")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_inplace_fuse_modules_is_rejected_and_changes_nothing(taken):
    torch.manual_seed(0)
    model, images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()), torch.ones(2, 3, 8, 8)
    model, offloaded = taken(model, host_memory=None)
    before, plain = values(model), copy.deepcopy(model)
    with torch.no_grad():
        fused = fuse_modules(model.eval(), [["0", "1"]])
        assert same_bits(fused(images), fuse_modules(plain.eval(), [["0", "1"]])(images))
    with pytest.raises(UsageError, match=r"'0', a Conv2d, .*fuse modules before offload"):
        fuse_modules(model, [["0", "1"]], inplace=True)
    assert model[0]._forward_pre_hooks
    assert same_states(values(model), before)
    model.train()(images).square().mean().backward()
    offloaded.step()


def test_module_with_the_hooks_of_another_module_is_rejected(training):
    model, _ = training(units=2)
    other = nn.Linear(WIDTH, WIDTH)
    for hook in model[0]._forward_pre_hooks.values():
        other.register_forward_pre_hook(hook)
    with pytest.raises(UsageError, match="a Linear has the hooks"):
        other(batch())


@pytest.mark.parametrize("cast", [torch.Tensor.half, torch.Tensor.double, lambda p: p.to(torch.bfloat16)])
def test_cast_weight_has_the_bits_and_gradient_norm_of_torch(training, cast):
    model, offloaded = training(units=2)
    plain = model[0].weight.detach().clone().requires_grad_()
    assert same_bits(cast(model[0].weight), cast(plain))
    (cast(model[0].weight).square().sum() + model(batch()).sum() * 0).backward()
    cast(plain).square().sum().backward()
    offloaded.step()
    # All other gradients are zero, so the norm of all gradients is the norm of the weight's gradient.
    assert offloaded.grad_norm == pytest.approx(float(plain.grad.norm()), rel=1e-6)


COPIES = {
    "copy": lambda p: p.to(copy=True),
    "dtype": lambda p: p.to(p.dtype, copy=True),
    "by place": lambda p: p.to(p.dtype, False, True),
    "device by place": lambda p: p.to("cpu", p.dtype, False, True),
    "like another by place": lambda p: p.to(torch.zeros(1), False, True),
    "format": lambda p: p.view(4, 8, 8, 4).to(memory_format=torch.channels_last, copy=True),
}


def test_write_to_an_explicit_copy_does_not_change_the_weight(training):
    model, offloaded = training(units=2)
    weight = model[0].weight
    before = weight.detach().clone()
    for way, take in COPIES.items():
        with torch.no_grad():
            copied = take(weight)
            assert same_bits(copied.reshape(-1), before.reshape(-1)), way
            copied.zero_()
        assert same_bits(weight, before), way
    step(model, offloaded)


def test_a_cast_that_changes_nothing_is_the_parameter(taken):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3)).to(memory_format=torch.channels_last)
    weight = taken(model)[0][0].weight
    assert weight.to(torch.float32) is weight.to("cpu") is weight.type(torch.float32) is weight
    assert weight.float(memory_format=torch.preserve_format) is weight.to(memory_format=torch.channels_last) is weight
    copied = weight.to(memory_format=torch.contiguous_format)
    assert copied is not weight
    assert copied.is_contiguous()
    assert same_bits(copied, weight.contiguous())
