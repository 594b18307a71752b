"""Tests the Triton kernels against the torch references. Triton interprets the kernels on CPU tensors."""

import math

import pytest
import torch
from support.bits import randoms, same_bits
from support.grids import covered

from memascend import kernels
from memascend.kernels import adamw_jit, check, check_jit
from memascend.kernels.adamw import adamw_reference
from memascend.kernels.check import check_and_unscale_reference
from memascend.kernels.scalars import checked_scalars
from memascend.kernels.sums import add_reference, found_in, new_sums
from memascend.tensors import rounded

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHUNK = check_jit.CHUNK
# The number of elements in the largest tile. A tile of fp32 has half of this number.
TILE = check_jit.ROWS * check_jit.constants(torch.bfloat16)["COLUMNS"]
LENGTHS = [1, 2, 15, TILE - 1, TILE, TILE + 1, CHUNK, CHUNK + 1]
SUMS = [*covered(LENGTHS, [False], DTYPES), *covered([1, TILE + 1], [True], DTYPES)]
MAGNITUDES = ["highest", "higher", "lowest", "rising", "falling", "alternating", "edges"]
# The first and last elements of loads, tiles, chunks, and the whole tensor.
BOUNDARIES = [0, 15, 16, TILE - 1, TILE, CHUNK - 1, CHUNK, CHUNK + 40]
PLACES = [*((where, math.inf) for where in BOUNDARIES), (TILE, -math.inf), (CHUNK + 40, math.nan)]

# The interpreter computes with numpy, which warns about operations on infinities. A GPU does not warn.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def spread(numel, dtype, seed=0):
    """Returns random values whose exponents cover the range of a dtype, including denormals."""
    generator = torch.Generator().manual_seed(seed)
    low, high = {torch.float32: (-149, 127), torch.bfloat16: (-133, 127), torch.float16: (-24, 14)}[dtype]
    exponents = torch.randint(low, high, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator).clamp(-1.9, 1.9).double() * 2.0**exponents).to(dtype)


def found(tensors, factor=1.0):
    """Returns for each tensor whether the kernel found a non-finite element, and the tensor's exact sum of squares."""
    sums = new_sums(len(tensors), CPU)
    check_jit.begin(list(enumerate(tensors)), factor, sums)
    return found_in(sums)


def folded(tensors, factor=1.0):
    """Checks and unscales the tensors; returns whether any element is non-finite, and the sum of all squares."""
    sums = new_sums(1, CPU)
    check_jit.begin([(0, tensor) for tensor in tensors], factor, sums)
    nonfinite, squares = check_jit.fold(sums)
    assert (nonfinite.dtype, nonfinite.dim()) == (torch.bool, 0)
    assert (squares.dtype, squares.dim()) == (torch.float64, 0)
    return nonfinite.item(), squares.item()


@pytest.mark.parametrize(("numel", "is_spread", "dtype"), SUMS, ids=str)
def test_check_sum_of_squares_equals_the_cpu_kernel(numel, is_spread, dtype):
    """The folded sum also has the bits of Python's `fsum`."""
    tensor = (spread if is_spread else randoms)(numel, dtype)
    before = tensor.clone()
    assert found([tensor]) == [kernels.checked(tensor)]
    assert folded([tensor]) == (False, math.fsum(tensor.double().square().tolist()))
    assert same_bits(tensor, before)
    reference = new_sums(1, CPU)
    add_reference([(0, tensor)], reference)
    assert found_in(reference) == [kernels.checked(tensor)]


