"""Tests the sum that is divided once, by whoever touches it first."""

import copy

import pytest
import torch
from support.bits import same_bits

from memascend.ranks.undivided import UndividedSum, divides_exactly


def sums():
    return torch.linspace(-4, 5, 12).reshape(3, 4)


TOUCHES = {
    "read": lambda one: one.clone(),
    "norm": torch.linalg.vector_norm,
    "norms": lambda one: torch._foreach_norm([sums(), one])[1],
    "number": lambda one: one.sum().item(),
    "list": lambda one: one.tolist(),
    "numpy": lambda one: one.numpy().sum(),
    "memory": lambda one: one.untyped_storage().nbytes(),
    "view": lambda one: one[1:].flatten(),
    "data": lambda one: one.data.abs(),
    "copy": copy.deepcopy,
    "words": repr,
    "change": lambda one: one.mul_(0.5),
    "changes": lambda one: torch._foreach_mul_([one], 0.5) and None,
    "out": lambda one: torch.add(sums(), sums(), out=one),
}


def plain(found):
    return found.tolist() if isinstance(found, torch.Tensor) else found


@pytest.mark.parametrize("name", TOUCHES)
def test_whoever_touches_it_has_the_quotient(name):
    sum_of_all, quotient = sums(), sums().div_(3.0)
    undivided = UndividedSum(sum_of_all, 3.0, sum_of_all.div_)
    assert undivided.is_to_be_divided_by(3.0)
    for _ in range(2):
        found = TOUCHES[name](undivided)
        assert not isinstance(found, UndividedSum)
        assert plain(found) == plain(TOUCHES[name](quotient))
        assert not undivided.is_to_be_divided_by(3.0)
    assert same_bits(undivided.rows, quotient)
    assert undivided.divided() is sum_of_all


def test_it_is_a_sum_until_then():
    rows = sums()
    undivided = UndividedSum(rows, 3.0, rows.div_)
    assert not undivided.is_to_be_divided_by(6.0)
    undivided.rows.add_(1.0)
    assert same_bits(rows, sums().add_(1.0))
    assert same_bits(undivided + 0.0, sums().add_(1.0).div_(3.0))


@pytest.mark.parametrize(
    ("divisor", "exact"), [(1.0, True), (2.0, True), (0.25, True), (-8.0, True), (3.0, False), (1.5, False)]
)
def test_powers_of_two_divide_exactly(divisor, exact):
    assert divides_exactly(divisor) == exact
