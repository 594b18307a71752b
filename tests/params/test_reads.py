"""Tests reads of offloaded weights: they are bit-identical to in-memory training, and unused copies are freed."""

import copy
from unittest import mock

import pytest
import torch
from support.bits import same_bits, same_states
from support.chains import WIDTH, batch, chain, offloaded, require_same, step, train, twins, values
from torch import nn
from torch.nn.utils import parameters_to_vector

from memascend import UsageError
from memascend.params.unit import Bytes, CachedUnit


def averaged(model, optimizer):
    """Trains with torch's weight average, which is a deep copy of the model.

    Returns the losses, and the output of the average.
    """
    average = torch.optim.swa_utils.AveragedModel(model)
    records = []
    for _ in range(3):
        records.append(step(model, optimizer))
        average.update_parameters(model)
    return [*records, average(batch()).detach()]


def penalised(model, optimizer):
    """Trains with penalties on weights; returns the losses.

    The graph reads some weights as a whole, and some weights as views.
    """
    records, first = [], [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        loss = model(batch()).pow(2).mean() + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
        loss = loss + 1e-3 * sum((p - old).abs().sum() for p, old in zip(model.parameters(), first, strict=True))
        loss = loss + 1e-3 * parameters_to_vector(model.parameters()).pow(2).sum()
        turned = (model[0].weight.t() @ model[1].weight - torch.eye(WIDTH)).square().mean()
        loss = loss + turned + 1e-3 * model[1].weight.view(-1)[::2].abs().sum() + model[0].weight[1:3].square().sum()
        # This call reads all weights at once.
        loss = loss + 1e-3 * sum(torch._foreach_norm(list(model.parameters())))
        loss.backward()
        records.append(loss.detach())
        del loss, turned
        optimizer.step()
        optimizer.zero_grad()
    return records


@pytest.mark.parametrize(("budget", "gradients"), [(None, "fused"), ("64MiB", "ssd")])
@pytest.mark.parametrize("program", [averaged, penalised])
def test_program_that_reads_weights_has_the_same_bits_as_torch(tmp_path, program, budget, gradients):
    plain, theirs, model, optimizer = twins(tmp_path, gradients, make=lambda: chain(4, bias=True), host_memory=budget)
    with optimizer:
        assert all(map(same_bits, program(model, optimizer), program(plain, theirs)))
        require_same(plain, model)


def test_unreferenced_weight_copies_are_freed(training):
    model, offloaded = training()
    copies = offloaded._session.run.residency.copies
    for parameter in model.parameters():
        view = parameter.data
        view.norm()
        assert len(copies._now) <= 2
    kept = [p.detach() for p in model.parameters()]
    assert len(copies._now) == len(kept)
    kept = kept[:1]
    model(batch())
    assert set(copies._now) == {("15.bias", "view"), ("0.weight", "view")}
    del kept, view
    step(model, offloaded)
    assert not copies._now
    assert not copies._older


def test_no_step_changes_a_state_dict(training):
    model, offloaded = training(units=2)
    state = model.state_dict()
    # State dicts of one commit share one copy of a weight, and views of the weight share another copy.
    assert model.state_dict()["0.weight"].data_ptr() == state["0.weight"].data_ptr()
    view = model[0].weight.detach()
    assert view.data_ptr() == model[0].weight.data.data_ptr()
    del view
    before = values(model)
    for _ in range(2):
        step(model, offloaded)
        assert same_states(state, before)
        assert not same_bits(model.state_dict()["1.weight"], before["1.weight"])
    state["1.weight"].zero_()
    model(batch()).square().mean().backward()
    with pytest.raises(UsageError, match=r"^1\.weight of an offloaded model was written to .*state dict"):
        offloaded.step()
    offloaded.zero_grad()
    step(model, offloaded)
    assert not state["1.weight"].any()


@pytest.mark.parametrize("budget", [None, "64MiB"])
def test_view_taken_in_a_forward_is_a_snapshot_and_rejects_writes(training, budget):
    model, offloaded = training(host_memory=budget)
    assert bool(offloaded.plan.ram_tier) == (budget is not None)
    before, views = values(model), []
    with model[1].register_forward_pre_hook(lambda module, _: views.append(module.weight.data)):
        step(model, offloaded)
    # Without a RAM tier, the next forwards evict the unit of the view, and read it again with the values that the step
    # wrote.
    with torch.no_grad():
        for _ in range(3):
            model(batch())
    assert same_bits(views[0], before["1.weight"])
    expected = values(model)
    assert not same_bits(expected["1.weight"], before["1.weight"])
    views[0].zero_()
    model(batch()).square().mean().backward()
    with pytest.raises(UsageError, match=r"^1\.weight of an offloaded model was written to"):
        offloaded.step()
    offloaded.zero_grad()
    assert same_states(values(model), expected)
    step(model, offloaded)


def test_deepcopy_is_a_plain_model_independent_of_the_original(training):
    model, offloaded = training(units=2)
    copied = copy.deepcopy(model)
    part = copy.deepcopy(model[1])
    assert all(type(p) is nn.Parameter and p.requires_grad for p in copied.parameters())
    assert not any(copied[0]._forward_pre_hooks or module.__dict__.get("_memascend") for module in copied.modules())
    expected = values(model)
    assert same_states(copied.state_dict(), expected)
    assert torch.equal(copied(batch()), model(batch()))
    copied[0].weight.data.zero_()
    step(model, offloaded)
    assert model[0].weight.any()
    step(copied, torch.optim.SGD(copied.parameters(), lr=0.1))
    assert same_states(part.state_dict(), {name: expected[f"1.{name}"] for name in ("weight", "bias")})
    # The original model is still offloaded, so it rejects a change of dtype.
    with pytest.raises(UsageError):
        model.to(torch.float64)


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo):
        copied = type(self)(self.in_features, self.out_features)
        copied.load_state_dict(copy.deepcopy(self.state_dict(), memo))
        copied.copies = getattr(self, "copies", 0) + 1
        return copied


