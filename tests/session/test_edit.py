"""Tests the door for writing to weights: `optimizer.edit()` gives real values, and commits what was changed of them."""

from functools import partial

import pytest
import torch
from support.bits import same_bits
from support.chains import chain, loss_of, offloaded, step, train
from torch import nn

import memascend
from memascend import ConfigError, UsageError

FUSED = partial(torch.optim.AdamW, eps=1e-3, fused=True)


def made(folder, dtype=torch.float32, **options):
    options = {"host_memory": "64MiB", **options}
    return offloaded(folder / "run.store", chain(3, bias=True, dtype=dtype), FUSED, **options)


def in_memory():
    plain = chain(3, bias=True)
    return plain, FUSED(plain.parameters(), lr=1e-2)


def test_bits_that_did_not_change_keep_their_master_and_write_nothing(tmp_path):
    model, optimizer = made(tmp_path, torch.bfloat16, master_dtype=torch.float32)
    with optimizer:
        step(model, optimizer)
        before = {name: optimizer.state_of(p) for name, p in model.named_parameters()}
        written = optimizer.report().written
        with optimizer.edit(model.parameters()) as values:
            values[0].mul_(1)
        assert optimizer.report().written == written
        with optimizer.edit(model.parameters()) as values:
            values[2].fill_(0.5)
        for name, parameter in model.named_parameters():
            state = optimizer.state_of(parameter)
            same = [key for key in state if same_bits(state[key], before[name][key])]
            assert same == [key for key in state if name != "1.weight" or key != "master"]
        assert torch.equal(optimizer.state_of(model[1].weight)["master"], torch.full((32, 32), 0.5))


def test_names_of_one_parameter_are_one(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model, optimizer = memascend.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), storage=tmp_path / "s")
    with optimizer:
        with optimizer.edit([model[0].weight, model[1].weight]) as (one, other):
            assert one is other
            one.fill_(0.25)
        assert bool((model[1].weight == 0.25).all())


def edited(optimizer, parameters, write):
    with optimizer.edit(parameters) as values:
        write(values)


def test_nothing_is_committed_after_an_exception_or_while_a_step_is_staged(tmp_path):
    model, optimizer = made(tmp_path)
    weight = model[0].weight
    with optimizer:
        step(model, optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ZeroDivisionError):
            edited(optimizer, weight, lambda values: values.zero_() / (1 // 0))
        loss_of(model).backward()
        with pytest.raises(UsageError, match="a step is staged"):
            edited(optimizer, weight, torch.Tensor.zero_)
        optimizer.zero_grad()
        with pytest.raises(UsageError, match="a step is staged"):
            edited(optimizer, weight, lambda values: (values.zero_(), loss_of(model).backward()))
        optimizer.zero_grad()
        with pytest.raises(UsageError, match="tensors were replaced"):
            edited(optimizer, [weight], lambda values: values.__setitem__(0, torch.zeros(32, 32)))
        with pytest.raises(ConfigError, match="parameters of the offloaded model"):
            edited(optimizer, torch.zeros(2), torch.Tensor.zero_)
        for other in (model[0], None):
            with pytest.raises(ConfigError, match=r"parameters of the offloaded model.*module\.parameters\(\)"):
                edited(optimizer, other, torch.Tensor.zero_)
        assert all(map(same_bits, before, model.parameters()))
        step(model, optimizer)


def test_edits_of_one_unit_may_nest_and_their_memory_is_watched(tmp_path):
    model, optimizer = made(tmp_path)
    with optimizer:
        step(model, optimizer)
        with optimizer.edit(model[0].weight) as weight, optimizer.edit(model[0].bias) as bias:
            weight.fill_(2)
            bias.fill_(3)
        assert (model[0].weight == 2).all()
        assert (model[0].bias == 3).all()
        weight.fill_(5)
        with pytest.raises(UsageError, match=r"0\.weight.* was written to"):
            step(model, optimizer)
        optimizer.zero_grad()
        step(model, optimizer)


def test_a_state_dict_that_was_changed_is_loaded(tmp_path):
    model, optimizer = made(tmp_path)
    with optimizer:
        step(model, optimizer)
        state = model.state_dict()
        expected = {name: values * 0.5 for name, values in state.items()}
        for values in state.values():
            values.mul_(0.5)
        model.load_state_dict(state)
        assert all(torch.equal(values, model.state_dict()[name]) for name, values in expected.items())
        step(model, optimizer)


def test_a_step_within_an_edit_is_not_undone_by_it(tmp_path):
    model, optimizer = made(tmp_path)
    with optimizer:
        step(model, optimizer)
        # Values that were not written to are nobody's change.
        edited(optimizer, model[0].weight, lambda _: step(model, optimizer))
        with pytest.raises(UsageError, match=r"0\.weight.* within edit\(\)"):
            edited(optimizer, model[0].weight, lambda values: (values.zero_(), step(model, optimizer)))
        assert optimizer.steps == 3
        step(model, optimizer)
        plain, theirs = in_memory()
        train(plain, theirs, [1] * 4)
        assert all(map(same_bits, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_weight_that_was_edited_thaws_with_the_edited_values(tmp_path, dtype):
    model, optimizer = made(tmp_path, dtype, **({} if dtype == torch.float32 else {"master_dtype": None}))
    plain = chain(3, bias=True, dtype=dtype)
    theirs = FUSED(plain.parameters(), lr=1e-2)
    with optimizer:
        for index in range(4):
            for one, own in ((plain, theirs), (model, optimizer)):
                one[0].weight.requires_grad_(index != 1)
                step(one, own, index)
            if index == 1:
                with torch.no_grad(), optimizer.edit(model[0].weight) as values:
                    values.mul_(0.5)
                    plain[0].weight.mul_(0.5)
        assert all(map(same_bits, model.parameters(), plain.parameters()))
