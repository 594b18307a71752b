"""Tests views of weights that are kept over steps, and averages that swap weights."""

import copy

import pytest
import torch
from support.bits import same_bits
from support.reached import OPTIMIZERS, WIDTH, batch, given_to_data, one_step, stack, taken, weights

from memascend import UsageError


def refused_once(model, offloaded, words, expected):
    """The next step is refused; zero_grad() leads back to the weights that are expected, and the one after it works."""
    model(batch()).square().mean().backward()
    with pytest.raises(UsageError, match=words):
        offloaded.step()
    offloaded.zero_grad()
    assert all(same_bits(p, expected[name]) for name, p in model.named_parameters())
    one_step(model, offloaded, torch.float32)
    assert offloaded.steps == 3


KEPT = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "slice": lambda p: p.detach()[:1],
    "view in a graph": lambda p: p.view(-1),
    "numpy": lambda p: p.detach().view(torch.uint8).numpy(),
    "given to data": given_to_data,
}


def kept(model, optimizer, take):
    """Views that are kept over steps: what they have after each, and what becomes of what is written through them."""
    views, records = [take(p) for p in model.parameters()], []
    for number in range(4):
        records.append(one_step(model, optimizer, torch.float32))
        records += [torch.as_tensor(view).detach().clone() for view in views]
        with torch.no_grad():
            if number == 1:
                views[2][:1] = 0
            elif number == 2:
                model[0].bias.data.mul_(0.5)
                records.append(torch.as_tensor(views[1]).detach().clone())
    with torch.no_grad():
        views[-1][:1] = 1
    return [*records, *weights(model).values()]


@pytest.mark.parametrize("way", KEPT)
@pytest.mark.parametrize("gradients", ["fused", "ssd"])
def test_views_that_are_kept_over_steps_are_the_weights(tmp_path, caplog, way, gradients):
    model = stack(2)
    expected = kept(model, OPTIMIZERS["adamw"](model.parameters()), KEPT[way])
    model = stack(2)
    model, offloaded = taken(model, OPTIMIZERS["adamw"](model.parameters()), tmp_path, gradients=gradients)
    with offloaded:
        found = kept(model, offloaded, KEPT[way])
    assert len(found) == len(expected)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
    assert sum("is kept over a step" in message for message in caplog.messages) == 1


def test_a_view_that_is_kept_follows_loads_and_what_was_discarded(training):
    model, offloaded = training(units=2)
    view, before = model[1].weight.detach(), {name: p.clone() for name, p in model.state_dict().items()}
    one_step(model, offloaded, torch.float32)
    assert not same_bits(view, before["1.weight"])
    model.load_state_dict(before)
    assert same_bits(model[1].weight.detach(), before["1.weight"])
    assert same_bits(view, before["1.weight"])
    model(batch()).square().mean().backward()
    view.zero_()
    with pytest.raises(UsageError, match=r"1\.weight.*zero_grad"):
        offloaded.step()
    offloaded.zero_grad()
    assert same_bits(view, before["1.weight"])
    one_step(model, offloaded, torch.float32)


@pytest.mark.parametrize("first", ["state dict", "view"])
def test_no_step_changes_a_state_dict(training, first):
    """It has no memory that a view had before, which follows the steps."""
    model, offloaded = training(units=2)
    view = model[1].weight.detach() if first == "view" else None
    state = model.state_dict()
    before = {name: values.clone() for name, values in state.items()}
    for _ in range(2):
        one_step(model, offloaded, torch.float32)
        assert all(same_bits(state[name], before[name]) for name in before)
        assert not same_bits(model.state_dict()["1.weight"], before["1.weight"])
        if view is not None:
            assert same_bits(view, model.state_dict()["1.weight"])
    state["1.weight"].zero_()
    model(batch()).square().mean().backward()
    with pytest.raises(UsageError, match=r"1\.weight.*zero_grad"):
        offloaded.step()
    offloaded.zero_grad()
    one_step(model, offloaded, torch.float32)
    assert not state["1.weight"].any()


def test_a_view_after_a_state_dict_that_is_gone_follows_the_steps(training):
    model, offloaded = training(units=2)
    state = model.state_dict()
    del state
    view = model[1].weight.detach()
    one_step(model, offloaded, torch.float32)
    assert same_bits(view, model.state_dict()["1.weight"])


