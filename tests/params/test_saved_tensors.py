"""Tests views of offloaded weights that autograd saves. A restored view has the strides and bits of the saved view."""

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
    """Multiplies the input by views of the block's weight. Autograd saves views for the gradient of the input."""

    def __init__(self, view):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH, 2))
        self.view = view

    def forward(self, x):
        return torch.tanh(self.view(self.weight, x))


class Views(nn.Module):
    """Blocks whose weights are offloaded again before the backward begins."""

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
    """Multiplies by the imaginary part of a conjugate. This part is a view whose values torch negates at each read."""
    return torch.view_as_complex(weight).conj().imag * x


def cut(weight, x):
    cuts = weight[1::2, :, 0].repeat(2, 1) * x + weight.permute(2, 0, 1)[1] * x
    return cuts + weight[3, :, 1].expand(2 * WIDTH, WIDTH) * x


@pytest.mark.parametrize("view", [conjugate, negated, cut])
def test_saved_view_of_a_weight_gives_the_same_gradient_as_torch(tmp_path, view):
    def loss(model, seed):
        return model(torch.randn(2 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)))

    twins = chains.twins(tmp_path, "fused", make=lambda: Views(view), rate=0.01, host_memory=None)
    chains.require_same_training(*twins, range(2), loss)


class Recomputed(nn.Module):
    """Layers that the backward recomputes after their weights were offloaded."""

    def __init__(self, compute):
        super().__init__()
        torch.manual_seed(0)
        # With a bias, the layers would call addmm, which `keep_products` does not save.
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.compute = compute

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(self.compute(layer, x))
        return x.square().sum()


def keep_products(context, func, *args, **kwargs):
    del context, args, kwargs
    return CheckpointPolicy.MUST_SAVE if func is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def nested(layer, x):
    inner = functools.partial(checkpoint, layer, use_reentrant=False)
    return checkpoint(inner, x, use_reentrant=False)


WAYS = {
    "to the end": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
    "nested": nested,
    "selective": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, keep_products),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_recomputation_that_rereads_evicted_units_equals_torch(tmp_path, way):
    plain, theirs, model, optimizer = chains.twins(
        tmp_path, "fused", make=lambda: Recomputed(WAYS[way]), host_memory=None
    )
    with optimizer:
        units = optimizer._session.run.residency.units
        for _ in range(2):
            x = torch.ones(4, WIDTH)
            wanted, loss = plain(x), model(x)
            assert same_bits(wanted, loss)
            for unit in units.all:
                units.evict(unit)
                unit.forget()
            for of, step in ((wanted, theirs), (loss, optimizer)):
                of.backward()
                step.step()
                step.zero_grad()
        chains.require_same(plain, model)


class Changed(nn.Module):
    """Changes the input of `second` in place after autograd saved this input."""

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
    """Multiplies by a parameter, and saves the parameter itself for the backward."""

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


def test_autograd_function_restores_saved_parameters_with_a_second_thread():
    over, found = threading.Event(), []
    thread = threading.Thread(target=over.wait)
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
        thread.join()
    assert all(map(same_bits, *found))
