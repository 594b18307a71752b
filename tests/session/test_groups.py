"""Tests what becomes of changes to an optimizer object: its groups' parameters, its hooks, its state, its step."""

import pytest
import torch
from support.bits import same_states
from support.chains import chain, step, values
from torch import nn

import memascend
from memascend import ConfigError, UsageError


def stack():
    return chain(4, bias=True)


def two_groups(model):
    return [{"params": list(model[:2].parameters()), "lr": 1e-2}, {"params": list(model[2:].parameters()), "lr": 1e-3}]


def moves(optimizer):
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())


def exchanges(optimizer):
    one, other = (group["params"] for group in optimizer.param_groups)
    one[0], other[0] = other[0], one[0]


def replaces(optimizer):
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]


def takes_out(optimizer):
    optimizer.param_groups.pop()


REFUSED = (
    r"param_groups has (lost the group .*put it back and call zero_grad"
    r"|other groups.*had 4, 4\).*put them back and call zero_grad.*offload\(\) anew)"
)


@pytest.mark.parametrize(
    ("change", "gradients"), [(moves, "fused"), (exchanges, "ssd"), (replaces, "ssd"), (takes_out, "fused")]
)
def test_groups_with_other_parameters_are_refused(tmp_path, change, gradients):
    model = stack()
    original = torch.optim.AdamW(two_groups(model))
    model, optimizer = memascend.offload(model, original, storage=tmp_path / "s", gradients=gradients)
    with optimizer:
        assert optimizer.param_groups is original.param_groups
        with pytest.raises(UsageError, match="before offload"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        step(model, optimizer)
        before = values(model)
        groups, members = optimizer.param_groups, [list(group["params"]) for group in optimizer.param_groups]
        kept = list(groups)
        change(optimizer)
        with pytest.raises(UsageError, match=REFUSED):
            step(model, optimizer)
        assert optimizer.steps == 1
        optimizer.param_groups = groups
        groups[:] = kept
        for group, params in zip(groups, members, strict=True):
            group["params"][:] = params
        optimizer.zero_grad()
        assert same_states(values(model), before)
        step(model, optimizer)
        assert optimizer.steps == 2


def test_hooks_of_steps_are_heard_once_a_step_whoever_has_them(tmp_path):
    model, heard = stack(), []
    original = torch.optim.AdamW(model.parameters())
    original.register_step_pre_hook(lambda *_: heard.append("before"))
    original.register_step_post_hook(lambda *_: heard.append("after"))
    model, optimizer = memascend.offload(model, original, storage=tmp_path / "s")
    assert not heard
    with optimizer:
        optimizer.register_step_post_hook(lambda *_: heard.append("ours"))
        later = original.register_step_pre_hook(lambda *_: heard.append("later"))
        step(model, optimizer)
        later.remove()
        step(model, optimizer)
    assert heard == ["before", "later", "after", "ours", "before", "after", "ours"]


def test_a_step_that_was_replaced_on_the_object_is_refused(tmp_path):
    model = stack()
    original = torch.optim.AdamW(model.parameters())
    # A scheduler replaces it, too, by one that goes on to the class's.
    torch.optim.lr_scheduler.StepLR(original, 1)
    taken = original.step

    def other(*_):
        raise AssertionError

    original.step = other
    with pytest.raises(ConfigError, match=r"step\(\) of this AdamW was replaced"):
        memascend.offload(model, original, storage=tmp_path / "s")
    assert type(model[0].weight) is nn.Parameter
    original.step = taken
    model, optimizer = memascend.offload(model, original, storage=tmp_path / "s")
    with optimizer:
        step(model, optimizer)


# --- groups of a stored run -------------------------------------------------------------------


def swapped(model):
    one, other = two_groups(model)
    return [{**one, "params": other["params"]}, {**other, "params": one["params"]}]


def with_a_moved_boundary(model):
    parameters = list(model.parameters())
    return [{"params": parameters[:3], "lr": 1e-2}, {"params": parameters[3:], "lr": 1e-3}]


def as_one(model):
    return [{"params": list(model.parameters())}]


MOVED = {
    swapped: r"0.bias was in group 0 and is in group 1; 0.weight was in group 0 .*; 1.bias .*; and so on",
    with_a_moved_boundary: r"1.bias was in group 0 and is in group 1\. Nothing was changed",
    as_one: r"2 parameter groups, (and the optimizer has 1 \(group 0: 8 parameters\); nothing was|the optimizer 1, so)",
}


@pytest.mark.parametrize(
    ("start", "groups"),
    [
        ("resume", swapped),
        ("open", with_a_moved_boundary),
        ("checkpoint", swapped),
        ("resume", as_one),
        ("checkpoint", as_one),
    ],
)
def test_stored_options_are_refused_for_groups_of_other_parameters(tmp_path, groups, start):
    model = stack()
    model, optimizer = memascend.offload(model, torch.optim.AdamW(two_groups(model)), storage=tmp_path / "s")
    step(model, optimizer)
    optimizer.save(tmp_path / "saved")
    if start != "open":
        optimizer.close()
    content = (tmp_path / "s").read_bytes()
    options = {"storage": tmp_path / "s", "existing": "resume"}
    if start == "checkpoint":
        options = {"storage": tmp_path / "other", "checkpoint": tmp_path / "saved"}
    model = stack()
    given = torch.optim.AdamW(groups(model))
    before, rates = values(model), [group["lr"] for group in given.param_groups]
    with pytest.raises(ConfigError, match=MOVED[groups]):
        memascend.offload(model, given, **options)
    assert [group["lr"] for group in given.param_groups] == rates
    assert same_states(values(model), before)
    assert (tmp_path / "s").read_bytes() == content
    assert not (tmp_path / "other").exists()
    optimizer.close()


def test_another_order_within_the_groups_is_taken(tmp_path):
    def turned(model):
        return [{**group, "params": group["params"][::-1]} for group in two_groups(model)]

    for steps, (groups, existing) in enumerate([(two_groups, "refuse"), (turned, "resume")]):
        model = stack()
        given = torch.optim.AdamW(groups(model))
        model, optimizer = memascend.offload(model, given, storage=tmp_path / "s", existing=existing)
        with optimizer:
            assert optimizer.steps == steps
            step(model, optimizer)
