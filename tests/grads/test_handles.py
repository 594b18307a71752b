"""Tests gradient handles against plain gradients: what backwards accumulate, bit for bit."""

import pytest
import torch
from support.gradient_handles import DTYPES, KeptInMemory, assert_same, gradient, handle_of, handle_over

pytestmark = pytest.mark.usefixtures("process_hooks")


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_accumulates_into_what_is_kept(dtype):
    plain = torch.nn.Parameter(gradient(dtype=dtype))
    ours = torch.nn.Parameter(plain.detach().clone())
    inputs = [gradient(seed=seed, dtype=dtype) for seed in range(4)]
    (plain * inputs[0]).sum().backward()
    ours.grad = handle = handle_of(plain.grad)
    for value in inputs[1:]:
        for parameter in (plain, ours):
            (parameter * value).sum().backward()
        assert ours.grad is handle
    assert_same(handle, plain.grad)
    assert handle.backing.seen == ["add"] * 3
    assert handle.backing.reads == 1  # by assert_same
    assert handle.gradient.operations == []


def test_a_gradient_that_is_expanded_is_laid_out():
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    parameter.grad = handle = handle_of(torch.ones(4, 6))
    parameter.sum().backward()
    assert_same(handle, torch.full((4, 6), 2.0))


class Lazy(KeptInMemory):
    """A keeper that holds on to what it gets, as one does that writes while backward goes on."""

    def add(self, gradient, **_):
        self.waiting = gradient

    def assign(self, gradient):
        self.waiting = gradient


def test_what_the_caller_does_to_its_tensor_later_does_not_matter():
    handle = handle_over(Lazy(torch.zeros(3)))
    mine = torch.ones(3)
    for give in (handle.add_, handle.copy_):
        give(mine)
        mine.mul_(5)
        assert handle.backing.waiting.tolist() == [1.0] * 3
        mine.fill_(1)


@pytest.mark.parametrize(
    "way", [lambda p: p + 0, lambda p: p.view(2, 2) + 0, lambda p: p.view_as(p), lambda p: p + torch.ones(4)]
)
def test_a_gradient_that_the_caller_gave_is_copied(way):
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = handle = handle_over(Lazy(torch.zeros(4)))
    result = way(parameter)
    mine = torch.ones_like(result)
    result.backward(mine)
    mine.mul_(5)
    assert handle.backing.waiting.tolist() == [1.0] * 4


def test_a_gradient_for_two_parameters_is_copied_for_one():
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = handle_over(Lazy(torch.zeros(4)))
    ((parameters[0] + parameters[1]) * torch.randn(4)).sum().backward()
    first, second = (parameter.grad.backing.waiting for parameter in parameters)
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_a_gradient_that_nobody_else_has_is_not_copied():
    addresses = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(_, value):
            return value.clone()

        @staticmethod
        def backward(_, gradient):
            made = gradient * 2
            addresses.append(made.data_ptr())
            return made

    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = handle = handle_over(Lazy(torch.zeros(4)))
    Watched.apply(parameter).sum().backward()
    assert handle.backing.waiting.data_ptr() == addresses[0]


def test_create_graph_gives_a_real_gradient():
    parameter = torch.nn.Parameter(gradient())
    parameter.grad = handle_of(gradient(seed=1))
    torch.set_warn_always(True)  # else torch says it once, to whoever was first
    try:
        with pytest.warns(UserWarning, match="create_graph"):
            (parameter * parameter).sum().backward(create_graph=True)
    finally:
        torch.set_warn_always(False)
    assert type(parameter.grad) is torch.Tensor
    assert torch.equal(parameter.grad, gradient(seed=1) + 2 * parameter)
    parameter.grad = None
