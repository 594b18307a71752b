"""Tests the groups, hooks, `step`, `state` and state dicts of an optimizer, and changes of them by user code."""

from functools import partial

import pytest
import torch
from support.bits import files, same_states
from support.chains import chain, everything, offloaded, step, train, values
from torch import nn

import memascend
from memascend import ConfigError, UsageError


def two_groups(model):
    return [{"params": list(model[:2].parameters()), "lr": 1e-2}, {"params": list(model[2:].parameters()), "lr": 1e-3}]


def exchanges(optimizer):
    one, other = (group["params"] for group in optimizer.param_groups)
    one[0], other[0] = other[0], one[0]


REFUSED = (
    r"(was removed from optimizer\.param_groups.*add it again and call zero_grad"
    r"|groups in optimizer\.param_groups.*had 4, 4\).*undo the change and call zero_grad.*offload\(\) with a new)"
)


@pytest.mark.parametrize(
    ("change", "gradients"),
    [
        (lambda one: one.param_groups[1]["params"].append(one.param_groups[0]["params"].pop()), "fused"),
        (exchanges, "ssd"),
        (lambda one: setattr(one, "param_groups", [dict(group) for group in one.param_groups]), "ssd"),
        (lambda one: one.param_groups.pop(), "fused"),
    ],
)
def test_step_rejects_parameter_groups_changed_after_offload(tmp_path, change, gradients):
    model = chain(4, bias=True)
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


def test_step_hooks_of_both_optimizers_run_once_per_step(tmp_path):
    model, received = chain(4, bias=True), []
    original = torch.optim.AdamW(model.parameters())
    original.register_step_pre_hook(lambda *_: received.append("before"))
    original.register_step_post_hook(lambda *_: received.append("after"))
    model, optimizer = memascend.offload(model, original, storage=tmp_path / "s")
    assert not received
    with optimizer:
        optimizer.register_step_post_hook(lambda *_: received.append("ours"))
        later = original.register_step_pre_hook(lambda *_: received.append("later"))
        step(model, optimizer)
        later.remove()
        step(model, optimizer)
    assert received == ["before", "later", "after", "ours", "before", "after", "ours"]


def test_offload_rejects_an_optimizer_object_whose_step_was_replaced(tmp_path):
    model = chain(4, bias=True)
    original = torch.optim.AdamW(model.parameters())
    # A scheduler also replaces `step`, but by a wrapper that calls the `step` of the class. offload() accepts this
    # wrapper.
    torch.optim.lr_scheduler.StepLR(original, 1)
    taken = original.step

    def other(*_):
        raise AssertionError

    original.step = other
    with pytest.raises(ConfigError, match=r"step\(\) of this AdamW object was replaced"):
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
    as_one: r"2 parameter groups, but the optimizer has 1( \(group 0: 8 parameters\)\. Nothing|\. Make)",
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
def test_resume_and_checkpoint_reject_groups_of_other_parameters(tmp_path, groups, start):
    model = chain(4, bias=True)
    model, optimizer = memascend.offload(model, torch.optim.AdamW(two_groups(model)), storage=tmp_path / "s")
    step(model, optimizer)
    optimizer.save(tmp_path / "saved")
    if start != "open":
        optimizer.close()
    content = (tmp_path / "s").read_bytes()
    options = {"storage": tmp_path / "s", "existing": "resume"}
    if start == "checkpoint":
        options = {"storage": tmp_path / "other", "checkpoint": tmp_path / "saved"}
    model = chain(4, bias=True)
    given = torch.optim.AdamW(groups(model))
    before, rates = values(model), [group["lr"] for group in given.param_groups]
    with pytest.raises(ConfigError, match=MOVED[groups]):
        memascend.offload(model, given, **options)
    assert [group["lr"] for group in given.param_groups] == rates
    assert same_states(values(model), before)
    assert (tmp_path / "s").read_bytes() == content
    assert not (tmp_path / "other").exists()
    optimizer.close()


def test_resume_accepts_another_parameter_order_within_groups(tmp_path):
    def turned(model):
        return [{**group, "params": group["params"][::-1]} for group in two_groups(model)]

    for steps, (groups, existing) in enumerate([(two_groups, "refuse"), (turned, "resume")]):
        model = chain(4, bias=True)
        given = torch.optim.AdamW(groups(model))
        model, optimizer = memascend.offload(model, given, storage=tmp_path / "s", existing=existing)
        with optimizer:
            assert optimizer.steps == steps
            step(model, optimizer)


# --- `optimizer.state` has no items; a state dict names a store and a step --------------------------


