"""Tests gradient handles against plain gradients: accumulated, read, and refused where their memory is needed."""

import copy
import pickle

import pytest
import torch
from support.gradient_handles import KeptInMemory, assert_same, gradient, handle_of, handle_over
from torch.nn.utils import clip_grad_norm_

from memascend.errors import UsageError
from memascend.tensors import strides_of

pytestmark = pytest.mark.usefixtures("process_hooks")


def test_a_gradient_that_is_expanded_is_laid_out():
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    parameter.grad = handle = handle_of(torch.ones(4, 6))
    parameter.sum().backward()
    assert_same(handle, torch.full((4, 6), 2.0))


def test_a_sum_that_was_computed_elsewhere_has_its_arithmetic():
    handle = handle_of(torch.ones(3))
    handle.mul_(2)
    handle.gradient.replace_by_sum(torch.full((3,), 5.0))
    assert_same(handle, torch.full((3,), 5.0))


class Lazy(KeptInMemory):
    """An engine that holds on to what it gets, as one does that writes while backward goes on."""

    def spill(self, _, gradient, **__):
        self.waiting = gradient


def test_what_the_caller_does_to_its_tensor_later_does_not_matter():
    handle = handle_over(Lazy(torch.zeros(3)))
    mine = torch.ones(3)
    for give in (handle.add_, handle.copy_):
        give(mine)
        mine.mul_(5)
        assert handle.backing.waiting.tolist() == [1.0] * 3
        mine.fill_(1)


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


# --- reads ------------------------------------------------------------------------------------

READS = {
    "clone": lambda g: g.clone(),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "mask": lambda g: g[g > 0],
    "matmul": lambda g: torch.ones(2, 3) @ g,
    "into": lambda g: torch.zeros(3, 5).copy_(g),
    "foreach": lambda g: torch._foreach_mul([g], 2.0)[0],
    "deepcopy": copy.deepcopy,
    "equal": lambda g: torch.tensor(torch.equal(g, g)),
    "tolist": lambda g: torch.tensor(g.tolist()),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("call", READS.values(), ids=READS)
def test_reads_get_a_copy_with_the_arithmetic_done(call, inference):
    plain = gradient()
    handle = handle_of(plain)
    for value in (plain, handle):
        value.mul_(0.3)
    with torch.inference_mode(inference):
        got, expected = call(handle), call(plain)
    assert type(got) is torch.Tensor
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)
    assert "a read of gradients" in handle.backing.seen
    assert_same(handle, plain)


def test_a_copy_made_under_inference_mode_can_be_kept():
    handle = handle_of(torch.ones(3))
    with torch.inference_mode():
        handle.add_(torch.tensor([1.0, 2.0, 3.0]), alpha=2)
        handle.copy_(handle.clone())
    handle.backing.tensor.mul_(2)
    assert handle.backing.tensor.tolist() == [6.0, 10.0, 14.0]


def test_numbers_are_shown_and_those_of_scalars_are_numbers():
    handle = handle_of(torch.tensor(2.5))
    assert float(handle) == handle.item() == 2.5
    assert "2.5" in repr(handle)
    assert f"{handle:.2f}" == "2.50"
    assert bool(handle)


def test_metadata_costs_nothing():
    plain = gradient((4, 3), torch.bfloat16).t()
    handle = handle_of(plain)
    for name in ("shape", "dtype", "device", "layout", "is_sparse", "requires_grad", "nbytes", "ndim", "grad_fn"):
        assert getattr(handle, name) == getattr(plain, name), name
    for name in ("stride", "dim", "numel", "size", "element_size", "is_contiguous", "is_floating_point", "__len__"):
        assert getattr(handle, name)() == getattr(plain, name)(), name
    parameter = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    parameter.grad = handle
    assert parameter.grad is handle
    assert parameter.grad is not None
    handle.detach_().requires_grad_(False)
    assert torch.zeros_like(handle).stride() == plain.stride()
    handle.new_zeros(3)
    torch.empty_like(handle)
    assert handle.backing.seen == []


def test_strides_follow_the_parameter():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert strides_of(image.shape, (0, 2, 3, 1)) == image.stride()
    assert strides_of((2, 3, 4)) == torch.empty(2, 3, 4).stride()
    assert strides_of((2, 0, 4)) == torch.empty(2, 0, 4).stride()
    assert strides_of(()) == ()
    handle = handle_of(image)
    assert handle.is_contiguous(memory_format=torch.channels_last)
    handle.add_(torch.ones(2, 3, 4, 5))
    handle.copy_(handle * 2)
    assert_same(handle, (image + 1) * 2)


def test_detached_handles_are_the_same_gradient():
    handle = handle_of(torch.ones(3))
    alias = handle.detach()
    alias.mul_(3.0)
    handle.add_(torch.ones(3))
    alias.data.mul_(0.5)
    assert_same(handle, torch.full((3,), 2.0))
    assert_same(alias, torch.full((3,), 2.0))


REFUSED = {
    "view": lambda g: g.view(-1),
    "set a row": lambda g: g.__setitem__(0, 1.0),
    "expand": lambda g: g.expand(2, 3, 5),
    "in-place view": lambda g: g.t_(),
    "resize": lambda g: g.resize_(4),
    "set": lambda g: g.set_(torch.ones(3)),
    "numpy": lambda g: g.numpy(),
    "array": lambda g: g.__array__(),
    "dlpack": torch.from_dlpack,
    "data_ptr": lambda g: g.data_ptr(),
    "storage": lambda g: g.untyped_storage(),
    "typed storage": lambda g: g.storage(),
    "share": lambda g: g.share_memory_(),
    "apply": lambda g: g.apply_(lambda x: x),
    "pickle": pickle.dumps,
    "copy": copy.copy,
    "as_subclass": lambda g: g.as_subclass(torch.Tensor),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_needs_the_memory_is_refused(call):
    handle = handle_of(gradient())
    with pytest.raises(UsageError, match=r"layer.weight.*clone\(\).*gradients='ram'"):
        call(handle)
    assert_same(handle, gradient())


@pytest.mark.parametrize("foreach", [None, True, False])
def test_norms_hold_one_gradient_at_a_time(foreach):
    alive = []
    most = 0

    class Counting(KeptInMemory):
        def read_spilled(self, name, into):
            nonlocal most
            super().read_spilled(name, into)
            alive.append(torch.multiprocessing.reductions.StorageWeakRef(into.untyped_storage()))
            most = max(most, sum(not reference.expired() for reference in alive))

    parameters = [torch.nn.Parameter(torch.zeros(50)) for _ in range(6)]
    for parameter in parameters:
        parameter.grad = handle_over(Counting(gradient((50,))))
    clip_grad_norm_(parameters, 0.1, foreach=foreach)
    assert len(alive) == 6
    assert most == 1
