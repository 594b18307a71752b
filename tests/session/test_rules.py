"""Tests rules of residency, saved tensors and module hooks one by one."""

import pytest
import torch
from support import chains
from support.chains import WIDTH, require_same
from support.chains import batch as x
from torch import nn

import memascend

DEPTH = 6


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))


def offloaded(tmp_path, model=None, *, host_memory=None):
    """Every block is a unit, in the smallest budget."""
    options = {"storage": tmp_path / "run.store", "kind": torch.optim.SGD, "rate": 0.1,
               "units": [str(index) for index in range(DEPTH)]}  # fmt: skip
    if host_memory is None:
        with pytest.raises(memascend.BudgetError) as refused:
            chains.offloaded(model=blocks(), host_memory=1, **options)
        host_memory = refused.value.smallest
    return chains.offloaded(model=model or blocks(), host_memory=host_memory, **options)


# --- saved tensors ------------------------------------------------------------------------------


def test_other_hooks_on_saved_tensors_get_what_is_not_ours(tmp_path):
    plain = blocks()
    model, optimizer = offloaded(tmp_path)
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with optimizer:
        seen = []
        for one in (plain, model):
            packed.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                one(x()).square().mean().backward()
            seen.append(packed.copy())
        weight = (WIDTH, WIDTH)
        assert weight in seen[0]
        assert weight not in seen[1], "a unit's bytes were handed on"
        assert (4, WIDTH) in seen[1]
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        optimizer.step()
        require_same(plain, model)


# --- gates -------------------------------------------------------------------------------------


def test_hooks_from_before_offload_see_real_parameters(tmp_path):
    """A parametrization, or any other pre-hook, computes with the weights that the module is about to use."""
    model = blocks()
    seen = []

    def looks(*_):
        seen.append(float(model[2][0].weight.data.sum()))

    # The unit as a whole, which is entered first, and the module that owns the weight.
    model[2].register_forward_pre_hook(looks)
    model[2][0].register_forward_pre_hook(looks)
    expected = float(model[2][0].weight.detach().sum())
    model, optimizer = offloaded(tmp_path, model)
    with optimizer:
        model(x())
    assert seen == [pytest.approx(expected)] * 2


def test_a_forward_that_is_called_by_itself_has_plain_parameters(tmp_path):
    """As some checkpointing does, in the backward: blocks are computed again, and no gate of theirs is passed."""
    from torch.utils.checkpoint import checkpoint

    model, optimizer = offloaded(tmp_path, host_memory="64MiB")
    kinds = []
    model[1][0].register_forward_pre_hook(lambda module, *_: kinds.append(type(module.weight)))
    with optimizer:
        out = x().requires_grad_()
        for block in model:
            out = checkpoint(block.forward, out, use_reentrant=False)
        out.square().mean().backward()
        optimizer.step()
    assert kinds == [nn.Parameter, nn.Parameter]


def test_an_exception_leaves_nothing_bound(tmp_path):
    """Raised in a forward, or by a checkpoint that has recomputed enough: at once, not with the next forward."""
    from torch.utils.checkpoint import checkpoint

    model, optimizer = offloaded(tmp_path, host_memory="64MiB")
    residency = optimizer._session.run.residency
    stopped = []

    def nothing_is_bound():
        return not any(home.holders for home in residency.units.homes) and (
            torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        )

    def fails(*_):
        raise KeyError("the user's own")

    with optimizer:
        with model[1][1].register_forward_pre_hook(fails), pytest.raises(KeyError):
            model(x())
        assert nothing_is_bound()
        # The last module's result is not saved, so that the recomputation ends within it.
        out = checkpoint(lambda y: model[1](model[0](y)) * 1, x().requires_grad_(), use_reentrant=False)
        out.register_hook(lambda gradient: stopped.append(nothing_is_bound()) or gradient)
        out.square().mean().backward()
        assert stopped == [True]
        assert nothing_is_bound()


def test_a_module_that_cannot_have_all_of_its_units_materializes_none(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight  # so that the second needs both units
    model, optimizer = chains.offloaded(tmp_path / "run.store", model, torch.optim.SGD, units=["0", "1"])
    residency = optimizer._session.run.residency
    materialize, done = residency.materialize, []

    def fails_second(home):
        if done:
            raise memascend.StorageError("no second one")
        done.append(home.name)
        materialize(home)

    with optimizer:
        expected = model[1](x())
        with monkeypatch.context() as patch:
            patch.setattr(residency, "materialize", fails_second)
            with pytest.raises(memascend.StorageError, match="no second"):
                model[1](x())
        assert done
        assert not any(home.holders for home in residency.units.homes)
        assert torch.equal(model[1](x()), expected)


# --- hooks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_of_the_user_stands_beside_ours_on_its_parameter_alone(tmp_path, when):
    heard = []
    model = blocks()
    weight = model[1][0].weight

    def hook():
        return weight.register_post_accumulate_grad_hook(lambda parameter: heard.append(parameter is weight))

    handle = hook() if when == "before" else None
    model, optimizer = offloaded(tmp_path, model, host_memory="64MiB")
    with optimizer:
        handle = handle or hook()
        chains.step(model, optimizer)
        assert heard == [True]
        handle.remove()
        chains.step(model, optimizer)
        assert heard == [True]
        assert optimizer.state_of(weight)["master"] is not None
    assert not weight._post_accumulate_grad_hooks


def test_a_module_of_parameters_alone_has_no_attribute_of_ours(tmp_path):
    """Its dict would no longer share its keys with those of its kind, and a deep model has thousands."""
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        assert set(vars(model[1][0])) == set(vars(blocks()[1][0]))
