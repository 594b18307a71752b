"""Tests parameters that are not matrices of floats: float64, whole numbers, complex, empty, frozen."""

import copy

import pytest
import torch
from optim.test_bits import Doubled
from support.chains import batch, chain, require_same, step, twins

import memascend


class Odd(torch.nn.Module):
    """Two layers, and a parameter of another kind that takes no part, or takes part as it can."""

    def __init__(self, odd, *, trained):
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(8, 8)
        self.odd = torch.nn.Parameter(odd, requires_grad=trained)
        self.last = torch.nn.Linear(8, 4)

    def forward(self, inputs):
        odd = self.odd.abs().sum()
        return self.last(self.first(inputs) * (1 + odd.to(inputs.dtype)))


def train(trained, optimizer, *, clipped=False, accumulated=1):
    for number in range(4):
        for part in range(accumulated):
            trained(batch(100 * part + number, 8, trained.last.weight.dtype)).square().mean().backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def same_run(tmp_path, plain, make, loop=None, **options):
    trained, loop = copy.deepcopy(plain), loop or {}
    train(plain, make(plain), **loop)
    trained, optimizer = memascend.offload(trained, make(trained), storage=tmp_path / "store", **options)
    with optimizer:
        train(trained, optimizer, **loop)
        require_same(plain, trained)


def adam(trained):
    return torch.optim.NAdam(trained.parameters(), lr=0.01)


def sgd(trained):
    return torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)


def adamw(trained):
    return torch.optim.AdamW(trained.parameters(), lr=0.01)


@pytest.mark.parametrize(("make", "gradients"), [(sgd, "fused"), (adamw, "ram")])
def test_float64_trains_by_torchs_own_code(tmp_path, make, gradients):
    plain = Odd(torch.randn(3, dtype=torch.float64), trained=True).double()
    same_run(tmp_path, plain, make, gradients=gradients)


@pytest.mark.parametrize(("make", "host_memory"), [(sgd, None), (adamw, "64MiB"), (adam, "64MiB")])
def test_gradients_of_float64_wait_on_storage_as_they_are(tmp_path, make, host_memory):
    """Clipped and accumulated, and beside parameters of float32; in memory where a budget holds them."""
    loop = {"clipped": True, "accumulated": 3}
    plain = Odd(torch.randn(5000, dtype=torch.float64).mul(1e-4), trained=True)
    # In float32, AdamW has the bits of its fused kernel.
    plain = plain if host_memory and make is not adamw else plain.double()
    same_run(tmp_path, plain, make, loop, gradients="ssd", host_memory=host_memory)


def test_a_norm_of_float64_is_that_of_float64(tmp_path):
    """Squares that float32 has no number for."""
    plain = Odd(torch.randn(3, dtype=torch.float64), trained=True).double()
    _, optimizer = memascend.offload(plain, sgd(plain), storage=tmp_path / "store", gradients="ssd", max_grad_norm=1e-3)
    loss = plain(torch.ones(3, 8, dtype=torch.float64)).square().mean() * 1e60
    wanted = torch.nn.utils.get_total_norm(
        torch.autograd.grad(loss, list(plain.parameters()), retain_graph=True)
    ).item()
    assert wanted > 1e50
    loss.backward()
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(wanted, rel=1e-12)
    optimizer.close()


# The last one is of a class that is tried before it streams.
@pytest.mark.parametrize("make", [adam, sgd, lambda trained: Doubled(trained.parameters(), lr=0.01)])
def test_whole_numbers_that_the_optimizer_owns_stay_as_they_are(tmp_path, make):
    same_run(tmp_path, Odd(torch.arange(5), trained=False), make)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (torch.zeros(5, dtype=torch.complex64), "odd is torch.complex64, and parameters of float32"),
        (torch.zeros(5, dtype=torch.float8_e4m3fn), "odd is torch.float8_e4m3fn, and parameters of float32"),
        (torch.empty(0, 4), "odd has no elements, and stands alone"),
    ],
)
def test_what_has_no_update_or_no_elements_is_refused_by_name(tmp_path, odd, says):
    trained = Odd(odd, trained=True)
    with pytest.raises(memascend.ConfigError, match=says):
        memascend.offload(trained, adam(trained), storage=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_an_empty_parameter_beside_others_trains(tmp_path):
    plain = Odd(torch.randn(3), trained=True)
    plain.first.extra = torch.nn.Parameter(torch.empty(0, 4))
    same_run(tmp_path, plain, adam)


@pytest.mark.parametrize("gradients", ["ssd", "fused", "ram", "auto"])
def test_an_optimizer_may_own_frozen_parameters_which_thaw_later(tmp_path, gradients):
    plain, theirs, model, optimizer = twins(tmp_path, gradients, lambda: chain().requires_grad_(False))
    with optimizer:
        for index in range(4):
            for one, own in ((plain, theirs), (model, optimizer)):
                one[0].weight.requires_grad_(index >= 2)
                one[1].weight.requires_grad_(index >= 1)
                if index:
                    step(one, own, index)
                else:
                    own.step()
        assert optimizer.steps == 3
        require_same(plain, model)
