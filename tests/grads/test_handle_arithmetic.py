"""Tests arithmetic by scalars on gradient handles: recorded, replayed, told as factors."""

import pytest
import torch
from support.gradient_handles import DTYPES, assert_same, gradient, handle_of

from memascend.grads.lazy_grad import OPERATIONS_MAX

CHANGED = ("a change of gradients, as by clipping", "zero_grad(set_to_none=False)")

pytestmark = pytest.mark.usefixtures("process_hooks")

SHAPES = [(3, 5), (7,), (1,), (), (2, 3, 4), (33, 17)]


def everything(dtype):
    """All numbers of a 16-bit dtype, or a sample of all fp32 ones; no NaN, whose bits mean nothing."""
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
        # A tensor without dimensions is a gradient to a parameter without.
        assert set(handle.backing.seen) <= {*CHANGED, *(["add"] if shape == () else [])}
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


def test_a_list_multiplied_by_a_number_has_another_factor_than_a_tensor():
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
        assert len(handle.gradient.operations) <= OPERATIONS_MAX
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
def test_other_changes_go_by_way_of_a_copy(call):
    plain = gradient()
    handle = handle_of(plain)
    for value in (plain, handle):
        value.mul_(0.3)
        call(value)
        value.mul_(0.7)
    assert handle.backing.seen
    assert_same(handle, plain)


def test_grad_scaler_sees_what_arithmetic_made_infinite():
    handle = handle_of(torch.full((3,), 1e30))
    handle.mul_(1e30)
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([handle], found, torch.tensor([0.5]))
    assert found.item() == 1.0
