"""Tests the Triton bodies, interpreted on CPU tensors, against the torch references."""

import math

import pytest
import torch
from support.bits import same_bits

from memascend.kernels import adamw_jit, casts_jit, check_jit
from memascend.kernels.adamw import adamw_reference
from memascend.kernels.casts import accumulate_reference, cast_reference
from memascend.kernels.check import check_and_unscale_reference
from memascend.kernels.scalars import checked_scalars

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHUNK = check_jit.CHUNK
LENGTHS = [1, 15, 2048, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77]

# The interpreter computes with numpy, which warns where infinities meet; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def randoms(numel, dtype, seed=0, scale=1.0):
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def agree(result, expected):
    found, squares = result
    assert found.dtype == torch.bool
    assert found.dim() == 0
    assert squares.dtype == torch.float64
    assert found.item() == expected[0].item()
    if math.isfinite(expected[1].item()):
        assert squares.item() == pytest.approx(expected[1].item(), rel=1e-6, abs=0)
    else:
        assert not math.isfinite(squares.item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_check_of_one_tensor(dtype, numel, factor):
    tensor = randoms(numel, dtype)
    expected = tensor.clone()
    result = check_jit.launch([tensor], factor, CPU)
    agree(result, check_and_unscale_reference([expected], factor, CPU))
    assert same_bits(tensor, expected)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", [0, CHUNK - 1, CHUNK, CHUNK + 40])
def test_one_nonfinite_is_found(bad, dtype, where):
    tensor = randoms(CHUNK + 41, dtype)
    tensor[where] = bad
    agree(check_jit.launch([tensor], 0.5, CPU), (torch.tensor(True), torch.tensor(math.inf)))


def test_a_result_that_overflows_its_dtype_is_found():
    tensor = torch.full((100,), 60000.0, dtype=torch.float16)
    found, _ = check_jit.launch([tensor], 2.0, CPU)
    assert found.item()
    assert tensor.isinf().all()


@pytest.mark.parametrize("magnitude", [1e-44, 1e-30, 1e-20, 1e19, 1e25, 3e38])
def test_squares_that_fp32_cannot_hold(magnitude):
    tensor = torch.full((CHUNK + 5,), magnitude)
    expected = tensor.double().square().sum().item()
    found, squares = check_jit.launch([tensor], 1.0, CPU)
    assert not found.item()
    assert squares.item() == pytest.approx(expected, rel=1e-12)


def test_many_tensors_of_all_dtypes_and_alignments():
    base = [randoms(1000 + 700 * i + CHUNK * (i % 3), DTYPES[i % 3], seed=i) for i in range(24)]
    tensors = [t[i % 5 :] for i, t in enumerate(base)]
    expected = [t.clone() for t in tensors]
    agree(check_jit.launch(tensors, 0.125, CPU), check_and_unscale_reference(expected, 0.125, CPU))
    assert all(same_bits(a, b) for a, b in zip(tensors, expected, strict=True))
    tensors[17][-1] = math.nan
    assert check_jit.launch(tensors, 1.0, CPU)[0].item()


def test_no_tensors():
    found, squares = check_jit.launch([], 1.0, CPU)
    assert (found.item(), squares.item()) == (False, 0.0)


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.95), (0.0, 0.0)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out", [None, torch.bfloat16, torch.float16], ids=str)
def test_adamw(decoupled, betas, weight_decay, dtype, out):
    numel = 3000
    state = [randoms(numel, torch.float32, 1), randoms(numel, dtype, 2), torch.zeros(numel), torch.zeros(numel)]
    state.append(torch.zeros(numel, dtype=out) if out else None)
    twin = [None if t is None else t.clone() for t in state]
    for step in (1, 2, 1000):
        scalars = checked_scalars(
            lr=1e-3, betas=betas, eps=1e-8, weight_decay=weight_decay, step=step, grad_scale=0.7,
            maximize=step == 2, amsgrad=False, decoupled=decoupled,
        )  # fmt: skip
        adamw_jit.launch(*state, scalars)
        adamw_reference(*twin, scalars)
        for name, left, right in zip("pgmvo", state, twin, strict=True):
            assert left is None or same_bits(left, right), (name, step)


@pytest.mark.parametrize("numel", [1, 2047, 2048, 5000])
@pytest.mark.parametrize(
    ("source", "out"),
    [(torch.float32, d) for d in DTYPES] + [(d, torch.float32) for d in DTYPES[1:]],
    ids=str,
)
def test_cast(numel, source, out):
    tensor = randoms(numel, source, scale=1e4)
    tensor[0] = math.inf
    left, right = torch.zeros(numel, dtype=out), torch.zeros(numel, dtype=out)
    casts_jit.launch(tensor, left, add=False)
    cast_reference(tensor, right)
    assert same_bits(left, right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulate(dtype):
    total, grad = randoms(5000, torch.float32, 1), randoms(5000, dtype, 2)
    expected = total.clone()
    casts_jit.launch(grad, total, add=True)
    accumulate_reference(grad, expected)
    assert same_bits(total, expected)
