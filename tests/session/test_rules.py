"""Tests units in memory: saved tensors, module hooks, users' gradient hooks, several threads, and autocast."""

import threading

import pytest
import torch
from support import chains
from support.chains import WIDTH, chain, require_same, twins
from support.chains import batch as x
from torch import nn
from torch.utils.checkpoint import checkpoint

import memascend

DEPTH = 6


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))


def offloaded(tmp_path, model=None, **options):
    """Offloads a model of blocks. Each block is a unit. The default budget has no room for all units at once."""
    units = [str(index) for index in range(DEPTH)]
    return chains.offloaded(tmp_path / "run.store", model or blocks(), torch.optim.SGD, 0.1, units=units, **options)


# --- saved tensors ------------------------------------------------------------------------------


def test_saved_tensors_hooks_of_users_get_no_weights_of_units(tmp_path):
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
        assert weight not in seen[1], "the user's hook got a weight of a unit"
        assert (4, WIDTH) in seen[1]
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        optimizer.step()
        require_same(plain, model)


# --- module hooks ------------------------------------------------------------------------------


def test_forward_pre_hook_from_before_offload_reads_weight_values(tmp_path):
    """A forward pre-hook of the user can read the weights before the module computes."""
    model = blocks()
    seen = []

    def looks(*_):
        seen.append(float(model[2][0].weight.data.sum()))

    # Registers a hook on the outer module of the unit, and a hook on the inner module, which owns the weight. The hook
    # of the outer module runs first.
    model[2].register_forward_pre_hook(looks)
    model[2][0].register_forward_pre_hook(looks)
    expected = float(model[2][0].weight.detach().sum())
    model, optimizer = offloaded(tmp_path, model)
    with optimizer:
        model(x())
    assert seen == [pytest.approx(expected)] * 2


def test_direct_call_of_module_forward_has_plain_parameters(tmp_path):
    """A loop may checkpoint `block.forward` instead of `block`. A call of `block.forward` runs no hooks of `block`."""
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


def test_module_releases_all_units_when_one_fails_to_materialize(tmp_path, monkeypatch):
    model = chain(bias=True)
    model[1].weight = model[0].weight  # layer 1 then needs the units of both layers
    model, optimizer = chains.offloaded(tmp_path / "run.store", model, torch.optim.SGD, units=["0", "1"])
    residency = optimizer._session.run.residency
    materialize, done = residency.materialize, []

    def fails_second(unit):
        if done:
            raise memascend.StorageError("no second one")
        done.append(unit.name)
        materialize(unit)

    with optimizer:
        expected = model[1](x())
        with monkeypatch.context() as patch:
            patch.setattr(residency, "materialize", fails_second)
            with pytest.raises(memascend.StorageError, match="no second"):
                model[1](x())
        assert done
        assert not any(unit.holders for unit in residency.units.all)
        assert torch.equal(model[1](x()), expected)


# --- users' gradient hooks ------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_user_gradient_hook_runs_only_for_its_parameter_until_removed(tmp_path, when):
    received, model = [], blocks()
    weight = model[1][0].weight

    def hook():
        return weight.register_post_accumulate_grad_hook(lambda parameter: received.append(parameter is weight))

    handle = hook() if when == "before" else None
    model, optimizer = offloaded(tmp_path, model, host_memory="64MiB")
    with optimizer:
        handle = handle or hook()
        chains.step(model, optimizer)
        handle.remove()
        chains.step(model, optimizer)
        assert received == [True]
    assert not weight._post_accumulate_grad_hooks


# --- units in use ------------------------------------------------------------------------------------


def turns():
    """Returns a model whose two layers share all parameters, and therefore belong to one unit."""
    model = chain(bias=True)
    model[1].weight, model[1].bias = model[0].weight, model[0].bias
    return model


def test_unit_stays_in_memory_while_another_thread_computes_with_it(tmp_path):
    plain, _, model, optimizer = twins(tmp_path, make=turns)
    known, inside, left = threading.Event(), threading.Event(), threading.Event()
    found = []

    def second():
        with torch.no_grad():
            # The first call of a module in a thread registers the thread as a user of the model.
            model(x())
            known.set()
            found.append(model[1](x()))

    other = threading.Thread(target=second)

    def is_there(*_):
        if known.is_set() and threading.current_thread() is other:
            inside.set()
            assert left.wait(20)
            found.append(torch.equal(model[1].weight.data, plain[1].weight))

    def leaves_later(*_):
        if known.is_set() and threading.current_thread() is not other:
            assert inside.wait(20)

    model[1].register_forward_pre_hook(is_there)
    model[0].register_forward_pre_hook(leaves_later)
    with optimizer, torch.no_grad():
        model(x())
        other.start()
        assert known.wait(20)
        model[0](x())
        left.set()
        other.join(20)
        assert found[0] is True, "the unit was evicted while another thread computed with it"
        assert torch.equal(found[1], plain[1](x()))


# --- 16-bit copies that autocast keeps --------------------------------------------------------------


def autocast(model, dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x(dtype=dtype)).float().sum().backward()


def test_autocast_of_fp32_weights_warns_at_the_first_forward(tmp_path):
    model, optimizer = chains.offloaded(tmp_path / "run.store")
    with optimizer:
        model(x()).sum().backward()
        optimizer.zero_grad()
        with pytest.warns(UserWarning, match=r"autocast.*bfloat16.*fp32 master weights"):
            autocast(model, torch.float32)
        optimizer.step()
        optimizer.zero_grad()
        # A second warning would fail the test.
        autocast(model, torch.float32)
    # If only some small layers of a model are in fp32, autocast must not cause a warning.
    model = nn.Sequential(nn.Linear(32, 32).bfloat16(), nn.LayerNorm(32), nn.Linear(32, 2))
    model, optimizer = chains.offloaded(tmp_path / "small.store", model)
    with optimizer:
        autocast(model, torch.bfloat16)