def test_a_graph_of_a_view_from_before_a_step_is_refused(training):
    """As in memory, where the step has written to what the graph saved."""
    model, offloaded = training(units=2)
    factor = torch.ones(WIDTH, WIDTH, requires_grad=True)
    loss = (model[0].weight.detach() * factor).sum()
    one_step(model, offloaded, torch.float32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("budget", [None, "64MiB"])
def test_a_graph_through_a_view_of_a_weight_from_before_a_step_is_refused(training, budget):
    """The view counts writes as the parameter does, whether its unit is held or not."""
    model, offloaded = training(units=2, host_memory=budget)
    assert bool(offloaded.plan.held) == (budget is not None)
    factor = torch.ones(WIDTH * WIDTH, requires_grad=True)
    loss = (model[0].weight.view(-1) * factor).sum()
    one_step(model, offloaded, torch.float32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("budget", [None, "64MiB"])
def test_a_graph_from_before_a_write_is_refused_once_the_model_computed_with_it(training, budget):
    """As in memory, where the graph has saved what was written to."""
    model, offloaded = training(units=2, host_memory=budget)
    loss = model(batch()).square().mean()
    model[1].weight.detach().mul_(0.5)
    expected = weights(model)
    model(batch())
    with pytest.raises(RuntimeError, match=r"needs unit '1'.*run the forward again"):
        loss.backward()
    offloaded.zero_grad()
    one_step(model, offloaded, torch.float32)
    assert offloaded.steps == 2
    assert not same_bits(model[1].weight, expected["1.weight"])


def test_a_view_that_could_not_be_renewed_is_renewed_later(training, monkeypatch):
    model, offloaded = training(units=2)
    view = model[1].weight.detach()
    residency = offloaded._session.run.residency

    def failing(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(residency, "read_into", failing)
        with pytest.raises(KeyboardInterrupt):
            one_step(model, offloaded, torch.float32)
    assert offloaded.steps == 2
    offloaded.zero_grad()
    model(batch())
    assert same_bits(view, model.state_dict()["1.weight"])


def test_what_nobody_has_any_more_is_let_go(training):
    model, offloaded = training()
    reached = offloaded._session.run.residency.reached
    for parameter in model.parameters():
        parameter.data.norm()
    assert len(reached._now) == 32
    kept = model[0].weight.detach()
    model(batch())
    assert list(reached._now) == ["0.weight"]
    one_step(model, offloaded, torch.float32)
    assert list(reached._now) == ["0.weight"], "it is somebody's"
    del kept
    one_step(model, offloaded, torch.float32)
    assert not reached._now


def averaged(model, optimizer):
    """Torch's averaged weights, evaluated and taken at the end, as a loop in memory does it."""
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        one_step(model, optimizer, torch.float32)
        average.update_parameters(model)
    with torch.no_grad():
        for own, other in zip(model.parameters(), average.module.parameters(), strict=True):
            own.detach().copy_(other)
    return [average(batch()).detach(), model(batch()).detach(), *weights(model).values()]


def swapped(model, optimizer):
    """What diffusers does with its moving average: store, copy to, evaluate, restore."""
    shadow, records = [p.detach().clone() for p in model.parameters()], []
    for _ in range(3):
        one_step(model, optimizer, torch.float32)
        with torch.no_grad():
            for mine, parameter in zip(shadow, model.parameters(), strict=True):
                mine.sub_(0.25 * (mine - parameter))
            stored = [p.detach().cpu().clone() for p in model.parameters()]
            for mine, parameter in zip(shadow, model.parameters(), strict=True):
                parameter.data.copy_(mine.to(parameter.device).data)
            records.append(model(batch()))
            for mine, parameter in zip(stored, model.parameters(), strict=True):
                parameter.data.copy_(mine.data)
    return [*records, *weights(model).values()]


def referred(model, optimizer):
    """TRL's reference model, which follows the one that is trained."""
    reference, records = copy.deepcopy(model), []
    for _ in range(3):
        one_step(model, optimizer, torch.float32)
        for theirs, ours in zip(reference.parameters(), model.parameters(), strict=True):
            theirs.data.mul_(1.0 - 0.25).add_(ours.data, alpha=0.25)
        records.append(reference(batch()).detach())
    return [*records, *weights(model).values()]


@pytest.mark.parametrize("loop", [averaged, swapped, referred])
@pytest.mark.parametrize("units", [2, 16])
def test_averages_are_those_in_memory(tmp_path, loop, units):
    model = stack(units)
    expected = loop(model, OPTIMIZERS["adamw"](model.parameters()))
    model = stack(units)
    model, offloaded = taken(model, OPTIMIZERS["adamw"](model.parameters()), tmp_path)
    with offloaded:
        found = loop(model, offloaded)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("units", [2, 16])
def test_a_view_from_inside_of_a_forward_that_is_written_outside_is_told(training, units):
    model, offloaded = training(units=units)
    views = []
    with model[1].register_forward_pre_hook(lambda module, _: views.append(module.weight.detach())):
        one_step(model, offloaded, torch.float32)
    expected = weights(model)
    views[0].zero_()
    refused_once(model, offloaded, r"1\.weight", expected)
