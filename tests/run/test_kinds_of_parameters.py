"""Tests parameters that are not matrices of floats: float64, whole numbers, complex, empty, frozen."""

import copy

import pytest
import torch
from support.bits import same_bits

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


def train(trained, optimizer, steps):
    dtype = trained.last.weight.dtype
    for step in range(steps):
        inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = trained(inputs).square().mean()
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def same_run(tmp_path, plain, make, **options):
    trained = copy.deepcopy(plain)
    train(plain, make(plain), 4)
    trained, optimizer = memascend.offload(trained, make(trained), storage=tmp_path / "store", **options)
    train(trained, optimizer, 4)
    with memascend.materialized(trained):
        assert all(map(same_bits, list(trained.parameters()), list(plain.parameters())))
    optimizer.close()


def adam(trained):
    return torch.optim.NAdam(trained.parameters(), lr=0.01)


def sgd(trained):
    return torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("gradients", ["fused", "ram"])
@pytest.mark.parametrize("make", [sgd, lambda trained: torch.optim.AdamW(trained.parameters(), lr=0.01)])
def test_float64_trains_by_torchs_own_code(tmp_path, make, gradients):
    plain = Odd(torch.randn(3, dtype=torch.float64), trained=True).double()
    same_run(tmp_path, plain, make, gradients=gradients)


@pytest.mark.parametrize("gradients", ["auto", "ssd"])
def test_float64_whose_gradients_would_wait_on_storage_is_refused_by_name(tmp_path, gradients):
    trained = Odd(torch.randn(3, dtype=torch.float64), trained=True)
    with pytest.raises(memascend.ConfigError, match="odd is float64, and gradients of float64 do not wait on storage"):
        memascend.offload(trained, sgd(trained), storage=tmp_path / "store", gradients=gradients)
    assert not (tmp_path / "store").exists()
    frozen = Odd(torch.randn(3, dtype=torch.float64), trained=False)
    # Nor is one that the optimizer does not own.
    optimizer = torch.optim.SGD([*frozen.first.parameters(), *frozen.last.parameters()], lr=0.1)
    _, optimizer = memascend.offload(frozen, optimizer, storage=tmp_path / "store", gradients=gradients)
    optimizer.close()


@pytest.mark.parametrize("make", [adam, sgd, lambda trained: Owning(trained.parameters())])
def test_whole_numbers_that_the_optimizer_owns_stay_as_they_are(tmp_path, make):
    same_run(tmp_path, Odd(torch.arange(5), trained=False), make)


class Owning(torch.optim.Optimizer):
    """A class that is tried before it streams."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_what_has_no_update_is_refused_by_name(tmp_path, dtype):
    trained = Odd(torch.randn(5).to(dtype), trained=True)
    with pytest.raises(memascend.ConfigError, match=f"odd is {dtype}, and parameters of float32"):
        memascend.offload(trained, adam(trained), storage=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_unit_without_elements_is_refused_by_name(tmp_path):
    trained = Odd(torch.empty(0, 4), trained=True)
    with pytest.raises(memascend.ConfigError, match="odd has no elements, and stands alone"):
        memascend.offload(trained, adam(trained), storage=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_an_empty_parameter_beside_others_trains(tmp_path):
    plain = Odd(torch.randn(3), trained=True)
    plain.first.extra = torch.nn.Parameter(torch.empty(0, 4))
    same_run(tmp_path, plain, adam)


def test_a_frozen_model_computes_and_steps_do_nothing(tmp_path):
    plain = Odd(torch.randn(3), trained=False)
    plain.requires_grad_(False)
    same_run(tmp_path, plain, adam)
