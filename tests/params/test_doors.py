"""Tests writes to offloaded weights, and views of weights that user code keeps while the weights change.

Code may write only within optimizer.edit() or memascend.materialized(model, modify=True), or by
model.load_state_dict(). These three are the doors. Any other write is rejected and changes nothing.
"""

from types import SimpleNamespace

import pytest
import torch
from parity.machine_calls import AT_ONCE, KEPT, WRITES
from support.bits import same_states
from support.chains import WIDTH, batch, loss_of, offloaded, require_same_training, step, twins, values
from torch import nn

import memascend
from memascend import UsageError

DOORS = r"optimizer\.edit\(parameter\) or memascend\.materialized\(model, modify=True\), or by model\.load_state_dict"


@pytest.mark.parametrize("durability", ["step", "none"])
@pytest.mark.parametrize("write", WRITES)
def test_direct_write_to_a_weight_is_rejected_and_changes_nothing(training, write, durability):
    """A write that torch dispatches to the parameter raises at once; after any other write, the next forward raises.

    With durability="none", only RAM has the weight's values. `parity.machine` tests such writes in all modes of
    `gradients`.
    """
    model, offloaded = training(units=2, durability=durability)
    assert offloaded.plan.ram_tier
    expected = values(model)
    if write in AT_ONCE:
        with pytest.raises(UsageError, match=rf"'0\.weight' is offloaded and cannot be .*{DOORS}"):
            WRITES[write](model[0].weight)
    else:
        WRITES[write](model[0].weight)
        with pytest.raises(UsageError, match=rf"^0\.weight of an offloaded model was written to .*{DOORS}"):
            model(batch())
    assert same_states(values(model), expected)
    step(model, offloaded)


EVENTS = {
    "hand-out": lambda model, _, __: model[1].weight.data,
    "reading anew": lambda model, _, __: model[0].weight.detach(),
    "part of the model": lambda model, _, __: model[1](batch()),
    "step": lambda _, offloaded, __: offloaded.step(),
    "save": lambda _, offloaded, folder: offloaded.save(folder / "saved"),
    "close": lambda _, offloaded, __: offloaded.close(),
    "load": lambda model, _, __: model.load_state_dict(model.state_dict()),
    "edit": lambda model, offloaded, _: offloaded.edit(model[0].weight).__enter__(),
    "materialized": lambda model, _, __: memascend.materialized(model).__enter__(),
    "schedule": lambda _, offloaded, __: offloaded.schedule(torch.optim.lr_scheduler.StepLR(offloaded, 2)),
}


@pytest.mark.parametrize("event", EVENTS)
def test_write_to_a_detached_copy_is_rejected_by_the_next_call(training, tmp_path, event):
    model, offloaded = training(units=2)
    expected = values(model)
    if event == "step":
        model(batch()).square().mean().backward()
    model[0].weight.detach().mul_(0.5)
    with pytest.raises(UsageError, match=rf"^0\.weight of an offloaded model was written to .*{DOORS}"):
        EVENTS[event](model, offloaded, tmp_path)
    if event != "close":
        offloaded.zero_grad()
        assert same_states(values(model), expected)
        step(model, offloaded)
        assert offloaded.steps == 2


def test_forward_error_names_every_written_weight(training):
    model, offloaded = training(units=3)
    views = [p.data for p in model.parameters()]
    for view in views[:4]:
        view.add_(1)
    with pytest.raises(UsageError, match=r"^0\.bias, 0\.weight, 1\.bias, 1\.weight of an offloaded model"):
        model(batch())
    del view, views
    step(model, offloaded)


@pytest.mark.parametrize("way", KEPT)
def test_edit_and_step_are_rejected_while_a_view_of_the_weight_exists(training, way):
    """If the model were in memory, the view would follow the weight. In an offloaded model, the view would be stale.

    After the view is deleted, the same step succeeds.
    """
    model, offloaded = training(units=2)
    expected, kept = values(model), KEPT[way](model[1].weight)
    words = r"^1\.weight is about to change, .*p\.detach\(\)\.clone\(\)"
    with pytest.raises(UsageError, match=words), offloaded.edit(model[1].weight) as weight:
        weight.add_(1)
    assert same_states(values(model), expected)
    kept = KEPT[way](model[1].weight)
    model(batch()).square().mean().backward()
    with pytest.raises(UsageError, match=words):
        offloaded.step()
    del kept
    offloaded.step()
    assert offloaded.steps == 2