def test_deepcopy_calls_the_deepcopy_method_of_a_module(tmp_path):
    model, optimizer = offloaded(tmp_path, nn.Sequential(nn.Linear(WIDTH, WIDTH), CopiesItself(WIDTH, WIDTH)))
    with optimizer:
        copied = copy.deepcopy(model)
        assert copied[1].copies == 1
        assert not copied[1]._forward_pre_hooks
        assert torch.equal(copied(batch()), model(batch()))


class Named(nn.Module):
    """A model whose forward uses weights of its submodules by name, as many models do."""

    def __init__(self, compute):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.compute = compute

    def forward(self, x):
        return self.compute(self, torch.tanh(self.body(x)))


def repeated(model, x):
    for _ in range(2):
        x = x + (nn.functional.linear(x, model.body.weight) if model.body.weight.requires_grad else x)
    with torch.no_grad():
        norm = model.head.weight.norm()
    return model.head(x) * norm


COMPILED = {
    "any parameter's dtype": lambda model, x: model.head(x.to(next(model.head.parameters()).dtype)),
    "shape": lambda model, x: model.head(x)[:, : model.head.weight.shape[0] // 2],
    "values in a loop": repeated,
}


# The compiler reads `.grad` of each module's result, even if the result is not a leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("compute", COMPILED)
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_function_that_reads_weights_has_the_losses_of_torch(tmp_path, compute, whole):
    """With `whole`, compiles the model. Otherwise compiles a function that uses weights of the model."""

    def losses(model, optimizer):
        if whole:
            model.compile(backend="eager")
        function = torch.compile(COMPILED[compute], backend="eager")

        def of(model, seed):
            out = model(batch(seed)) if whole else function(model, torch.tanh(model.body(batch(seed))))
            return out.square().mean()

        return train(model, optimizer, range(3), of)

    torch.compiler.reset()
    plain, theirs, model, optimizer = twins(tmp_path, make=lambda: Named(COMPILED[compute]), host_memory=None)
    wanted = losses(plain, theirs)
    with optimizer:
        assert losses(model, optimizer) == wanted


def test_cached_unit_is_offloaded_again_after_a_failed_read():
    failing = mock.Mock(wait=mock.Mock(side_effect=ValueError("checksum")))
    unit = CachedUnit(0, "unit", 0, 4096, pinned=False)
    unit.begin_read(failing, torch.empty(0))
    with pytest.raises(ValueError, match="checksum"):
        unit.arrive()
    assert unit.state is Bytes.OFFLOADED
    assert unit.read is None
    unit.begin_read(failing, torch.empty(0))
