"""Tests gradient handles against plain gradients: the same calls on both, bit for bit."""

import copy
import math
import pickle

import pytest
import torch
from support.bits import same_bits
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from memascend.errors import UsageError
from memascend.gradients.deferred_gradient import OPERATIONS_MAX
from memascend.gradients.handle import GradientHandle, strides_of
from memascend.run.process_hooks import ProcessHooks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, 5), (7,), (1,), (), (2, 3, 4), (33, 17)]


@pytest.fixture(autouse=True)
def process_hooks():
    """Torch takes handles in lists while a model is offloaded."""
    hooks = ProcessHooks()
    yield
    hooks.release()


class InMemory:
    """A keeper that holds the gradient in RAM, as the store holds it on SSD; it counts what is out at a time."""

    def __init__(self, tensor, *, name="layer.weight", fused=False, knows_nonfinite=True):
        self.tensor = tensor.clone()
        self.name, self.fused, self.knows_nonfinite = name, fused, knows_nonfinite
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.seen = []
        self.reads = 0

    def read(self):
        assert not self.fused
        self.reads += 1
        return self.tensor.clone()

    def add(self, gradient):
        assert not self.fused
        assert gradient.stride() == self.tensor.stride()
        assert gradient.dtype == self.dtype
        self.tensor = self.tensor + gradient

    def assign(self, gradient):
        assert not self.fused
        assert gradient.stride() == self.tensor.stride()
        assert gradient.dtype == self.dtype
        assert type(gradient) is torch.Tensor
        self.tensor = gradient

    def norm(self):
        return self.tensor.double().norm().item()

    def nonfinite(self):
        return not self.tensor.isfinite().all().item() if self.knows_nonfinite else None

    def noticed(self, what):
        self.seen.append(what)


def handle_of(tensor, **options):
    return GradientHandle(InMemory(tensor, **options), strides=tensor.stride())


def assert_same(handle, expected):
    """What the step would use: by replay and, where there are any, by factors."""
    got = handle.materialize()
    assert got.dtype == expected.dtype
    assert got.stride() == expected.stride()
    assert same_bits(got, expected)
    factors = handle.factors()
    if factors is not None:
        product = handle.backing.tensor.clone()
        for factor in factors:
            product = (product.float() * torch.tensor(factor, dtype=torch.float32)).to(product.dtype)
        assert same_bits(product, expected)


def gradient(shape=(3, 5), dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def everything(dtype):
    """All numbers of a 16-bit dtype, or a sample of all fp32 ones; no NaN, whose bits mean nothing."""
    if dtype == torch.float32:
        numbers = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(1))
        numbers = numbers.to(torch.int32).view(dtype)
    else:
        numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    return numbers[~numbers.isnan()]


# --- accumulation -------------------------------------------------------------------


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
    assert handle.operations == ()


def test_a_gradient_that_is_expanded_is_laid_out():
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    parameter.grad = handle = handle_of(torch.ones(4, 6))
    parameter.sum().backward()
    assert_same(handle, torch.full((4, 6), 2.0))


def test_accumulation_after_arithmetic_keeps_the_order():
    plain, new = gradient(), gradient(seed=1)
    handle = handle_of(plain)
    for value in (plain, handle):
        value.mul_(0.3)
        value.add_(new)
        value.mul_(0.7)
    assert_same(handle, plain)


class Lazy(InMemory):
    """A keeper that holds on to what it gets, as one does that writes while backward goes on."""

    def add(self, gradient):
        self.waiting = gradient

    def assign(self, gradient):
        self.waiting = gradient


def test_what_the_caller_does_to_its_tensor_later_does_not_matter():
    handle = GradientHandle(Lazy(torch.zeros(3)))
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
    parameter.grad = handle = GradientHandle(Lazy(torch.zeros(4)))
    result = way(parameter)
    mine = torch.ones_like(result)
    result.backward(mine)
    mine.mul_(5)
    assert handle.backing.waiting.tolist() == [1.0] * 4


def test_a_gradient_for_two_parameters_is_copied_for_one():
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = GradientHandle(Lazy(torch.zeros(4)))
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
    parameter.grad = handle = GradientHandle(Lazy(torch.zeros(4)))
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


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_gradient_is_added():
    plain = gradient((5, 2))
    handle = handle_of(plain)
    sparse = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 2), (5, 2))
    for value in (plain, handle):
        value.add_(sparse)
    assert_same(handle, plain)


# --- arithmetic by scalars ------------------------------------------------------------

