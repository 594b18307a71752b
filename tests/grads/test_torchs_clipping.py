"""Tests torch's `clip_grad_norm_` on an offloaded model: the same bits as in memory, and the bytes that it reads."""

from functools import partial

import pytest
import torch
from parity.reference import Reference, threads_of_torch
from support.bits import same_bits, same_states
from support.grids import covered
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import memascend
from memascend.params.settling import Settling

STEPS = 6
# Factors of the losses. In float32 and bfloat16, the norm of the gradients is below the limit in some steps, and far
# above the limit in the steps with the factor 1e3.
MIXED = [1e-3, 1e-3, 1e3, 1e-3, 1e-3, 1e3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Mixture(nn.Module):
    """A model with a tied weight, a 0-dim parameter, and gradients of several layouts.

    Some gradients are large enough for two threads.
    """

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Conv2d(3, 24, 3, padding=1).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.wide = nn.Linear(24, 3000)
        self.wide.weight = nn.Parameter(self.wide.weight.detach().t().contiguous().t())
        self.back = nn.Linear(3000, 24, bias=False)
        # The gradients of `left` and `right` are views of one tensor.
        self.left, self.right = nn.Parameter(torch.randn(5, 24)), nn.Parameter(torch.randn(7, 24))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.tied = nn.Linear(24, 24)
        self.tied.weight = self.blocks[0].weight
        self.to(dtype)

    def forward(self, x):
        x = self.image(x).mean((2, 3))
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.back(torch.tanh(self.wide(x))) * self.scale
        return self.tied(x) @ torch.cat([self.left, self.right]).t()


def batch(seed, dtype):
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.to(memory_format=torch.channels_last)


def loss_of(model, seed, scale=1.0):
    return model(batch(seed, model.scale.dtype).to(model.scale.device)).float().square().mean() * scale


def one_backward(model, optimizer, index):
    optimizer.backward(loss_of(model, index, MIXED[index]))


def sums(model, optimizer, index):
    for micro in range(3):
        optimizer.backward(loss_of(model, 10 * index + micro, MIXED[index] / 3))


def micro_batches(by_layer):
    def accumulated(model, optimizer, index):
        batches = range(10 * index, 10 * index + 3)
        if hasattr(optimizer, "accumulate"):
            optimizer.accumulate(lambda one: loss_of(model, one), batches, scale=MIXED[index], by_layer=by_layer)
        else:
            for one in batches:
                optimizer.backward(loss_of(model, one) * MIXED[index])

    return accumulated


LOOPS = {
    "one backward": one_backward,
    "sums": sums,
    "accumulate()": micro_batches(by_layer=False),
    "by layer": micro_batches(by_layer=True),
}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def run(model, optimizer, backward, clip=clip_grad_norm_):
    """Trains; returns the norms of all steps, and the final values."""
    norms = []
    for index in range(STEPS):
        backward(model, optimizer, index)
        norms.append(clip(list(model.parameters()), 1.0).clone())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


def offloaded(folder, dtype, **options):
    model = Mixture(dtype)
    return memascend.offload(model, adamw(model), storage=folder / "store", existing="replace", **options)


def require_bits_of_memory(folder, dtype, backward, clip=clip_grad_norm_):
    """Requires that the offloaded run has the bits of the run in memory; returns the norms."""
    model = Mixture(dtype)
    norms, values = run(model, Reference(adamw(model)), backward, clip)
    model, optimizer = offloaded(folder, dtype)
    with optimizer:
        ours = run(model, optimizer, backward, clip)
    assert all(map(same_bits, ours[0], norms)), (ours[0], norms)
    assert same_states(ours[1], values)
    return norms


@pytest.mark.parametrize(("loop", "dtype", "threads"), covered(LOOPS, DTYPES, [1, 2]))
def test_clip_grad_norm_has_same_bits_as_in_memory(tmp_path, loop, dtype, threads):
    with threads_of_torch(threads):
        norms = require_bits_of_memory(tmp_path, dtype, LOOPS[loop])
    # In float16, perhaps no norm is below the limit.
    assert dtype == torch.float16 or {bool(norm > 1.0) for norm in norms} == {True, False}


def logs(parameters, limit):
    """Computes norms as logging code does: of tensors, lists and dimensions. Then clips the gradients.

    Returns the norms.
    """
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        found += [gradient.norm(), torch.linalg.vector_norm(gradient, dtype=torch.float64), gradient.norm(1)]
        found += [torch.norm(gradient), torch.linalg.norm(gradient), *torch._foreach_norm([gradient], 2, torch.float64)]
        found += [gradient.norm(dim=0).sum()] if gradient.dim() else []
    clip_grad_norm_(parameters, limit)
    return torch.stack([one.double() for one in found])


NORMS = {
    "by tensor": partial(clip_grad_norm_, foreach=False),
    "by list": partial(clip_grad_norm_, norm_type=3.0, foreach=True),
    "by infinity": partial(clip_grad_norm_, norm_type=torch.inf),
    "logs": logs,
}


@pytest.mark.parametrize(("norm", "dtype"), covered(NORMS, DTYPES[:2]))
def test_every_norm_function_has_same_bits_as_in_memory(tmp_path, norm, dtype):
    require_bits_of_memory(tmp_path, dtype, one_backward, NORMS[norm])


# --- gradients that change after their arrival ----------------------------------------------------


def changes_its_norm(p):
    """Zeroes the tensors that norm calls return. The norm of the gradient must not change."""
    p.grad.norm().zero_()
    torch._foreach_norm([p.grad], 2.0)[0].zero_()


# Functions that change the gradient of a parameter, or a norm that torch returned for this gradient.
CHANGES = {
    "multiplied": lambda p: p.grad.mul_(3.0),
    "a number is added": lambda p: p.grad.add_(0.01),
    "copied": lambda p: p.grad.copy_(torch.full(p.shape, 0.01)),
    "clipped by value": lambda p: clip_grad_value_([p], 1e-6),
    "a part is written": lambda p: p.grad.index_fill_(0, torch.tensor([2]), 0.5),
    "assigned": lambda p: setattr(p, "grad", torch.full(p.shape, 0.01, dtype=p.dtype)),
    "its norm is changed": changes_its_norm,
}


@pytest.mark.parametrize(("change", "dtype"), covered(CHANGES, DTYPES[:2]))
def test_a_gradient_that_changes_after_it_arrived_has_its_new_norm(tmp_path, change, dtype):
    def changed(model, optimizer, index):
        one_backward(model, optimizer, index)
        if index > 2:
            CHANGES[change](model.wide.weight)

    require_bits_of_memory(tmp_path, dtype, changed)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("foreach", [None, False])
def test_autocast_around_the_backward_changes_no_norm(tmp_path, foreach, device):
    """The norm that clipping returns must have the bits of torch's norm of plain gradients.

    memascend computes norms as gradients arrive, here under autocast. On a GPU, autocast changes the dtype of norms,
    and torch has special kernels for lists of tensors.
    """
    model, optimizer = offloaded(tmp_path, torch.bfloat16, device=device)
    with optimizer:
        for index in range(STEPS):
            with torch.autocast(device, torch.bfloat16):
                one_backward(model, optimizer, index)
            plain = [parameter.grad.clone() for parameter in model.parameters()]
            norm = get_total_norm(plain, foreach=foreach)
            assert same_bits(clip_grad_norm_(model.parameters(), 1.0, foreach=foreach), norm)
            optimizer.step()
            optimizer.zero_grad()


# --- bytes that clipping reads --------------------------------------------------------------------


def settled(model, optimizer):
    """Reads all optimizer state, which completes deferred updates; returns the report."""
    for parameter in model.parameters():
        optimizer.state_of(parameter)
    return optimizer.report()


def traffic(folder, loop, limit, **options):
    """Returns the bytes of gradients that the steps after the second step read and wrote, and the final report."""
    model, optimizer = offloaded(folder, torch.bfloat16, **options)
    with optimizer:
        for index in range(STEPS):
            if index == 2:
                before = settled(model, optimizer)
            LOOPS[loop](model, optimizer, index)
            if "max_grad_norm" not in options:
                clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            assert "max_grad_norm" in options or optimizer.grad_norm <= 1.01 * limit
            optimizer.zero_grad()
        after = settled(model, optimizer)
    kinds = zip((after.read, after.written), (before.read, before.written), strict=True)
    return [now["gradients"] - then["gradients"] for now, then in kinds], after


@pytest.fixture
def one_way(monkeypatch):
    """Makes a unit's first fetch after a step write deferred updates, so that read bytes do not depend on timing."""
    monkeypatch.setattr(Settling, "settles", lambda *_: True)


@pytest.mark.parametrize("loop", ["one backward", "by layer"])
@pytest.mark.parametrize("limit", [1e9, 1e-9])
@pytest.mark.usefixtures("one_way")
def test_clip_grad_norm_moves_as_many_gradient_bytes_as_max_grad_norm(tmp_path, loop, limit):
    ours, report = traffic(tmp_path, loop, limit)
    exact, other = traffic(tmp_path, loop, limit, max_grad_norm=limit)
    assert ours == exact
    # If no step clips, step() keeps all updates that began early.
    assert (report.early, report.anew) == (other.early, other.anew) == ((STEPS - 1, 0) if limit > 1 else (0, 0))


@pytest.mark.usefixtures("one_way")
def test_the_norm_of_sums_reads_each_gradient_once_more(tmp_path):
    (read, written), _ = traffic(tmp_path, "sums", 1e9)
    (exact, as_much), _ = traffic(tmp_path, "sums", 1e9, max_grad_norm=1e9)
    assert written == as_much
    assert read - exact == written // 3, "one read is as large as the writes of one micro-batch"