def tiles(dtype):
    """Returns tensors by name. Within each tensor except "lowest", some tiles differ in magnitude."""
    limits = torch.finfo(dtype)
    full = torch.full((TILE,), 2 - 2 * limits.eps, dtype=dtype)
    least = torch.full((TILE,), limits.smallest_normal * limits.eps, dtype=dtype)
    few = torch.zeros(TILE, dtype=dtype)
    few[::97] = 2.0**-12
    mixed = torch.where(torch.arange(TILE) % 5 == 0, least, full)
    # The first tile determines a grid (see squares_jit.py) that also has room for values twice as large. Later tiles
    # have such values, which set the highest bits of the grid.
    highest = torch.cat([full, full.repeat(CHUNK // TILE - 1) * 2])
    # For each power of two, three values: with one significant bit, with the first and the last bit, and with all bits.
    # In float16, the smallest of these values lose bits or become 0.
    powers = 2.0 ** -torch.arange(64.0)[:, None] * torch.tensor([1, 1 + limits.eps, 2 - limits.eps])
    edges = torch.cat([powers.reshape(-1), torch.zeros(TILE - powers.numel())]).to(dtype)
    return {
        "highest": highest,
        "higher": torch.cat([full * 8, full.repeat(CHUNK // TILE - 1) * 32]),
        "lowest": least.repeat(CHUNK // TILE),
        "rising": torch.cat([few * 0, least, few, full, full * 4096, torch.full((TILE,), limits.max, dtype=dtype)]),
        "falling": torch.cat([full * limits.max / 2, mixed, full, few, few * 0, least, few * 0, few]),
        "alternating": torch.cat([mixed, few, mixed * 64, full * 1024, mixed, least, full[:-5]]),
        "edges": torch.cat([full, edges, full * 4096, edges, spread(999, dtype)]),
    }


@pytest.mark.parametrize(("case", "dtype"), covered(MAGNITUDES, DTYPES), ids=str)
def test_check_is_exact_for_tiles_of_different_magnitudes(case, dtype):
    values = tiles(dtype)[case]
    assert found([values]) == [kernels.checked(values)]
    # The kernel reads some tiles a second time, and must not multiply these tiles by the factor again.
    scaled, expected = values.clone(), values.clone()
    reference = check_and_unscale_reference([expected], 0.3, CPU)
    assert folded([scaled], 0.3) == (reference[0].item(), rounded(kernels.checked(expected)[1]))
    assert same_bits(scaled, expected)
    infinite = values.clone()
    infinite[len(values) // 2] = math.inf
    assert found([infinite, values]) == [(True, math.inf), kernels.checked(values)]


@pytest.mark.parametrize(("place", "dtype"), covered(PLACES, DTYPES), ids=str)
def test_check_finds_one_nonfinite_element_at_any_position(place, dtype):
    where, bad = place
    # All other elements are zero, so only the position of the non-finite element matters.
    tensor = torch.zeros(CHUNK + 41, dtype=dtype)
    tensor[where] = bad
    (exact,), rounded_once = found([tensor]), folded([tensor], 0.5)
    for nonfinite, squares in (exact, rounded_once):
        assert nonfinite is True
        assert math.isnan(squares) if math.isnan(bad) else squares == math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_squares_with_nan_and_infinity_is_nan(dtype):
    tensor = torch.tensor([math.inf, 1.0, math.nan], dtype=dtype)
    assert math.isnan(folded([tensor])[1])
    assert math.isnan(found([tensor])[0][1])


def test_a_result_that_overflows_its_dtype_is_found():
    tensor = torch.full((100,), 60000.0, dtype=torch.float16)
    assert folded([tensor], 2.0) == (True, math.inf)
    assert tensor.isinf().all()


# All bits of the magnitude `1 - 2.0**-24` are set, and are the highest bits of its grid (see squares_jit.py).
@pytest.mark.parametrize("magnitude", [1e-45, 1e-30, 1e-20, 1.0, 1e19, 1e25, 1 - 2.0**-24, 3.4e38])
def test_sum_of_squares_of_equal_elements_is_exact(magnitude):
    """All elements are equal, so the integer sums of squares on a grid are large.

    A float would lose the last bits of these sums.
    """
    tensor = torch.full((2 * TILE + 5,), magnitude)
    assert folded([tensor]) == (False, math.fsum(tensor.double().square().tolist()))


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("tiny", [0.0, 2.0**-149])
def test_tie_rounds_to_even_unless_the_smallest_square_is_added(odd, tiny):
    # The squares add to 2^80 + 2^27. This sum is a tie, because the last bit of 2^80 in float64 is 2^28. `odd` adds
    # 2^28, which sets this last bit.
    tie = [2.0**40, 2.0**13, 2.0**13, *([2.0**14] if odd else [])]
    values = torch.tensor([*tie, tiny])
    up = 2.0**28 * (2 if odd else 0) if not tiny else 2.0**28 * (2 if odd else 1)
    assert folded([values]) == (False, 2.0**80 + up)


def test_check_of_many_tensors_of_all_dtypes_and_alignments_equals_cpu():
    base = [randoms(1000 + 100 * i + CHUNK * (i % 8 == 1), DTYPES[i % 3], seed=i) for i in range(24)]
    tensors = [tensor[i % 5 :] for i, tensor in enumerate(base)]
    assert found(tensors) == [kernels.checked(tensor) for tensor in tensors]
    expected = [tensor.clone() for tensor in tensors]
    check_and_unscale_reference(expected, 0.125, CPU)
    _, squares = folded(tensors, 0.125)
    assert all(same_bits(a, b) for a, b in zip(tensors, expected, strict=True))
    assert squares == float(kernels.check_and_unscale(expected)[1])
    tensors[17][-1] = math.nan
    assert [bad for bad, _ in found(tensors)].index(True) == 17


def test_check_accepts_empty_tensors_and_empty_lists(monkeypatch):
    monkeypatch.setattr(check, "route", lambda _: kernels.Route(name="triton", why="interpreted"))
    tensors = [torch.zeros(0), randoms(5, torch.bfloat16), torch.zeros(0).half(), randoms(TILE + 1)]
    sums = new_sums(len(tensors), CPU)
    kernels.begin_check(tensors, sums)
    assert found_in(sums) == [kernels.checked(tensor) for tensor in tensors]
    assert [found.item() for found in kernels.check_and_unscale(tensors[::2], 0.5)] == [False, 0.0]
    assert folded([]) == (False, 0.0)
    assert found([]) == []


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize(("betas", "weight_decay"), [((0.9, 0.999), 0.1), ((0.3, 0.95), 0.0), ((0.0, 0.0), 0.1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out", [None, torch.bfloat16, torch.float16], ids=str)
def test_adamw_kernel_has_same_bits_as_its_reference(decoupled, betas, weight_decay, dtype, out):
    numel = 3000
    state = [randoms(numel, torch.float32, 1), randoms(numel, dtype, 2), torch.zeros(numel), torch.zeros(numel)]
    state.append(torch.zeros(numel, dtype=out) if out else None)
    twin = [None if t is None else t.clone() for t in state]
    for step in (1, 2, 1000):
        scalars = checked_scalars(
            lr=1e-3, betas=betas, eps=1e-8, weight_decay=weight_decay, step=step, grad_scale=0.7,
            maximize=step == 2, decoupled=decoupled,
        )  # fmt: skip
        adamw_jit.launch(*state, scalars)
        adamw_reference(*twin, scalars)
        for name, left, right in zip("pgmvo", state, twin, strict=True):
            assert left is None or same_bits(left, right), (name, step)