SCALAR_CALLS = {
    "mul_": lambda g: g.mul_(0.3),
    "mul_ int": lambda g: g.mul_(3),
    "mul_ bool": lambda g: g.mul_(False),
    "imul": lambda g: g.__imul__(1.7),
    "div_": lambda g: g.div_(3),
    "div_ by a power of two": lambda g: g.div_(8),
    "div_ rounding": lambda g: g.div_(3, rounding_mode="floor"),
    "mul_ 0-dim": lambda g: g.mul_(torch.tensor(0.3)),
    "mul_ 0-dim double": lambda g: g.mul_(torch.tensor(0.3, dtype=torch.float64)),
    "mul_ 0-dim bf16": lambda g: g.mul_(torch.tensor(0.3, dtype=torch.bfloat16)),
    "mul_ 0-dim int": lambda g: g.mul_(torch.tensor(2**40 + 1)),
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
    "foreach neg": lambda g: torch._foreach_neg_([g]),
    "data": lambda g: g.data.mul_(0.3),
    "detach": lambda g: g.detach().mul_(0.3),
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
        # A tensor without dimensions is a gradient to a parameter without.
        assert set(handle.backing.seen) <= {"change", "zero", *(["add"] if shape == () else [])}
        assert_same(handle, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shaped", ["many", "one", "none"])
def test_factors_are_what_torch_multiplies_by(dtype, shaped):
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
        if handle.factors() is None:
            assert shaped == "none"
            assert scalar.dtype == torch.float64
            continue
        with_factors += 1
        product = sample
        for factor in handle.factors():
            product = (product.float() * torch.tensor(factor, dtype=torch.float32)).to(dtype)
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        assert bool(((product.view(integers) == expected.view(integers)) | product.isnan()).all()), scalar
    assert with_factors > 50


def test_a_list_multiplied_by_a_number_has_another_factor_than_a_tensor():
    handle = handle_of(gradient(dtype=torch.bfloat16))
    handle.mul_(0.3)
    torch._foreach_mul_([handle], 0.3)
    exact, rounded = handle.factors()
    assert exact == torch.tensor(0.3).item()
    assert rounded == torch.tensor(0.3, dtype=torch.bfloat16).item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_division_by_a_power_of_two_is_a_factor(dtype):
    numbers = everything(dtype)
    for exponent in [-20, -3, 0, 1, 4, 10]:
        handle = handle_of(numbers)
        handle.div_(2.0**exponent)
        assert handle.factors() == (() if exponent == 0 else (2.0**-exponent,))
        assert_same(handle, numbers / 2.0**exponent)
    handle.div_(3)
    assert handle.factors() is None


def test_factors_are_for_multiplications_only():
    for spoil in ("neg_", "zero_"):
        handle = handle_of(gradient())
        handle.mul_(0.5)
        assert handle.factors() == (0.5,)
        getattr(handle, spoil)()
        assert handle.factors() is None
    assert handle_of(gradient(dtype=torch.float64)).mul_(0.5).factors() is None


def test_ones_are_not_recorded():
    handle = handle_of(gradient())
    handle.mul_(1.0).div_(1).mul_(torch.tensor(1.0)).clamp_(-math.inf, math.inf)
    assert handle.operations == ()
    assert handle.factors() == ()


def test_a_scalar_tensor_is_taken_as_it_was():
    handle = handle_of(torch.ones(3))
    scalar = torch.tensor(0.5)
    handle.mul_(scalar)
    scalar.fill_(9.0)
    assert_same(handle, torch.full((3,), 0.5))


def test_the_record_does_not_grow_for_ever():
    plain = gradient()
    handle = handle_of(plain)
    for _ in range(3 * OPERATIONS_MAX):
        plain.mul_(0.99)
        handle.mul_(0.99)
        assert len(handle.operations) <= OPERATIONS_MAX
    assert_same(handle, plain)


def test_torch_complains_as_about_a_tensor():
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
    "add alpha": lambda g: g.add_(torch.ones(3, 5), alpha=0.3),
    "add one row": lambda g: g.add_(torch.arange(5)),
    "out": lambda g: torch.add(g, 1, out=g),
    "copy": lambda g: g.copy_(torch.arange(5)),
    "data": lambda g: setattr(g, "data", torch.full((3, 5), 4.0)),
    "copy of a handle": lambda g: g.copy_(handle_of(gradient(seed=5))),
    "add of a handle": lambda g: g.add_(handle_of(gradient(seed=5))),
    "masked fill": lambda g: g.masked_fill_(g > 0, 0.0),
    "foreach add": lambda g: torch._foreach_add_([g], [gradient(seed=3)]),
    "foreach copy": lambda g: torch._foreach_copy_([g], [gradient(seed=3)]),
    "foreach mul": lambda g: torch._foreach_mul_([g], [gradient(seed=3)]),
    "foreach addcmul": lambda g: torch._foreach_addcmul_([g], [gradient(seed=3)], [gradient(seed=4)], [0.3]),
    "index put": lambda g: g.__setitem__(g > 0, 1.0),
    "lerp": lambda g: g.lerp_(gradient(seed=3), 0.3),
    "random": lambda g: g.normal_(generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("call", CHANGES.values(), ids=CHANGES)
def test_other_changes_go_by_way_of_a_copy(call):
    plain = gradient()
    handle = handle_of(plain)
    for value in (plain, handle):
        value.mul_(0.3)
        call(value)
        value.mul_(0.7)
    assert handle.backing.seen
    assert_same(handle, plain)


def test_zero_grad_that_keeps_tensors_then_accumulates():
    plain, ours = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    plain.grad = gradient((3,))
    ours.grad = handle = handle_of(plain.grad)
    for parameter in (plain, ours):
        torch.optim.SGD([parameter], lr=0.1).zero_grad(set_to_none=False)
    assert_same(handle, torch.zeros(3))
    reads = handle.backing.reads
    for parameter in (plain, ours):
        (parameter * torch.tensor([-0.0, 1.0, 2.0])).sum().backward()
    assert handle.backing.reads == reads  # the old gradient is of no use to anyone
    assert_same(handle, plain.grad)
    assert "zero" in handle.backing.seen


# --- norms and clipping -------------------------------------------------------------------


def mixed(dtype):
    """The same gradients twice, plain, and with every second one behind a handle."""
    shapes = [(3, 5), (64, 33), (7,), (1,), (), (128, 65)]
    plain, ours = [], []
    for index, shape in enumerate(shapes):
        kind = dtype if index != 2 else torch.float32
        for parameters in (plain, ours):
            parameters.append(torch.nn.Parameter(torch.zeros(shape, dtype=kind)))
        plain[-1].grad = gradient(shape, kind, seed=index)
        ours[-1].grad = plain[-1].grad.clone() if index % 2 else handle_of(plain[-1].grad)
    return plain, ours


def assert_all_same(plain, ours):
    for expected, parameter in zip(plain, ours, strict=True):
        if isinstance(parameter.grad, GradientHandle):
            assert_same(parameter.grad, expected.grad)
        else:
            assert same_bits(parameter.grad, expected.grad)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, 3.0])
def test_torchs_clipping_has_torchs_bits(foreach, dtype, norm_type):
    plain, ours = mixed(dtype)
    for max_norm in (math.inf, 1e6, 30.0, 0.5):
        expected = clip_grad_norm_(plain, max_norm, norm_type, foreach=foreach)
        got = clip_grad_norm_(ours, max_norm, norm_type, foreach=foreach)
        assert got.dtype == expected.dtype
        assert same_bits(got, expected)
    assert_all_same(plain, ours)
    norm = get_total_norm([p.grad for p in ours], norm_type, foreach=foreach)
    assert torch.equal(norm, get_total_norm([p.grad for p in plain], norm_type, foreach=foreach))


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_by_value(foreach, dtype):
    plain, ours = mixed(dtype)
    for parameters in (plain, ours):
        clip_grad_value_(parameters, 0.5, foreach=foreach)
    assert_all_same(plain, ours)


def test_a_nonfinite_norm_is_seen():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = handle_of(torch.tensor([1.0, math.nan, 2.0]))
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_norms_hold_one_gradient_at_a_time(foreach):
    alive = []
    most = 0

    class Counting(InMemory):
        def read(self):
            nonlocal most
            tensor = super().read()
            storage = tensor.untyped_storage()
            alive.append(torch.multiprocessing.reductions.StorageWeakRef(storage))
            most = max(most, sum(not reference.expired() for reference in alive))
            return tensor

    parameters = [torch.nn.Parameter(torch.zeros(50)) for _ in range(6)]
    for parameter in parameters:
        parameter.grad = GradientHandle(Counting(gradient((50,))))
    clip_grad_norm_(parameters, 0.1, foreach=foreach)
    assert len(alive) == 6
    assert most == 1


def test_every_way_to_a_norm():
    plain = gradient()
    handle = handle_of(plain)
    for norm in (
        lambda g: g.norm(),
        lambda g: g.norm(1),
        lambda g: g.data.norm(2),
        torch.norm,
        torch.linalg.norm,
        torch.linalg.vector_norm,
        lambda g: torch.linalg.vector_norm(g, 2, dtype=torch.float64),
        lambda g: torch._foreach_norm([g, g], 2)[1],
        lambda g: torch._foreach_norm([g], 2, torch.float64)[0],
    ):
        assert torch.equal(norm(handle), norm(plain))
    assert set(handle.backing.seen) == {"norm"}


# --- GradScaler -------------------------------------------------------------------------


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grad_scaler_unscales_and_finds(dtype, bad, knows):
    def run(wrap):
        parameters = [torch.nn.Parameter(torch.ones(4, 3, dtype=dtype)) for _ in range(3)]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0 * 2**10)
        scaler.scale(sum((p * gradient((4, 3), dtype, seed)).sum() for seed, p in enumerate(parameters))).backward()
        if bad is not None:
            parameters[1].grad[2, 1] = bad
        handles = []
        if wrap:
            for parameter in parameters[:2]:
                parameter.grad = handle_of(parameter.grad, knows_nonfinite=knows)
                handles.append(parameter.grad)
        scaler.unscale_(optimizer)
        return parameters, optimizer, scaler, handles

    plain, _, scaler, _ = run(wrap=False)
    ours, optimizer, our_scaler, handles = run(wrap=True)
    assert all(handle.backing.seen == ["scaler"] for handle in handles)
    assert sum(handle.backing.reads for handle in handles) == (0 if knows else 2)
    if bad is None:
        assert_all_same(plain, ours)
        assert handles[0].factors() is not None
    found = [sum(v.item() for v in s._found_inf_per_device(optimizer).values()) for s in (our_scaler,)]
    assert found == [0.0 if bad is None else 1.0]
    our_scaler.step(optimizer)
    our_scaler.update()
    assert our_scaler.get_scale() == 3.0 * 2**10 * (1.0 if bad is None else 0.5)
    assert scaler.get_scale() == 3.0 * 2**10


