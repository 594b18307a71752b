"""Tests that tensors which autograd saves, and which lie in a unit, come back as the views that they were."""

import copy
import functools
import threading

import pytest
import torch
from support import chains
from support.bits import same_bits
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memascend

WIDTH = 8


class Block(nn.Module):
    """Multiplies by a view of its weight, which the product saves for the gradient of the other factor."""

    def __init__(self, view):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH, 2))
        self.view = view

    def forward(self, x):
        return torch.tanh(self.view(self.weight, x))


class Views(nn.Module):
    """Blocks that are away again when the backward begins."""

    def __init__(self, view):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(view) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def conjugate(weight, x):
    return (torch.view_as_complex(weight).conj() * x).real + (torch.view_as_complex(weight).conj() * x).imag


def negated(weight, x):
    """What is imaginary of a conjugate is a view whose sign is turned when it is read."""
    return torch.view_as_complex(weight).conj().imag * x


def cut(weight, x):
    return weight[1::2, :, 0].repeat(2, 1) * x + weight.permute(2, 0, 1)[1] * x


def broadcast(weight, x):
    return weight[3, :, 1].expand(2 * WIDTH, WIDTH) * x


@pytest.mark.parametrize("view", [conjugate, negated, cut, broadcast])
def test_a_saved_view_of_a_weight_has_the_same_gradient(tmp_path, view):
    plain = Views(view)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.01)
    model, optimizer = chains.offloaded(tmp_path / "s", Views(view), torch.optim.SGD, gradients="fused")
    with optimizer:
        for seed in range(2):
            x = torch.randn(2 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))
            for of, step in ((plain, theirs), (model, optimizer)):
                of(x).backward()
                step.step()
                step.zero_grad()
        chains.require_same(plain, model)


class Adapted(nn.Module):
    """A frozen norm and a frozen matrix, and factors beside it that learn, as adapters do."""

    def __init__(self):
        super().__init__()
        self.norm, self.frozen = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        for parameter in (self.scale, self.norm.weight, self.frozen.weight):
            parameter.requires_grad_(False)

    def forward(self, x):
        # Each product with a parameter saves the parameter itself, and no view of it.
        y = self.scale * self.norm(x)
        return x + torch.tanh(self.frozen(y) + self.up(self.down(y)))


class Recomputed(nn.Module):
    """Blocks that the backward computes again, when they are away."""

    def __init__(self, compute):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.compute = compute

    def forward(self, x):
        for block in self.blocks:
            x = self.compute(block, x)
        return x.float().square().sum()


def keep_products(context, func, *args, **kwargs):
    del context, args, kwargs
    return CheckpointPolicy.MUST_SAVE if func is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def nested(block, x):
    inner = functools.partial(checkpoint, block, use_reentrant=False)
    return checkpoint(inner, x, use_reentrant=False)


WAYS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "to the end": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
    "nested": nested,
    "selective": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, keep_products),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_recomputed_block_with_frozen_weights_has_the_same_gradients(tmp_path, way, dtype):
    plain = Recomputed(WAYS[way]).to(dtype)
    model = copy.deepcopy(plain)
    theirs, own = (torch.optim.SGD([p for p in of.parameters() if p.requires_grad], lr=0.1) for of in (plain, model))
    model, optimizer = memascend.offload(model, own, storage=tmp_path / "s", gradients="fused", master_dtype=None)
    with optimizer:
        for seed in range(2):
            values = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
            inputs = [values.clone().requires_grad_() for _ in range(2)]
            losses = []
            for x, of, step in zip(inputs, (plain, model), (theirs, optimizer), strict=True):
                losses.append(of(x))
                losses[-1].backward()
                step.step()
                step.zero_grad()
            assert same_bits(*losses)
            assert same_bits(inputs[0].grad, inputs[1].grad)
        with memascend.materialized(model):
            for wanted, got in zip(plain.parameters(), model.parameters(), strict=True):
                assert same_bits(wanted, got)


def test_what_a_unit_takes_to_be_read_again_is_no_part_of_a_selective_checkpoint(tmp_path):
    plain = Recomputed(WAYS["selective"])
    model = copy.deepcopy(plain)
    model, optimizer = memascend.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), storage=tmp_path / "s")
    with optimizer:
        units = optimizer._session.run.residency.units
        for _ in range(2):
            x = torch.ones(4, WIDTH)
            (want := plain(x)).backward()
            loss = model(x)
            for home in units.homes:
                units.evict(home)
                home.forget()
            loss.backward()
            assert same_bits(want, loss)


class Changed(nn.Module):
    """A layer whose input is changed in place after the layer saved it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        result = self.second(x)
        x.mul_(2)
        return result.sum()


def test_an_activation_that_was_changed_in_place_is_refused_as_in_memory():
    model = Changed()
    model, optimizer = memascend.offload(model, torch.optim.AdamW(model.parameters()))
    with optimizer, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(2, WIDTH)).backward()


class Product(torch.autograd.Function):
    """Saves the parameter itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(WIDTH) for _ in range(4))

    def forward(self, x):
        for weight in self.weights:
            x = Product.apply(x, weight)
        return x.sum()


@pytest.mark.parametrize("beside", [False, True])
def test_a_function_of_the_users_gets_each_parameter_that_it_saved_also_beside_another_thread(beside):
    over, found = threading.Event(), []
    thread = threading.Thread(target=over.wait)
    if beside:
        thread.start()
    try:
        for offloaded in (False, True):
            model, x = Products(), torch.arange(1.0, WIDTH + 1).requires_grad_()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if offloaded:
                model, optimizer = memascend.offload(model, optimizer)
            model(x).backward()
            optimizer.step()
            found.append([x.grad, *(value.clone() for value in model.state_dict().values())])
        optimizer.close()
    finally:
        over.set()
        if beside:
            thread.join()
    assert all(map(same_bits, *found))
