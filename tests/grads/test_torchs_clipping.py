"""Tests `clip_grad_norm_` of torch over an offloaded model: the bits of training in memory, and nothing read for it."""

import itertools

import pytest
import torch
from parity.reference import Reference, threads_of_torch
from support.bits import same_bits, same_states
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import memascend
from memascend.params.settling import Settling

STEPS = 6
# What a loss is multiplied by: the norm of its gradient is far below the limit, or far above it.
MIXED = [1e-3, 1e-3, 1e3, 1e-3, 1e-3, 1e3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Mixture(nn.Module):
    """Gradients of several layouts, some large enough for two threads; a tied weight, and one without dimensions."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Conv2d(3, 24, 3, padding=1).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.wide = nn.Linear(24, 3000)
        self.wide.weight = nn.Parameter(self.wide.weight.detach().t().contiguous().t())
        self.back = nn.Linear(3000, 24, bias=False)
        # Their gradients are views of one.
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
    """The norms of all steps, and what the model came to."""
    norms = []
    for index in range(STEPS):
        backward(model, optimizer, index)
        norms.append(clip(model.parameters(), 1.0).clone())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


def in_memory(dtype, backward, clip=clip_grad_norm_):
    model = Mixture(dtype)
    return run(model, Reference(adamw(model)), backward, clip)


def offloaded(folder, dtype, **options):
    model = Mixture(dtype)
    return memascend.offload(model, adamw(model), storage=folder / "store", existing="replace", **options)


def require_same(one, other):
    assert all(map(same_bits, one[0], other[0])), (one[0], other[0])
    assert same_states(one[1], other[1])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loop", LOOPS)
def test_it_is_clipping_in_memory(tmp_path, loop, dtype, threads):
    with threads_of_torch(threads):
        expected = in_memory(dtype, LOOPS[loop])
        if dtype != torch.float16:
            # There the loss is scaled, and some steps overflow.
            assert {bool(norm > 1.0) for norm in expected[0]} == {True, False}
        model, optimizer = offloaded(tmp_path, dtype)
        with optimizer:
            require_same(run(model, optimizer, LOOPS[loop]), expected)


def by_tensor(parameters, limit):
    return clip_grad_norm_(parameters, limit, foreach=False)


def by_infinity(parameters, limit):
    return clip_grad_norm_(parameters, limit, norm_type=torch.inf)


def logs(parameters, limit):
    """As programs that log norms of parameters do, in another dtype and by dimensions."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        found += [gradient.norm(), torch.linalg.vector_norm(gradient, dtype=torch.float64), gradient.norm(1)]
        found += [gradient.norm(dim=0).sum()] if gradient.dim() else []
    clip_grad_norm_(parameters, limit)
    return torch.stack([one.double() for one in found])


def twice(parameters, limit):
    """The second time by gradients that were clipped."""
    first = clip_grad_norm_(parameters, limit).clone()
    return torch.stack([first, clip_grad_norm_(parameters, limit / 2), clip_grad_norm_(parameters, torch.inf)])


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("clip", [by_tensor, by_infinity, logs, twice])
def test_any_norm_is_that_of_memory(tmp_path, clip, dtype):
    expected = in_memory(dtype, one_backward, lambda parameters, limit: clip(list(parameters), limit))
    model, optimizer = offloaded(tmp_path, dtype)
    with optimizer:
        ours = run(model, optimizer, one_backward, lambda parameters, limit: clip(list(parameters), limit))
    require_same(ours, expected)


def test_a_norm_in_each_second_step_is_that_of_memory(tmp_path):
    def seldom():
        calls = itertools.count()
        return lambda *given: torch.zeros(()) if next(calls) % 2 else clip_grad_norm_(*given)

    expected = in_memory(torch.float32, one_backward, seldom())
    model, optimizer = offloaded(tmp_path, torch.float32)
    with optimizer:
        require_same(run(model, optimizer, one_backward, seldom()), expected)


# --- what is changed after it arrived -------------------------------------------------------------


def multiplies(model, *_):
    model.wide.weight.grad.mul_(3.0)


def adds(model, *_):
    model.wide.weight.grad.add_(torch.ones_like(model.wide.weight.grad))


def adds_a_number(model, *_):
    model.wide.weight.grad.add_(0.01)


def clamps(model, *_):
    model.wide.weight.grad.clamp_(-1e-6, 1e-6)


def copies(model, *_):
    model.wide.weight.grad.copy_(torch.full((3000, 24), 0.01))


def assigns(model, *_):
    model.wide.weight.grad = torch.full((3000, 24), 0.01, dtype=model.scale.dtype)


def writes_a_part(model, *_):
    model.wide.weight.grad.index_fill_(0, torch.tensor([2]), 0.5)


def drops(model, *_):
    model.wide.weight.grad = None


def walks_again(model, optimizer, index):
    optimizer.backward(loss_of(model, 50 + index))


def changes_its_norm(model, *_):
    """The tensor that a norm gives is the caller's."""
    model.wide.weight.grad.norm().zero_()
    torch._foreach_norm([model.wide.weight.grad], 2.0)[0].zero_()


CHANGES = [
    *(multiplies, adds, adds_a_number, clamps, copies, assigns, writes_a_part, drops, walks_again, changes_its_norm),
]


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_that_changes_after_it_arrived_has_its_new_norm(tmp_path, change, dtype):
    def changed(model, optimizer, index):
        one_backward(model, optimizer, index)
        if index > 2:
            change(model, optimizer, index)

    expected = in_memory(dtype, changed)
    model, optimizer = offloaded(tmp_path, dtype)
    with optimizer:
        require_same(run(model, optimizer, changed), expected)


@pytest.mark.parametrize("loop", ["one backward", "by layer"])
def test_steps_are_computed_again_after_zero_grad(tmp_path, loop):
    def again(model, optimizer, index):
        for number in (index + 1) % STEPS, index:
            optimizer.zero_grad()
            LOOPS[loop](model, optimizer, number)

    expected = in_memory(torch.float32, again)
    model, optimizer = offloaded(tmp_path, torch.float32)
    with optimizer:
        require_same(run(model, optimizer, again), expected)


def norm_of(gradients, clip):
    return get_total_norm(gradients, foreach=False if clip is by_tensor else None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("clip", [clip_grad_norm_, by_tensor])
def test_autocast_around_the_backward_changes_no_norm(tmp_path, clip, device):
    """On a GPU, lists of tensors have kernels of their own, and autocast gives norms another dtype."""
    model, optimizer = offloaded(tmp_path, torch.bfloat16, device=device)
    with optimizer:
        for index in range(STEPS):
            with torch.autocast(device, torch.bfloat16):
                one_backward(model, optimizer, index)
            plain = [parameter.grad.clone() for parameter in model.parameters()]
            assert same_bits(clip(model.parameters(), 1.0), norm_of(plain, clip))
            optimizer.step()
            optimizer.zero_grad()


# --- what it costs --------------------------------------------------------------------------------


def settled(model, optimizer):
    """The report once nothing is left of the last step's updates, which whoever reads state has made."""
    for parameter in model.parameters():
        optimizer.state_of(parameter)
    return optimizer.report()


def traffic(folder, loop, limit, **options):
    """Bytes of gradients that the steps after the second one read and wrote, and the report."""
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
    """What a step leaves is written in the next forward: no time decides which bytes are read."""
    monkeypatch.setattr(Settling, "settles", lambda *_: True)


@pytest.mark.parametrize("loop", ["one backward", "by layer"])
@pytest.mark.parametrize("limit", [1e9, 1e-9])
@pytest.mark.usefixtures("one_way")
def test_the_norm_of_gradients_that_arrive_whole_reads_none(tmp_path, loop, limit):
    ours, report = traffic(tmp_path, loop, limit)
    exact, other = traffic(tmp_path, loop, limit, max_grad_norm=limit)
    assert ours == exact
    # Where nothing is clipped, updates that began early stand.
    assert (report.early, report.anew) == (other.early, other.anew) == ((STEPS - 1, 0) if limit > 1 else (0, 0))


@pytest.mark.usefixtures("one_way")
def test_the_norm_of_sums_reads_each_gradient_once_more(tmp_path):
    (read, written), _ = traffic(tmp_path, "sums", 1e9)
    (exact, as_much), _ = traffic(tmp_path, "sums", 1e9, max_grad_norm=1e9)
    assert written == as_much
    assert read - exact == written // 3, "each micro-batch writes as much"
