"""Tests what a step does with gradients: which it uses, how often, and what it refuses."""

import math

import pytest
import torch
from support.checkpointed import OwnCheckpoint
from torch import nn

import memascend
from memascend.errors import UsageError
from memascend.grads.gradient import State, moved

WIDTH = 16


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch(seed):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def backward(model, seed):
    model(batch(seed)).square().mean().backward()


def offloaded(tmp_path, gradients="ssd", kind=torch.optim.SGD, lr=0.1, **options):
    model = chain()
    return memascend.offload(
        model,
        kind(model.parameters(), lr=lr),
        storage=tmp_path / "s",
        gradients=gradients,
        host_memory="64MiB",
        **options,
    )


def require_same(plain, model):
    with memascend.materialized(model):
        for wanted, got in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(wanted, got)


KINDS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


@pytest.mark.parametrize("gradients", ["ssd", "ram"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_clipping_does_to_gradients_that_are_not_finite_what_torchs_does(tmp_path, kind, value, gradients):
    """NaN makes all gradients NaN; an infinite one becomes NaN alone, and the others 0."""
    plain, model = chain(), chain()
    theirs = KINDS[kind](plain.parameters())
    options = {"gradients": gradients, "max_grad_norm": 1.0, "storage": tmp_path / "store"}
    model, optimizer = memascend.offload(model, KINDS[kind](model.parameters()), **options)

    def spoiled(gradient):
        return gradient.index_fill(0, torch.tensor(1), value)

    for of in (plain, model):
        of[2].bias.register_hook(spoiled)
        backward(of, 0)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    theirs.step()
    optimizer.step()
    assert not math.isfinite(optimizer.grad_norm)
    optimizer.close()
    again = chain()
    again, optimizer = memascend.offload(again, KINDS[kind](again.parameters()), existing="resume", **options)
    with optimizer:
        for name, expected in plain.state_dict().items():
            assert torch.allclose(again.state_dict()[name], expected, rtol=0, atol=1e-7, equal_nan=True), name


def test_a_step_that_failed_takes_no_further_gradient(tmp_path, monkeypatch):
    plain = chain()
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        backward(model, 2)

        def fail(*_, **__):
            raise RuntimeError("not this time")

        with monkeypatch.context() as patched:
            # Every update is staged by then.
            patched.setattr(memascend.engine.Engine, "commit", fail)
            with pytest.raises(RuntimeError, match="not this time"):
                optimizer.step()
        with pytest.raises(UsageError, match="already used the first"):
            backward(model, 3)
        optimizer.zero_grad()
        require_same(plain, model)


class Flat(nn.Module):
    """Gives its weight as a flat view, so that what backward() is given becomes its gradient, without a copy."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self):
        return self.weight.view(-1)


@pytest.mark.parametrize("gradients", ["fused", "ssd"])
def test_memory_that_the_caller_may_write_to_is_never_handed_on(tmp_path, monkeypatch, gradients):
    """The engine reads a gradient later, on its own thread."""
    given = []

    def watched(of):
        def call(self, name, gradient, *arguments, **options):
            given.append(gradient.untyped_storage().data_ptr())
            return of(self, name, gradient, *arguments, **options)

        return call

    for name in ("update", "spill"):
        monkeypatch.setattr(memascend.engine.Engine, name, watched(getattr(memascend.engine.Engine, name)))
    model = Flat()
    model, optimizer = memascend.offload(
        model, torch.optim.AdamW(model.parameters()), storage=tmp_path / "s", gradients=gradients
    )
    with optimizer:
        mine = torch.ones(WIDTH * WIDTH)
        model().backward(gradient=mine)
        assert given
        assert mine.untyped_storage().data_ptr() not in given


def fail_in_backward(model, seed):
    """The last layer's gradients have arrived by then, and no other."""

    def fail(_):
        raise KeyError("in the middle")

    middle = model[1](model[0](batch(seed)))
    middle.register_hook(fail)
    with pytest.raises(KeyError, match="in the middle"):
        model[2](middle).square().mean().backward()


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram", "auto"])
def test_a_part_of_a_backward_is_never_used(tmp_path, gradients):
    model, optimizer = offloaded(tmp_path, gradients)
    with optimizer:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fail_in_backward(model, 1)
        # What is left of it stands in the last layer's bias.
        model[2].weight.grad = None
        with pytest.raises(UsageError, match=r"last backward failed.*'2\.bias'.*zero_grad"):
            optimizer.step()
        with pytest.raises(UsageError, match=r"last backward failed|already used"):
            backward(model, 2)
        optimizer.zero_grad()
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_second_piece_that_a_declared_step_cannot_know_of_is_refused_and_never_lost(tmp_path):
    """The last backward of a declared step updates as gradients arrive; what comes after one is no part of it."""
    model, optimizer = offloaded(tmp_path, "fused", accumulation_steps=2)
    with optimizer:
        layer = model[0]
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        layer(batch(1)).sum().backward()
        # The gradient of the outer call arrives first, for it is nearer to the loss.
        inner = OwnCheckpoint.apply(layer, batch(2).requires_grad_())
        with pytest.raises(UsageError, match=r"already used the first.*ssd"):
            layer(inner).sum().backward()
        optimizer.zero_grad()
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_zeroing_is_refused_before_anything_is_zeroed(tmp_path):
    model, optimizer = offloaded(tmp_path, "fused")
    with optimizer:
        backward(model, 1)
        first = next(model.parameters())
        first.grad = torch.ones(WIDTH, WIDTH)
        with pytest.raises(UsageError, match="set_to_none=False"):
            optimizer.zero_grad(set_to_none=False)
        assert bool((first.grad == 1).all())


def test_a_replaced_gradient_can_be_zeroed_in_every_mode(tmp_path):
    """What stood in its place was used already, and is dropped with its update."""
    model, optimizer = offloaded(tmp_path, "fused")
    with optimizer:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        backward(model, 1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert optimizer.steps == 1
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_moves_that_make_no_sense_are_assertions():
    legal = {
        "store": {State.NONE},
        "change": {State.STORED},
        "take": {State.NONE},
        "begin": {State.NONE, State.STORED},
        "stage": {State.NONE, State.STORED, State.EARLY},
        "unstage": {State.MEMORY_STAGED, State.STORED_STAGED, State.EARLY},
        "end": {State.MEMORY_STAGED, State.STORED_STAGED, State.EARLY, State.TAKEN},
        "drop": set(State),
    }
    for move, states in legal.items():
        for state in State:
            if state in states:
                assert moved("w", state, move) in State
            else:
                with pytest.raises(AssertionError, match=f"'{move}'.*'w'.*{state.name}"):
                    moved("w", state, move)
