"""Tests the norm of a step's gradients: there in every mode, whatever was done to them before step()."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memascend
from memascend import kernels
from memascend.grads.backward import Norms, measure, read
from memascend.tensors import rounded, total

WIDTH = 24


class Mixed(nn.Module):
    """Parameters that lie in memory in several orders, one of them a scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.turned = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return torch.tanh((x @ self.square + x.repeat(1, 2) @ self.turned) * self.scalar).sum()


def batch(seed):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def norm_of(parameters):
    return math.sqrt(sum(float(parameter.grad.double().square().sum()) for parameter in parameters))


@pytest.fixture(params=["fused", "ssd", "ram"])
def pair(request, tmp_path):
    """The model in RAM, the model offloaded, and what has charge of its gradients."""
    plain, model = Mixed(), Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = memascend.offload(
        model, optimizer, storage=tmp_path / "s", gradients=request.param, host_memory="64MiB"
    )
    with optimizer:
        yield plain, model, optimizer


def test_the_norm_is_there_after_a_step_in_every_mode(pair):
    plain, model, optimizer = pair
    plain(batch(1)).backward()
    model(batch(1)).backward()
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(norm_of(plain.parameters()), rel=1e-6)


@pytest.mark.parametrize("pair", ["ssd", "ram"], indirect=True)
@pytest.mark.parametrize("change", ["clip", "clamp", "double", "twice", "none", "assigned"])
def test_the_norm_is_of_what_the_step_uses(pair, change):
    plain, model, optimizer = pair
    for of in (plain, model):
        of(batch(1)).backward()
        first = next(of.parameters())
        if change == "clip":
            torch.nn.utils.clip_grad_norm_(of.parameters(), 0.25)
        elif change == "clamp":
            first.grad.clamp_(-0.01, 0.01)
        elif change == "double":
            first.grad.mul_(2)
        elif change == "twice":
            of(batch(2)).backward()
        elif change == "none":
            first.grad = None
        else:
            first.grad = torch.ones(WIDTH, WIDTH)
    wanted = norm_of(parameter for parameter in plain.parameters() if parameter.grad is not None)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(wanted, rel=1e-6)


def test_each_step_has_its_own_norm(pair):
    plain, model, optimizer = pair
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for seed in range(3):
        plain(batch(seed)).backward()
        model(batch(seed)).backward()
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(norm_of(plain.parameters()), rel=1e-5)
        theirs.step()
        theirs.zero_grad()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (1, 0, 2, 3)])
def test_a_gradient_is_measured_in_any_order_and_dtype(dtype, order):
    gradient = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(1)).to(dtype).permute(order)
    ((bad, squared),) = read([measure(gradient, kernels.check_and_unscale, kernels.checked)])
    assert not bad
    assert rounded(squared) == pytest.approx(float(gradient.abs().double().square().sum()), rel=1e-6)
    gradient[(0,) * 4] = math.nan
    assert read([measure(gradient, kernels.check_and_unscale, kernels.checked)])[0][0]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch, about torch
def test_a_sparse_gradient_is_measured():
    gradient = torch.sparse_coo_tensor([[1, 3, 1]], torch.tensor([3.0, 4.0, 1.0]), (5,), check_invariants=True)
    ((bad, squared),) = read([measure(gradient, kernels.check_and_unscale, kernels.checked)])
    assert not bad
    assert rounded(squared) == 32.0


def test_a_norm_is_that_of_the_exact_sum_in_any_order_and_division():
    """Of values of which most vanish beside the largest, which any sum of floats would drop."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-40, 3, (5000,), generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        values = (torch.randn(5000, generator=generator) * 2.0**exponents).to(dtype)
        wanted = math.fsum(values.double().square().tolist())
        for piece in (5000, 1, 333, 512):
            parts = [kernels.checked(part)[1] for part in values[torch.randperm(5000)].split(piece)]
            assert rounded(total(parts)) == wanted
        assert float(kernels.check_and_unscale(list(values.clone().split(700)))[1]) == wanted


def test_ranks_add_what_none_of_them_has_rounded():
    """As many ranks as it takes for their roundings to show."""
    values = torch.randn(999, generator=torch.Generator().manual_seed(5))
    figures = SimpleNamespace(everyone=lambda mine: [mine] * 1001)
    norms = Norms(kernels.check_and_unscale, kernels.checked, figures)
    gradient = SimpleNamespace(name="only")
    norms.measure_once(gradient, values)
    wanted = math.fsum(values.double().square().tolist() * 1001)
    assert norms.of([(gradient, values)]) == (True, math.sqrt(wanted))
