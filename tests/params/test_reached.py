"""Tests weights that were reached between forwards: what is written, copied, loaded and refused."""

import copy

import pytest
import torch
from support.bits import same_bits
from support.reached import OPTIMIZERS, WIDTH, batch, one_step, stack, stored, taken
from torch import nn

import memascend
from memascend import UsageError


def test_a_swap_and_its_return_leave_masters_and_state(training):
    """What an evaluation with averaged weights does: nothing of it is written."""
    model, offloaded = training(dtype=torch.bfloat16, master_dtype=torch.float32)
    before = {name: offloaded.state_of(p) for name, p in model.named_parameters()}
    expected, written = model(batch(torch.bfloat16)).detach(), stored(offloaded)
    kept = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.data.copy_(torch.zeros_like(parameter))
    with torch.no_grad():
        assert not model(batch(torch.bfloat16)).any()
    for parameter, values in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(values)
    assert torch.equal(model(batch(torch.bfloat16)), expected)
    assert stored(offloaded) == written
    for name, parameter in model.named_parameters():
        state = offloaded.state_of(parameter)
        assert all(same_bits(state[key], before[name][key]) for key in state), name
    one_step(model, offloaded, torch.bfloat16)


def test_a_changed_value_is_its_new_master(training, tmp_path):
    model, offloaded = training(dtype=torch.bfloat16, master_dtype=torch.float32)
    changed, other = model[3].weight, model[4].weight
    before, moment = offloaded.state_of(other), offloaded.state_of(changed)["exp_avg"]
    changed.data.fill_(0.5)
    offloaded.close()
    again = stack(16, torch.bfloat16)
    again, offloaded = taken(
        again,
        OPTIMIZERS["adamw"](again.parameters()),
        tmp_path,
        existing="resume",
        master_dtype=torch.float32,
    )
    with offloaded:
        assert torch.equal(again[3].weight, torch.full((WIDTH, WIDTH), 0.5, dtype=torch.bfloat16))
        state = offloaded.state_of(again[3].weight)
        assert torch.equal(state["master"], torch.full((WIDTH, WIDTH), 0.5))
        assert same_bits(state["exp_avg"], moment)
        assert all(same_bits(offloaded.state_of(again[4].weight)[key], before[key]) for key in before)


def test_a_deep_copy_is_a_plain_model_with_files_of_its_own(training):
    model, offloaded = training(units=2)
    model[0].weight.data.mul_(0.5)
    copied = copy.deepcopy(model)
    part = copy.deepcopy(model[1])
    assert all(type(p) is nn.Parameter and p.requires_grad for p in copied.parameters())
    assert not any(copied[0]._forward_pre_hooks or module.__dict__.get("_memascend") for module in copied.modules())
    expected = [p.detach().clone() for p in model.parameters()]
    assert all(same_bits(one, other) for one, other in zip(copied.parameters(), expected, strict=True))
    assert same_bits(part.weight, expected[2])
    assert torch.equal(copied(batch()), model(batch()))
    copied[0].weight.data.zero_()
    one_step(model, offloaded, torch.float32)
    assert model[0].weight.any()
    one_step(copied, torch.optim.SGD(copied.parameters(), lr=0.1), torch.float32)
    assert all(same_bits(one, other) for one, other in zip(part.parameters(), expected[2:], strict=True))
    # Its own hooks are there again.
    with pytest.raises(UsageError):
        model.to(torch.float64)


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo):
        copied = type(self)(self.in_features, self.out_features)
        copied.load_state_dict(copy.deepcopy(self.state_dict(), memo))
        copied.copies = getattr(self, "copies", 0) + 1
        return copied


def test_a_module_that_copies_itself_does_so(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), CopiesItself(WIDTH, WIDTH))
    model, optimizer = memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=tmp_path)
    with optimizer:
        copied = copy.deepcopy(model)
        assert copied[1].copies == 1
        assert not copied[1]._forward_pre_hooks
        assert torch.equal(copied(batch()), model(batch()))


def test_a_state_dict_that_was_loaded_stays_the_models_memory(training):
    """As in memory, where loading what is there already changes nothing, and its tensors are still the parameters'."""
    model, offloaded = training(units=2)
    state = model.state_dict()
    model.load_state_dict(state)
    with torch.no_grad():
        for tensor in state.values():
            tensor.mul_(0.5)
    assert all(same_bits(p.detach(), tensor) for p, tensor in zip(model.parameters(), state.values(), strict=True))
    one_step(model, offloaded, torch.float32)


def test_a_staged_step_refuses_writes(training):
    """An update has begun; where gradients wait, writes count: `test_written_before_step.py`."""
    model, offloaded = training(gradients="fused")
    weight = model[1].weight
    loss = model(batch()).square().mean()
    loss.backward()
    expected = weight.detach().clone()
    with torch.no_grad(), pytest.raises(UsageError, match="staged"):
        weight.zero_()
    with pytest.raises(UsageError, match="staged"):
        weight.data = torch.zeros_like(expected)
    assert torch.equal(weight.data, expected)
    weight.data.zero_()
    with pytest.raises(UsageError, match=r"1\.weight"):
        offloaded.step()
    offloaded.zero_grad()
    assert torch.equal(weight, expected)
    one_step(model, offloaded, torch.float32)