def test_grad_scaler_sees_what_arithmetic_made_infinite():
    handle = handle_of(torch.full((3,), 1e30))
    handle.mul_(1e30)
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([handle], found, torch.tensor([0.5]))
    assert found.item() == 1.0


# --- reads ------------------------------------------------------------------------------

READS = {
    "clone": lambda g: g.clone(),
    "to": lambda g: g.to(torch.float64),
    "plus": lambda g: g + 1,
    "other side": lambda g: 2 * g,
    "compare": lambda g: g == 0,
    "isnan": lambda g: g.isnan().any(),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "sum": lambda g: g.sum(),
    "stack": lambda g: torch.stack([g, g]),
    "mask": lambda g: g[g > 0],
    "max": lambda g: g.max(),
    "matmul": lambda g: torch.ones(2, 3) @ g,
    "into": lambda g: torch.zeros(3, 5).copy_(g),
    "foreach": lambda g: torch._foreach_mul([g], 2.0)[0],
    "deepcopy": copy.deepcopy,
    "equal": lambda g: torch.tensor(torch.equal(g, g)),
    "tolist": lambda g: torch.tensor(g.tolist()),
    "cat": lambda g: torch.cat([g, torch.ones(1, 5)]),
    "allclose": lambda g: torch.tensor(torch.allclose(g, g)),
    "float of the sum": lambda g: torch.tensor(float(g.sum())),
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
    assert "read" in handle.backing.seen
    assert_same(handle, plain)


def test_a_copy_made_under_inference_mode_can_be_kept():
    handle = handle_of(torch.ones(3))
    with torch.inference_mode():
        handle.add_(torch.tensor([1.0, 2.0, 3.0]), alpha=2)
        handle.copy_(handle.clone())
    handle.backing.tensor.mul_(2)
    assert handle.backing.tensor.tolist() == [6.0, 10.0, 14.0]


def test_printing_shows_the_numbers():
    handle = handle_of(torch.tensor([1.5, 2.5]))
    assert "1.5" in repr(handle)
    assert "2.5" in f"{handle}"


def test_scalar_gradients_are_numbers():
    handle = handle_of(torch.tensor(2.5))
    assert float(handle) == 2.5
    assert handle.item() == 2.5
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


# --- refusals ---------------------------------------------------------------------------

REFUSED = {
    "view": lambda g: g.view(-1),
    "index": lambda g: g[0],
    "slice": lambda g: g[:1],
    "set a row": lambda g: g.__setitem__(0, 1.0),
    "transpose": lambda g: g.t(),
    "T": lambda g: g.T,
    "expand": lambda g: g.expand(2, 3, 5),
    "unsqueeze": lambda g: g.unsqueeze(0),
    "flatten": lambda g: g.flatten(),
    "chunk": lambda g: g.chunk(2),
    "iterate": list,
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


def test_saving_is_refused(tmp_path):
    with pytest.raises(UsageError, match="clone"):
        torch.save({"gradient": handle_of(gradient())}, tmp_path / "gradient.pt")


# --- gradients that are already used -------------------------------------------------------


def fused_of(tensor):
    return handle_of(tensor, fused=True)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_used_gradient_answers_its_norm_and_clipping_that_changes_nothing(dtype, foreach):
    values = [gradient((64,), dtype, seed) for seed in range(3)]
    parameters = [torch.nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = fused_of(value)
    norm = clip_grad_norm_(parameters, math.inf, foreach=foreach)
    exact = torch.linalg.vector_norm(torch.stack([value.double().norm() for value in values]))
    assert norm.dtype == dtype
    torch.testing.assert_close(norm.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)
    clip_grad_value_(parameters, math.inf, foreach=foreach)
    with pytest.raises(UsageError, match=r"max_grad_norm= to offload\(\) \(and set the Trainer's to 0\)"):
        clip_grad_norm_(parameters, 1e-3, foreach=foreach)
    with pytest.raises(UsageError, match="gradients='ssd'"):
        clip_grad_norm_(parameters, math.inf, 1.0, foreach=foreach)
    assert parameters[0].grad.operations == ()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: g.mul_(0.5), "max_grad_norm="),
        (lambda g: g.mul_(math.nan), "max_grad_norm="),
        (lambda g: g.mul_(torch.tensor(0.5)), "max_grad_norm="),
        (lambda g: g.clamp_(-1, 1), "max_grad_norm="),
        (lambda g: g.copy_(torch.ones(3)), "gradients='ssd'"),
        (lambda g: g.mul_(torch.ones(3)), "gradients='ssd'"),
        (lambda g: g.add_(torch.ones(3)), r"accumulation_steps=.*gradients='ssd'"),
        (lambda g: g.zero_(), r"set_to_none=False.*gradients='ssd'"),
        (lambda g: torch._foreach_zero_([g]), r"set_to_none=False.*gradients='ssd'"),
        (lambda g: g.clone(), "gradients='ssd'"),
        (lambda g: g + 1, "gradients='ssd'"),
        (lambda g: g.tolist(), "gradients='ssd'"),
        (copy.deepcopy, "gradients='ssd'"),
        (lambda g: g.norm(1), "gradients='ssd'"),
        (lambda g: torch.linalg.vector_norm(g, 2, dim=0), "gradients='ssd'"),
        (lambda g: torch.zeros(3).copy_(g), "gradients='ssd'"),
        (
            lambda g: torch._amp_foreach_non_finite_check_and_unscale_([g], torch.zeros(1), torch.ones(1)),
            r"loss_scale=.*gradients='ssd'",
        ),
    ],
)
def test_a_used_gradient_refuses_what_it_cannot_do(call, words):
    handle = fused_of(torch.ones(3))
    with pytest.raises(UsageError, match=words):
        call(handle)
    assert handle.backing.seen
    assert handle.operations == ()


def test_a_second_backward_on_a_used_gradient_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = fused_of(torch.ones(3))
    with pytest.raises(UsageError, match=r"accumulation_steps=.*gradients='ssd'"):
        parameter.sum().backward()


def test_a_used_gradient_can_be_printed_and_measured():
    handle = fused_of(torch.tensor([3.0, 4.0]))
    assert "already used" in repr(handle)
    assert handle.norm().item() == 5.0
    assert torch.linalg.vector_norm(handle, 2, dtype=torch.float64).dtype == torch.float64
    assert torch._foreach_norm([handle], 2, torch.float64)[0].dtype == torch.float64
    assert torch.zeros_like(handle).tolist() == [0.0, 0.0]


def test_a_gradient_may_become_used_later():
    handle = handle_of(torch.ones(3))
    handle.add_(torch.ones(3))
    handle.backing.fused = True
    assert handle.norm().item() == pytest.approx(math.sqrt(12))
    with pytest.raises(UsageError):
        handle.add_(torch.ones(3))