def begun(folder, steps=1, **options):
    model = chain(bias=True)
    original = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = memascend.offload(model, original, storage=folder / "run.store", **options)
    train(model, optimizer, range(steps))
    return model, optimizer, original


@pytest.mark.parametrize("whose", ["returned", "original"])
def test_optimizer_state_is_empty_and_its_errors_name_state_of(tmp_path, whose):
    model, optimizer, original = begun(tmp_path)
    with optimizer:
        state = (optimizer if whose == "returned" else original).state
        weight = model[0].weight
        assert not state
        assert len(state) == 0 == len(list(state.items()) + list(state.values()) + list(state.keys()))
        assert "weight" not in state
        # Lightning moves the optimizer state to a device in a loop like this. The loop must not raise.
        for parameter, found in state.items():
            state[parameter] = {name: value.to("cpu") for name, value in found.items()}
        of_weight = ("__getitem__", "get", "__contains__", "pop", "__delitem__")
        for access in (*(partial(getattr(state, name), weight) for name in of_weight), state.popitem, state.clear):
            with pytest.raises(UsageError, match=r"state_of\(parameter\)"):
                access()
        for write in (partial(state.__setitem__, weight, {}), partial(setattr, optimizer, "state", {})):
            with pytest.raises(UsageError, match=r"on storage.*checkpoint="):
                write()
        optimizer.state = optimizer.state
        step(model, optimizer)
    with pytest.raises(UsageError, match="has been closed"):
        state[weight]


def test_state_dict_calls_of_the_original_optimizer_raise(tmp_path):
    _, optimizer, original = begun(tmp_path)
    with optimizer:
        for ask in (original.state_dict, lambda: original.load_state_dict(optimizer.state_dict())):
            with pytest.raises(UsageError, match=r"offload\(\) returned"):
                ask()
    assert not original.state


def test_load_state_dict_of_the_current_step_sets_the_options(tmp_path):
    model, optimizer, original = begun(tmp_path)
    group = optimizer.param_groups[0]
    state = optimizer.state_dict()
    assert state.keys() == {"state", "param_groups", "memascend"}
    assert state["state"] == {}
    assert state["memascend"] == {"store": state["memascend"]["store"], "step": 1}
    state["param_groups"][0]["lr"] = 0.5
    before = everything(model, optimizer)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0] is group is original.param_groups[0]
    assert group["lr"] == 0.5
    assert same_states(everything(model, optimizer), before)
    group["lr"] = 1e-2
    optimizer.close()
    with pytest.raises(UsageError, match="has been closed"):
        optimizer.load_state_dict(state)
    # Resumes the run and reads the state dict from a file, as the next process of the run does.
    torch.save(state, tmp_path / "state.pt")
    model, optimizer, _ = begun(tmp_path, 0, existing="resume")
    with optimizer:
        optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("of", ["an older step", "a newer step", "another store", "torch", "other groups"])
def test_load_state_dict_rejects_another_step_store_or_groups(tmp_path, of):
    model, optimizer, _ = begun(tmp_path)
    with optimizer:
        state = optimizer.state_dict()
        position = state["memascend"]
        if of == "an older step":
            optimizer.save(tmp_path / "saved")
            step(model, optimizer)
        elif of == "a newer step":
            position["step"] += 1
        elif of == "another store":
            position["store"] = "0" * 32
        elif of == "torch":
            state = torch.optim.AdamW(chain(bias=True).parameters()).state_dict()
        else:
            state["param_groups"][0]["params"].append(4)
        state["param_groups"][0]["lr"] = 0.5
        before = everything(model, optimizer)
        kind, says = {
            "torch": (UsageError, r"not made by an offloaded optimizer.*pass that optimizer"),
            "other groups": (ValueError, "different parameter groups"),
        }.get(
            of,
            (UsageError, r"is of step . of store .* the storage has step . of store .*checkpoint=.*existing=.resume"),
        )
        with pytest.raises(kind, match=says):
            optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert same_states(everything(model, optimizer), before)
        step(model, optimizer)


def test_state_of_and_save_ignore_the_default_device(tmp_path):
    model, optimizer = offloaded(tmp_path / "run.store", chain(1, dtype=torch.bfloat16), device="cpu")
    with optimizer:
        step(model, optimizer)
        expected = optimizer.state_of(model[0].weight)
        optimizer.save(tmp_path / "plain")
        with torch.device("meta"):
            found = optimizer.state_of(model[0].weight)
            optimizer.save(tmp_path / "under")
    assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)) for name, value in expected.items())
    assert files(tmp_path / "under") == files(tmp_path / "plain")
