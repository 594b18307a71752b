"""Tests `GradientHandle`, which `p.grad` holds, against plain gradients: sums, reads, arithmetic, rejected calls."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from support.bits import same_bits
from torch.nn.utils import clip_grad_norm_

from memascend.errors import UsageError
from memascend.grads.gradient import Gradient
from memascend.grads.lazy_grad import OPERATIONS_MAX
from memascend.grads.norms import Norms
from memascend.session.process_hooks import ProcessHooks
from memascend.tensors import strides_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def process_hooks():
    """Installs the hooks that offload() installs. With these hooks, torch accepts gradient handles in lists."""
    hooks = ProcessHooks()
    yield
    hooks.release()


class KeptInMemory:
    """Stands in for an engine, and for a run with one gradient. Keeps the gradient in memory, and counts its reads."""

    def __init__(self, tensor):
        self.seen = []
        self.reads = 0
        self.norms = Norms()
        self.engine = self.loop = self
        place = SimpleNamespace(
            parameter=SimpleNamespace(grad=None),
            name="layer.weight",
            shape=tensor.shape,
            stride=tensor.stride(),
            dtype=tensor.dtype,
            device=torch.device("cpu"),
        )
        self.gradient = Gradient(self, place, rule=None, step=0)
        self.gradient.store(tensor.clone())

    # --- methods of an engine -------------------------------------------------------

    def spill(self, _, gradient, *, add=False):
        if hasattr(self, "tensor"):
            assert gradient.stride() == self.tensor.stride()
            assert gradient.dtype == self.tensor.dtype
        assert type(gradient) is torch.Tensor
        self.tensor = self.tensor + gradient if add else gradient

    def read_spilled(self, _, into):
        self.reads += 1
        into.copy_(self.tensor)

    def spilled(self, _):
        return not self.tensor.isfinite().all().item(), 0.0

    # --- methods of a run's gradients -----------------------------------------------

    def settle_later(self, _):
        pass

    def add(self, gradient, values, *, summed):
        gradient.change(gradient.laid_out(values), add=not summed)

    def require_in_order(self, _):
        self.seen.append("add")

    def note_change(self):
        pass

    def notice(self, words):
        self.seen.append(words)


def handle_over(kept):
    handle = kept.gradient.handle
    handle.backing = kept
    return handle


def handle_of(tensor):
    return handle_over(KeptInMemory(tensor))


def assert_same(handle, expected):
    """Requires that a step would use `expected` as the gradient.

    Replays the recorded operations to compute the gradient. If these operations are reported as factors, also computes
    the gradient by multiplying by the factors.
    """
    got = handle.gradient.materialize()
    assert got.dtype == expected.dtype
    assert got.stride() == expected.stride()
    assert same_bits(got, expected)
    factors = handle.gradient.factors()
    if factors is not None:
        product = handle.gradient._gradients.tensor.clone()
        for factor in factors:
            product = (product.float() * torch.tensor(factor, dtype=torch.float32)).to(product.dtype)
        assert same_bits(product, expected)


def gradient(shape=(3, 5), dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def test_handle_adds_an_expanded_gradient_in_the_parameters_layout():
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    parameter.grad = handle = handle_of(torch.ones(4, 6))
    parameter.sum().backward()
    assert_same(handle, torch.full((4, 6), 2.0))


def test_replace_by_sum_discards_the_recorded_arithmetic():
    handle = handle_of(torch.ones(3))
    handle.mul_(2)
    handle.gradient.replace_by_sum(torch.full((3,), 5.0))
    assert_same(handle, torch.full((3,), 5.0))


class Lazy(KeptInMemory):
    """An engine that keeps the tensor that `spill` gets, as the real engine does until it has written the tensor."""

    def spill(self, _, gradient, **__):
        self.waiting = gradient


def test_handle_copies_operands_that_the_caller_changes_later():
    handle = handle_over(Lazy(torch.zeros(3)))
    mine = torch.ones(3)
    for give in (handle.add_, handle.copy_):
        give(mine)
        mine.mul_(5)
        assert handle.backing.waiting.tolist() == [1.0] * 3
        mine.fill_(1)
    handle, scalar = handle_of(torch.ones(3)), torch.tensor(0.5)
    handle.mul_(scalar)
    scalar.fill_(9.0)
    assert_same(handle, torch.full((3,), 0.5))


def test_backward_gradient_without_other_references_is_not_copied():
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


def test_create_graph_leaves_a_plain_tensor_as_gradient_and_warns():
    parameter = torch.nn.Parameter(gradient())
    parameter.grad = handle_of(gradient(seed=1))
    torch.set_warn_always(True)  # else torch warns only once per process
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
def test_read_of_a_handle_returns_a_tensor_with_the_arithmetic_applied(call, inference):
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


def test_tensor_spilled_under_inference_mode_stays_writable():
    handle = handle_of(torch.ones(3))
    with torch.inference_mode():
        handle.add_(torch.tensor([1.0, 2.0, 3.0]), alpha=2)
        handle.copy_(handle.clone())
    handle.backing.tensor.mul_(2)
    assert handle.backing.tensor.tolist() == [6.0, 10.0, 14.0]


def test_handle_of_a_scalar_converts_to_numbers_and_text():
    handle = handle_of(torch.tensor(2.5))
    assert float(handle) == handle.item() == 2.5
    assert "2.5" in repr(handle)
    assert f"{handle:.2f}" == "2.50"
    assert bool(handle)


def test_handle_metadata_equals_the_tensors_without_a_read():
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
def test_handle_rejects_calls_that_need_the_gradients_memory(call):
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


# --- arithmetic by scalars: recorded, replayed, and reported as factors ---------------------------

CHANGED = ("a change of gradients, as by clipping", "zero_grad(set_to_none=False)")
SHAPES = [(3, 5), (7,), (1,), (), (2, 3, 4), (33, 17)]


def everything(dtype):
    """Returns all numbers of a 16-bit dtype, or a sample of fp32 numbers. Leaves out NaN: its bits have no meaning."""
    if dtype == torch.float32:
        numbers = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(1))
        numbers = numbers.to(torch.int32).view(dtype)
    else:
        numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    return numbers[~numbers.isnan()]


SCALAR_CALLS = {
    "mul_": lambda g: g.mul_(0.3),
    "mul_ bool": lambda g: g.mul_(False),
    "div_": lambda g: g.div_(3),
    "div_ by a power of two": lambda g: g.div_(8),
    "div_ rounding": lambda g: g.div_(3, rounding_mode="floor"),
    "mul_ 0-dim": lambda g: g.mul_(torch.tensor(0.3)),
    "clamp_": lambda g: g.clamp_(-1, 0.3),
    "clamp_ min": lambda g: g.clamp_(min=-0.5),
    "clamp_ max": lambda g: g.clamp_(max=0.5),
    "clamp_ tensors": lambda g: g.clamp_(torch.tensor(-1.0), torch.tensor(1.0)),
    "clip_": lambda g: g.clip_(-0.1, 0.1),
    "neg_": lambda g: g.neg_(),
    "abs_": lambda g: g.abs_(),
    "zero_": lambda g: g.zero_(),
    "fill_": lambda g: g.fill_(2.5),
    "add_ scalar": lambda g: g.add_(0.5),
    "add_ 0-dim": lambda g: g.add_(torch.tensor(0.5)),
    "add_ alpha": lambda g: g.add_(2, alpha=0.25),
    "sub_": lambda g: g.sub_(0.1),
    "pow_": lambda g: g.pow_(2),
    "nan_to_num_": lambda g: g.nan_to_num_(0.0, posinf=1.0, neginf=-1.0),
    "foreach mul": lambda g: torch._foreach_mul_([g], 0.3),
    "foreach mul list": lambda g: torch._foreach_mul_([g], [0.3]),
    "foreach mul tensor": lambda g: torch._foreach_mul_([g], torch.tensor(0.3, dtype=g.dtype)),
    "foreach mul fp32 tensor": lambda g: torch._foreach_mul_([g], torch.tensor(0.3)),
    "foreach div by a power of two": lambda g: torch._foreach_div_([g], 4.0),
    "foreach div": lambda g: torch._foreach_div_([g], 3.0),
    "foreach add": lambda g: torch._foreach_add_([g], 0.5),
    "foreach clamp min": lambda g: torch._foreach_clamp_min_([g], -0.5),
    "foreach clamp max": lambda g: torch._foreach_clamp_max_([g], 0.5),
    "foreach zero": lambda g: torch._foreach_zero_([g]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", SCALAR_CALLS.values(), ids=SCALAR_CALLS)
def test_scalar_arithmetic_is_recorded_and_replayed(call, dtype):
    for shape in SHAPES:
        plain = gradient(shape, dtype)
        handle = handle_of(plain)
        for _ in range(2):
            call(plain)
            call(handle)
        assert handle.backing.reads == 0
        # For a parameter without dimensions, a 0-dim operand of add_ counts as another gradient.
        assert set(handle.backing.seen) <= {*CHANGED, *(["add"] if shape == () else [])}
        assert_same(handle, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shaped", ["many", "one", "none"])
def test_factors_give_same_bits_as_torch_multiplication(dtype, shaped):
    numbers = everything(dtype)
    dice = torch.Generator().manual_seed(7)
    scalars = [1 / 3, 1e-30, 65536.0, 2.0**-24, 1e30, -0.0, 3, 2**53 + 1, True, 1 + 2**-24, 1 + 2**-25 + 2**-40]
    scalars += (torch.randn(8, generator=dice, dtype=torch.float64) * 3).tolist()
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]
    scalars += [torch.tensor(scalar).to(kind) for scalar in scalars[4:15] for kind in kinds]
    with_factors = 0
    for scalar in scalars:
        sample = numbers if shaped == "many" else numbers[5000:5001] if shaped == "one" else numbers[5000]
        expected = sample.clone()
        handle = handle_of(sample)
        try:
            expected.mul_(scalar)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                handle.mul_(scalar)
            continue
        handle.mul_(scalar)
        if handle.gradient.factors() is None:
            assert shaped == "none"
            assert scalar.dtype == torch.float64
            continue
        with_factors += 1
        product = sample
        for factor in handle.gradient.factors():
            product = (product.float() * torch.tensor(factor, dtype=torch.float32)).to(dtype)
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        assert bool(((product.view(integers) == expected.view(integers)) | product.isnan()).all()), scalar
    assert with_factors > 50


def test_foreach_mul_rounds_its_factor_to_the_dtype_and_mul_does_not():
    handle = handle_of(gradient(dtype=torch.bfloat16))
    handle.mul_(0.3)
    torch._foreach_mul_([handle], 0.3)
    exact, rounded = handle.gradient.factors()
    assert exact == torch.tensor(0.3).item()
    assert rounded == torch.tensor(0.3, dtype=torch.bfloat16).item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_division_by_a_power_of_two_is_a_factor(dtype):
    numbers = everything(dtype)
    for exponent in [-20, -3, 0, 1, 4, 10]:
        handle = handle_of(numbers)
        handle.div_(2.0**exponent)
        assert handle.gradient.factors() == (() if exponent == 0 else (2.0**-exponent,))
        assert_same(handle, numbers / 2.0**exponent)
    handle.div_(3)
    assert handle.gradient.factors() is None


def test_factors_are_for_multiplications_only():
    for spoil in ("neg_", "zero_"):
        handle = handle_of(gradient())
        handle.mul_(0.5)
        assert handle.gradient.factors() == (0.5,)
        getattr(handle, spoil)()
        assert handle.gradient.factors() is None
    assert handle_of(gradient(dtype=torch.float64)).mul_(0.5).gradient.factors() is None


def test_recorded_operations_never_exceed_operations_max():
    plain = gradient()
    handle = handle_of(plain)
    for _ in range(3 * OPERATIONS_MAX):
        plain.mul_(0.99)
        handle.mul_(0.99)
        assert len(handle.gradient.operations) <= OPERATIONS_MAX
    assert_same(handle, plain)


def test_handle_raises_the_same_errors_as_a_tensor():
    handle = handle_of(torch.ones(3))
    for bad in (lambda g: g.mul_(1j), lambda g: g.clamp_(), lambda g: g.mul_(torch.ones(4))):
        with pytest.raises(RuntimeError) as expected:
            bad(torch.ones(3))
        with pytest.raises(RuntimeError) as got:
            bad(handle)
        assert str(got.value) == str(expected.value)
    assert_same(handle, torch.ones(3))


CHANGES = {
    "mask": lambda g: g.mul_(torch.arange(15).view(3, 5) % 2),
    "itself": lambda g: g.mul_(g),
    "add": lambda g: g.add_(gradient(seed=1)),
    "add alpha": lambda g: g.add_(torch.ones(3, 5), alpha=0.3),
    "add one row": lambda g: g.add_(torch.arange(5)),
    "out": lambda g: torch.add(g, 1, out=g),
    "copy": lambda g: g.copy_(torch.arange(5)),
    "data": lambda g: setattr(g, "data", torch.full((3, 5), 4.0)),
    "copy of a handle": lambda g: g.copy_(handle_of(gradient(seed=5))),
    "add of a handle": lambda g: g.add_(handle_of(gradient(seed=5))),
    "foreach add": lambda g: torch._foreach_add_([g], [gradient(seed=3)]),
    "foreach copy": lambda g: torch._foreach_copy_([g], [gradient(seed=3)]),
    "foreach mul": lambda g: torch._foreach_mul_([g], [gradient(seed=3)]),
    "foreach addcmul": lambda g: torch._foreach_addcmul_([g], [gradient(seed=3)], [gradient(seed=4)], [0.3]),
    "index put": lambda g: g.__setitem__(g > 0, 1.0),
    "lerp": lambda g: g.lerp_(gradient(seed=3), 0.3),
    "sparse": lambda g: g.add_(torch.sparse_coo_tensor([[1, 2]], torch.ones(2, 5), (3, 5))),
    "random": lambda g: g.normal_(generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("call", CHANGES.values(), ids=CHANGES)
def test_non_scalar_changes_of_a_handle_equal_changes_of_a_tensor(call):
    plain = gradient()
    handle = handle_of(plain)
    for value in (plain, handle):
        value.mul_(0.3)
        call(value)
        value.mul_(0.7)
    assert handle.backing.seen
    assert_same(handle, plain)


def test_grad_scaler_detects_infinity_from_recorded_arithmetic():
    handle = handle_of(torch.full((3,), 1e30))
    handle.mul_(1e30)
    beside, found = torch.ones(1), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([beside, handle], found, torch.tensor([0.5]))
    assert found.item() == 1.0
    assert beside.item() == 0.5
