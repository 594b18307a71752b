"""Tests writes to weights by `optimizer.edit()` and `load_state_dict()`: they commit the changes, or change nothing."""

from functools import partial

import pytest
import torch
from support.bits import same_bits, same_states
from support.chains import chain, loss_of, offloaded, step, train, values
from torch import nn

from memascend import ConfigError, UsageError

FUSED = partial(torch.optim.AdamW, eps=1e-3, fused=True)


def made(folder, model=None, **options):
    options = {"host_memory": "64MiB", **options}
    return offloaded(folder / "run.store", chain(3, bias=True) if model is None else model, FUSED, **options)


# --- edit() -------------------------------------------------------------------------------


def edited(optimizer, parameters, write):
    with optimizer.edit(parameters) as values:
        write(values)


def test_edit_without_changes_writes_nothing_and_tied_names_share_a_tensor(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model, optimizer = made(tmp_path, model)
    with optimizer:
        written = optimizer.report().written
        edited(optimizer, model.parameters(), lambda values: values[0].mul_(1))
        assert optimizer.report().written == written
        with optimizer.edit([model[0].weight, model[1].weight]) as (one, other):
            assert one is other
            one.fill_(0.25)
        assert bool((model[1].weight == 0.25).all())


def test_edit_commits_nothing_after_an_exception_or_with_a_staged_step(tmp_path):
    model, optimizer = made(tmp_path)
    weight = model[0].weight
    with optimizer:
        step(model, optimizer)
        before = values(model)
        with pytest.raises(ZeroDivisionError):
            edited(optimizer, weight, lambda values: values.zero_() / (1 // 0))
        with pytest.raises(UsageError, match="a step is staged"):
            edited(optimizer, weight, lambda values: (values.zero_(), loss_of(model).backward()))
        optimizer.zero_grad()
        with pytest.raises(UsageError, match=r"edit\(\) no longer has the tensors that it had"):
            edited(optimizer, [weight], lambda values: values.__setitem__(0, torch.zeros(32, 32)))
        for other in (torch.zeros(2), model[0], None):
            with pytest.raises(ConfigError, match=r"parameters of the offloaded model"):
                edited(optimizer, other, torch.Tensor.zero_)
        assert same_states(values(model), before)
        step(model, optimizer)


def test_edits_of_one_unit_nest_and_later_writes_fail_the_step(tmp_path):
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


def test_edit_raises_if_its_commit_would_undo_a_step_inside_it(tmp_path):
    model, optimizer = made(tmp_path)
    with optimizer:
        step(model, optimizer)
        # Both edits run a step inside of the edit. The first edit changes no value, so the edit commits nothing after
        # the step. The second edit changes values and must raise, because a commit of the edit would undo the step.
        edited(optimizer, model[0].weight, lambda _: step(model, optimizer))
        with pytest.raises(UsageError, match=r"0\.weight.* inside this edit\(\)"):
            edited(optimizer, model[0].weight, lambda values: (values.zero_(), step(model, optimizer)))
        assert optimizer.steps == 3
        step(model, optimizer)
        plain = chain(3, bias=True)
        train(plain, FUSED(plain.parameters(), lr=1e-2), [1] * 4)
        assert same_states(values(model), values(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edited_frozen_weight_equals_torch_after_it_is_unfrozen(tmp_path, dtype):
    options = {} if dtype == torch.float32 else {"master_dtype": None}
    plain, model = (chain(3, bias=True, dtype=dtype) for _ in range(2))
    model, optimizer = made(tmp_path, model, **options)
    theirs = FUSED(plain.parameters(), lr=1e-2)
    with optimizer:
        for index in range(4):
            for one, own in ((plain, theirs), (model, optimizer)):
                one[0].weight.requires_grad_(index != 1)
                step(one, own, index)
            if index == 1:
                with torch.no_grad(), optimizer.edit(model[0].weight) as given:
                    given.mul_(0.5)
                    plain[0].weight.mul_(0.5)
        assert all(map(same_bits, model.parameters(), plain.parameters()))


# --- load_state_dict() --------------------------------------------------------------------


def stack():
    """Returns a model of linear layers and a batch norm. The buffer `table` is a strided part of a larger tensor."""
    model = nn.Sequential(*chain(bias=True), nn.BatchNorm1d(32))
    model.register_buffer("table", torch.zeros(2, 4)[:, :2])
    return model


@pytest.mark.parametrize("wrong", ["shape", "missing", "unexpected"])
def test_failed_load_state_dict_changes_no_values(tmp_path, wrong):
    model, optimizer = made(tmp_path, stack())
    step(model, optimizer)
    before = values(model)
    loaded = {name: tensor + 1 for name, tensor in before.items()}
    if wrong == "shape":
        loaded["1.weight"] = torch.zeros(3, 3)
    elif wrong == "missing":
        del loaded["1.weight"]
    else:
        loaded["more"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="Error"):
        model.load_state_dict(loaded)
    assert same_states(values(model), before)
    # The next load fits. This load must commit no values of the failed load. The strided buffer `table` has unused
    # elements between its rows, which the load must not commit.
    before |= {"1.bias": before["1.bias"] + 2, "table": torch.tensor([[0.0, 0.0], [0.0, 5.0]])}
    model.load_state_dict({name: before[name] for name in ("1.bias", "table")}, strict=False)
    optimizer.close()
    model, optimizer = made(tmp_path, stack(), existing="resume")
    with optimizer:
        assert same_states(values(model), before)


def test_load_state_dict_accepts_a_state_dict_modified_in_place(tmp_path):
    model, optimizer = made(tmp_path)
    with optimizer:
        step(model, optimizer)
        state = model.state_dict()
        expected = {name: values * 0.5 for name, values in state.items()}
        for tensor in state.values():
            tensor.mul_(0.5)
        model.load_state_dict(state)
        assert same_states(values(model), expected)
        step(model, optimizer)


class Shift(nn.Module):
    """A module whose graph saves no weight."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x + self.one + self.other).sum()


def test_backward_of_a_graph_from_before_load_state_dict_equals_torch(tmp_path):
    plain = Shift()
    theirs = FUSED(plain.parameters(), lr=1e-2)
    model, optimizer = made(tmp_path, Shift(), gradients="fused", host_memory=None)
    with optimizer:
        for of, opt in ((plain, theirs), (model, optimizer)):
            loss = of(torch.zeros(4))
            of.load_state_dict({"one": torch.full((4,), 2.0), "other": torch.full((4,), 3.0)})
            loss.backward()
            opt.step()
        assert same_states(values(model), values(plain))