@pytest.mark.parametrize("budget", [None, "64MiB"])
@pytest.mark.parametrize("door", ["edit", "load", "step"])
def test_backward_of_a_graph_from_before_a_weight_change_is_rejected(training, budget, door):
    """A backward fails after a write to a tensor that its graph saved, as in training in memory."""
    model, offloaded = training(units=2, host_memory=budget, steps=0 if door == "step" else 1)
    loss = model(batch()).square().mean()
    if door == "edit":
        with offloaded.edit(model[1].weight) as weight:
            weight.mul_(0.5)
    elif door == "step":
        loss.backward(retain_graph=True)
        offloaded.step()
        offloaded.zero_grad()
    else:
        model.load_state_dict({name: p * 0.5 for name, p in model.state_dict().items()})
    with pytest.raises(RuntimeError, match=r"unit '1'.*run the forward again|modified by an inplace operation"):
        loss.backward()
    offloaded.zero_grad()
    step(model, offloaded)
    assert offloaded.steps == 2


class Keeps(nn.Module):
    """Calls `take(weight)` in its first forward, and computes with the result in each forward.

    With `anew`, calls `take(weight)` in each forward.
    """

    def __init__(self, take, *, anew=False):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) * 0.1)
        self.take, self.anew, self.held = take, anew, SimpleNamespace(views={})

    def forward(self, x):
        if self.anew or not self.held.views:
            self.held.views["weight"] = [self.take(self.weight)]
        return x @ self.held.views["weight"][0] + x @ self.weight


def keeping(take):
    torch.manual_seed(0)
    return nn.Sequential(Keeps(take), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(("take", "comes"), [(lambda p: p.t(), "step"), (lambda p: p.data, "forward")])
def test_view_that_a_module_keeps_from_an_earlier_forward_is_rejected(tmp_path, take, comes):
    """In a model in memory, the view would follow the weight.

    In an offloaded model without a RAM tier, the view keeps old values, so a step that computed with the view must not
    be committed.
    """
    model, optimizer = offloaded(tmp_path / "s", keeping(take))
    words = r"the attribute 'held' of 0 \(Keeps\) is a view of '0\.weight' that an earlier forward took"
    with optimizer:
        step(model, optimizer)
        if comes == "forward":
            with torch.no_grad():
                model(batch())
        for _ in range(2):
            with pytest.raises(UsageError, match=words):
                step(model, optimizer)
            optimizer.zero_grad()
        assert optimizer.steps == 1
        model[0].held.views.clear()
        step(model, optimizer)
        assert optimizer.steps == 2


def test_kept_view_of_a_weight_in_the_ram_tier_follows_the_weight(tmp_path):
    require_same_training(*twins(tmp_path, make=lambda: keeping(lambda p: p.t())))


class InCycle(Keeps):
    def forward(self, x):
        cycle = [self.weight.t()]
        cycle.append(cycle)
        return x @ cycle[0]


class Checkpointed(Keeps):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


LEGITIMATE = {
    "anew": lambda: Keeps(lambda p: p.t(), anew=True),
    "a detached one anew": lambda: Keeps(lambda p: p.detach().t(), anew=True),
    "cycle": lambda: InCycle(lambda p: p),
    "checkpoint": lambda: Checkpointed(lambda p: p.t(), anew=True),
    "a copy": lambda: Keeps(lambda p: p.detach().clone()),
}


@pytest.mark.parametrize("kind", LEGITIMATE)
def test_permitted_views_and_copies_in_a_forward_train_as_in_torch(tmp_path, kind):
    """The test keeps the graphs of all steps. It also keeps the views that a forward hook took."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), LEGITIMATE[kind](), nn.Linear(WIDTH, WIDTH))

    plain, theirs, model, optimizer = twins(tmp_path, make=make, host_memory=None)
    graphs, seen = [], []
    model[1].register_forward_hook(lambda module, *_: seen.append(module.weight.detach()))

    def loss(model, seed):
        graphs.append(loss_of(model, seed))
        return graphs[-1]

    require_same_training(plain, theirs, model, optimizer, range(4), loss)
    assert optimizer.steps == 4


def test_step_rejects_weights_that_the_forward_wrote_and_names_edit(tmp_path):
    """An embedding with `max_norm` writes to the rows that it reads; docs/limits.md shows a loop that works."""
    model = nn.Sequential(nn.Embedding(20, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH))
    model, optimizer = offloaded(tmp_path / "s", model)
    with optimizer:
        model(torch.arange(6)).square().mean().backward()
        words = rf"{DOORS}.*before the forward, within optimizer\.edit\(\), as docs/limits"
        with pytest.raises(UsageError, match=words):
            optimizer.step()
