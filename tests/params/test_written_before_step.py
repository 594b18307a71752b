"""Tests weights that are written between backward and step(), while the gradients wait: torch's bits, or an error."""

import pytest
import torch
from support.bits import same_bits
from support.reached import OPTIMIZERS, batch, stack, taken

from memascend import UsageError


def perturbed(model, write):
    """Sharpness-aware minimisation: the weights go up the gradient, and come back after a second backward."""
    kept = []
    with torch.no_grad():
        norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        for p in model.parameters():
            kept.append(p.data.clone())
            p.add_(p.grad * (0.05 / norm))
    model.zero_grad()
    model(batch(kept[0].dtype)).float().pow(2).mean().backward()
    with torch.no_grad():
        for p, values in zip(model.parameters(), kept, strict=True):
            write(p, values)


def assigned(p, values):
    p.data = values


def copied(p, values):
    p.copy_(values)


def moved(p, values):
    """Not quite back, and the update begins from there."""
    p.data.copy_(values).mul_(0.75)


def played(model, optimizer, write):
    for _ in range(3):
        model(batch()).pow(2).mean().backward()
        perturbed(model, write)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "gradients", "write"),
    [
        ("adamw", "ssd", assigned),
        ("adamw", "auto", moved),
        ("sgd", "ssd", copied),
        ("rmsprop", "ram", moved),
    ],
)
@pytest.mark.parametrize("debug", ["", "1"])
def test_weights_that_are_put_back_before_step_count(tmp_path, monkeypatch, optimizer, gradients, write, debug):
    monkeypatch.setenv("MEMASCEND_DEBUG", debug)
    model = stack(4)
    expected = played(model, OPTIMIZERS[optimizer](model.parameters()), write)
    model = stack(4)
    model, offloaded = taken(model, OPTIMIZERS[optimizer](model.parameters()), tmp_path, gradients=gradients)
    with offloaded:
        found = played(model, offloaded, write)
    assert all(map(same_bits, found, expected))
    model = stack(4)
    model, offloaded = taken(model, OPTIMIZERS[optimizer](model.parameters()), tmp_path, existing="resume")
    with offloaded:
        assert all(map(same_bits, model.parameters(), expected))


def test_auto_learns_that_weights_are_written_before_step(tmp_path):
    """Nothing reads a gradient here: a weight decay by hand."""

    def decayed(model, optimizer):
        for _ in range(3):
            model(batch()).pow(2).mean().backward()
            for p in model.parameters():
                p.data.mul_(0.99)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    model = stack(4)
    expected = decayed(model, OPTIMIZERS["adamw"](model.parameters()))
    model = stack(4)
    model, offloaded = taken(model, OPTIMIZERS["adamw"](model.parameters()), tmp_path)
    with offloaded:
        assert all(map(same_bits, decayed(model, offloaded), expected))


def test_a_write_between_accumulated_backwards_counts(tmp_path):
    """The update begins with the second one."""

    def accumulated(model, optimizer):
        for _ in range(2):
            model(batch()).pow(2).mean().backward()
            model[1].weight.data.mul_(0.9)
            model(batch()).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    model = stack(4)
    expected = accumulated(model, OPTIMIZERS["sgd"](model.parameters()))
    model, declared = stack(4), {"gradients": "fused", "accumulation_steps": 2}
    model, offloaded = taken(model, OPTIMIZERS["sgd"](model.parameters()), tmp_path, **declared)
    with offloaded:
        assert all(map(same_bits, accumulated(model, offloaded), expected))


def test_masters_stay_where_weights_are_put_back(training):
    model, offloaded = training(units=4, dtype=torch.bfloat16, master_dtype=torch.float32, gradients="ssd")
    before = [offloaded.state_of(p)["master"] for p in model.parameters()]
    assert not all(torch.equal(master, master.bfloat16().float()) for master in before)
    model(batch(torch.bfloat16)).float().pow(2).mean().backward()
    perturbed(model, copied)
    for group in offloaded.param_groups:
        group["lr"] = 0.0
    offloaded.step()
    assert all(map(same_bits, before, [offloaded.state_of(p)["master"] for p in model.parameters()]))


def backward(loss, model):
    del model
    loss.backward()


def by_hand(loss, model):
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = gradient


@pytest.mark.parametrize(("gradients", "walk"), [("ssd", backward), ("ram", backward), ("ssd", by_hand)])
def test_a_write_between_forward_and_backward_is_refused_by_step(training, gradients, walk):
    """In memory the backward computes with what was written, and here with what the forward had."""
    model, offloaded = training(units=4, gradients=gradients)
    expected = [p.detach().clone() for p in model.parameters()]
    views = [p.data for p in model.parameters()]
    loss = model(batch()).pow(2).mean()
    views[0].mul_(0.5)
    walk(loss, model)
    with pytest.raises(UsageError, match=r"0\.weight were written to .* too late"):
        offloaded.step()
    offloaded.zero_grad()
    assert all(map(same_bits, model.parameters(), expected))


def test_what_was_written_outlives_gradients_that_no_step_used(training, tmp_path):
    model, offloaded = training(units=2, gradients="ssd")
    model(batch()).pow(2).mean().backward()
    with torch.no_grad():
        model[0].weight.fill_(0.125)
    offloaded.close()
    model = stack(2)
    model, offloaded = taken(model, OPTIMIZERS["adamw"](model.parameters()), tmp_path, existing="resume")
    with offloaded:
        assert bool((model[0].weight == 0.125).all())
