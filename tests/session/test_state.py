"""Tests `optimizer.state`: what torch's has, read from storage when it is asked for, and not to be written to."""

import copy
import io

import pytest
import torch
from support.bits import same_bits
from torch import nn

import memascend
from memascend import UsageError

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
}


def stack(units):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(units)])


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize("units", [2, 16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_has_what_torch_has(tmp_path, monkeypatch, units, name, debug):
    monkeypatch.setenv("MEMASCEND_DEBUG", debug)
    plain, model = stack(units), stack(units)
    theirs = OPTIMIZERS[name](plain.parameters())
    model, ours = memascend.offload(model, OPTIMIZERS[name](model.parameters()), storage=tmp_path / "s")
    with ours:
        assert not ours.state
        assert dict(ours.state) == {}
        assert ours.state[model[0].weight] == {}
        for of, optimizer in ((plain, theirs), (model, ours)):
            for _ in range(2):
                of(torch.ones(2, 16)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        wanted = {p: s for p, s in theirs.state.items() if s}
        assert len(ours.state) == len(wanted)
        pairs = dict(zip(plain.parameters(), model.parameters(), strict=True))
        assert [id(p) for p in ours.state] == [id(pairs[p]) for p in wanted]
        for parameter, state in wanted.items():
            found = ours.state[pairs[parameter]]
            kept = {of: torch.as_tensor(value) for of, value in state.items() if value is not None}
            assert found.keys() == kept.keys()
            assert all(same_bits(torch.as_tensor(found[of]), kept[of]) for of in kept)


def test_it_is_not_written_to(tmp_path):
    model = stack(2)
    model, optimizer = memascend.offload(model, OPTIMIZERS["adamw"](model.parameters()), storage=tmp_path / "s")
    with optimizer:
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        weight = model[0].weight
        before = {name: tensor.clone() for name, tensor in optimizer.state_of(weight).items()}
        state = optimizer.state[weight]
        for write in (
            state["exp_avg"].zero_,
            lambda: state["exp_avg"][0].fill_(1),
            lambda: state["exp_avg"].view(-1).mul_(2),
            lambda: torch.mul(before["exp_avg"], 2, out=state["exp_avg"]),
            state["exp_avg"].data.zero_,
            lambda: state["exp_avg"].data[0].fill_(1),
            lambda: setattr(state["exp_avg"], "data", before["exp_avg"] * 2),
            lambda: state["exp_avg"].detach().mul_(2),
            lambda: state["exp_avg"].__setitem__(0, 1.0),
            lambda: state["exp_avg"].__imul__(2),
            lambda: torch._foreach_zero_([state["exp_avg"], state["exp_avg_sq"]]),
            lambda: state["step"].fill_(100),
            state["exp_avg"].unbind()[0].zero_,
        ):
            for around in (torch.no_grad, torch.inference_mode):
                with around(), pytest.raises(UsageError, match=r"on storage.*checkpoint="):
                    write()
        array = state["exp_avg"].numpy()
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0
        with pytest.raises(UsageError, match=r"on storage.*checkpoint="):
            optimizer.state[weight] = {"exp_avg": torch.ones(16, 16)}
        with pytest.raises(UsageError, match="on storage"):
            optimizer.state.clear()
        # Copies of it are anybody's.
        for copied in (state["exp_avg"].clone(), copy.deepcopy(state["exp_avg"]), state["exp_avg"] + 0):
            assert type(copied) is torch.Tensor
            assert same_bits(copied.zero_(), torch.zeros(16, 16))
        file = io.BytesIO()
        torch.save(dict(state), file)
        file.seek(0)
        assert same_bits(torch.load(file, weights_only=True)["exp_avg"], before["exp_avg"])
        # What moves a state to the device that it is on already, as Lightning does.
        for parameter, found in optimizer.state.items():
            optimizer.state[parameter] = {name: value.to("cpu") for name, value in found.items()}
        assert all(same_bits(tensor, before[name]) for name, tensor in optimizer.state_of(weight).items())
