"""Tests `optimizer.state` and state dicts: state is on storage, and a state dict has the position of a run."""

from functools import partial

import pytest
import torch
from support.bits import files, same_states
from support.chains import chain, everything, offloaded, step, train

import memascend
from memascend import UsageError


def begun(folder, steps=1, **options):
    model = chain(bias=True)
    original = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = memascend.offload(model, original, storage=folder / "run.store", **options)
    train(model, optimizer, range(steps))
    return model, optimizer, original


@pytest.mark.parametrize("whose", ["returned", "original"])
def test_it_has_no_items_and_says_where_state_is_read(tmp_path, whose):
    model, optimizer, original = begun(tmp_path)
    with optimizer:
        state = (optimizer if whose == "returned" else original).state
        weight = model[0].weight
        assert not state
        assert len(state) == 0 == len(list(state.items()) + list(state.values()) + list(state.keys()))
        assert "weight" not in state
        # Lightning moves states to a device by this loop.
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


def test_the_original_gives_no_state_dict(tmp_path):
    _, optimizer, original = begun(tmp_path)
    with optimizer:
        for ask in (original.state_dict, lambda: original.load_state_dict(optimizer.state_dict())):
            with pytest.raises(UsageError, match=r"offload\(\) returned"):
                ask()
    assert not original.state


def test_a_state_dict_of_the_present_position_sets_the_options(tmp_path):
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
    # As a process that goes on reads it from a file.
    torch.save(state, tmp_path / "state.pt")
    model, optimizer, _ = begun(tmp_path, 0, existing="resume")
    with optimizer:
        optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("of", ["an older step", "a newer step", "another store", "torch", "other groups"])
def test_a_state_dict_of_another_position_is_refused_and_nothing_changes(tmp_path, of):
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
            "torch": (UsageError, r"not made by an offloaded optimizer.*give the optimizer"),
            "other groups": (ValueError, "other parameter groups"),
        }.get(of, (UsageError, r"is of step . of store .* holds step . of store .*checkpoint=.*existing=.resume"))
        with pytest.raises(kind, match=says):
            optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert same_states(everything(model, optimizer), before)
        step(model, optimizer)


def test_state_and_checkpoints_of_bf16_under_a_default_device(tmp_path):
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
