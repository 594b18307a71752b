"""Tests CPU kernels: the bits of torch and of the references, rejected arguments, and the instruction set."""

import itertools
import math

import pytest
import torch
from support.bits import randoms, same_bits
from support.grids import covered

from memascend import ConfigError, kernels
from memascend.kernels.adamw import adamw_reference
from memascend.kernels.check import check_and_unscale_reference
from memascend.kernels.scalars import checked_scalars

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = DTYPES[1:]
# Enough elements for the kernels to use several threads and non-temporal stores. The number is not a multiple of the
# length of a vector or of a chunk.
LONG = (1 << 20) + 12345


def any_bits(numel, seed):
    """Returns finite values over the whole range of fp32, including denormals and zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator).to(torch.int32).view(torch.float32)
    values[::97] = 0.0
    return torch.where(values.isfinite(), values, torch.ones(()))


def state_like(kind, numel, seed):
    if kind == "usual":
        p, g, m, v = (randoms(numel, seed=seed + i, scale=s) for i, s in enumerate((1.0, 1e-2, 1e-3, 1e-3)))
    elif kind == "tiny":
        p, g, m, v = (randoms(numel, seed=seed + i, scale=s) for i, s in enumerate((1e-3, 1e-38, 1e-40, 1e-20)))
    elif kind == "huge":
        p, g, m, v = (randoms(numel, seed=seed + i, scale=s) for i, s in enumerate((1e3, 1e18, 1e17, 1e18)))
    elif kind == "zeros":
        p, g, m, v = randoms(numel, seed=seed), *(torch.zeros(numel) for _ in range(3))
        g[1::2] = -0.0
    else:
        p, g, m, v = (any_bits(numel, seed + i) for i in range(4))
    return p, g, m, v.square() if kind != "bits" else v.abs()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("optimizer", "kind", "betas"),
    covered(
        [torch.optim.AdamW, torch.optim.Adam],
        ["usual", "tiny", "huge", "zeros", "bits"],
        [(0.9, 0.999), (0.9, 0.95), (0.3, 0.9), (0.5, 0.5), (0.0, 0.0)],
    ),
)
def test_adamw_has_same_bits_as_torch_fused(optimizer, kind, betas):
    decoupled = optimizer is torch.optim.AdamW
    grid = itertools.product(
        [1, 2, 10, 1_000, 1_000_000], [0.0, 0.01, 0.5], [(1e-3, 1e-8), (0.7, 1e-3), (0.0, 0.0)], [False, True]
    )
    for index, (step, decay, (lr, eps), maximize) in enumerate(grid):
        p, g, m, v = state_like(kind, 4096, seed=index)
        parameter = torch.nn.Parameter(p.clone())
        parameter.grad = g.clone()
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay, "maximize": maximize}
        theirs = optimizer([parameter], fused=True, **options)
        theirs.state[parameter] = {"step": torch.tensor(float(step - 1)), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
        theirs.step()
        kernels.adamw(p, g, m, v, None, step=step, threads=1, decoupled=decoupled, **options)
        state = theirs.state[parameter]
        for name, ours, other in (("m", m, state["exp_avg"]), ("v", v, state["exp_avg_sq"]), ("p", p, parameter.data)):
            assert same_bits(ours, other), (name, step, decay, lr, eps, maximize)


@pytest.mark.parametrize(
    ("decoupled", "grad_dtype", "out_dtype"), covered([True, False], DTYPES, [None, *HALVES]), ids=str
)
def test_adamw_has_same_bits_as_its_reference(decoupled, grad_dtype, out_dtype):
    p, _, m, v = state_like("usual", LONG, seed=1)
    out = None if out_dtype is None else torch.empty(LONG, dtype=out_dtype)
    state = [p, randoms(LONG, grad_dtype, seed=9), m, v, out]
    twin = [None if tensor is None else tensor.clone() for tensor in state]
    options = {"lr": 1e-3, "betas": (0.3, 0.999), "eps": 1e-8, "weight_decay": 0.1, "step": 7, "grad_scale": 0.3}
    kernels.adamw(*state, decoupled=decoupled, **options)
    adamw_reference(*twin, checked_scalars(**options, maximize=False, decoupled=decoupled))
    for left, right in zip(state, twin, strict=True):
        assert left is None or same_bits(left, right)


def test_adamw_reference_rounds_a_sum_near_a_tie_only_once():
    """Rounds a second moment that is slightly above a tie.

    The exact second moment is (1 + 2**-11 + 2**-24 + 2**-60) / 2. Rounding this number to float64 first would give a
    tie between two float32 numbers.
    """
    g, v = torch.tensor([1 + 2**-12]), torch.tensor([2.0**-60])
    numbers = {"lr": 1e-3, "betas": (0.9, 0.5), "eps": 1e-8, "weight_decay": 0.0, "step": 1, "grad_scale": 1.0}
    scalars = checked_scalars(**numbers, maximize=False, decoupled=True)
    adamw_reference(torch.zeros(1), g, torch.zeros(1), v, None, scalars)
    assert v.item() == (1 + 2**-11 + 2**-23) / 2


def test_kernels_ignore_the_callers_flush_denormal_setting():
    def run(p, g, m, v):
        kernels.adamw(p, g, m, v, None, lr=1e-3, betas=(0.9, 0.99), eps=1e-30, weight_decay=0.1, step=3)
        total = kernels.check_and_unscale(g, 0.5)[1]
        return [p, m, v, g, total]

    first, second = (state_like("tiny", 4096, seed=2) for _ in range(2))
    expected = run(*first)
    assert torch.set_flush_denormal(True)
    try:
        got = run(*second)
    finally:
        torch.set_flush_denormal(False)
    assert all(map(same_bits, expected, got))


@pytest.mark.parametrize(
    ("dtype", "numel", "factor"),
    covered(DTYPES, [0, 1, 31, 2048, 65_537, LONG], [1.0, 1 / 3, -2.0, 0.0]),
    ids=str,
)
def test_check_and_unscale_equals_its_reference(dtype, numel, factor):
    tensor = randoms(numel, dtype)
    expected = tensor.clone()
    found, squares = kernels.check_and_unscale(tensor, factor)
    reference = check_and_unscale_reference([expected], factor, CPU)
    assert same_bits(tensor, expected)
    assert found.item() is reference[0].item() is False
    assert squares.item() == pytest.approx(reference[1].item(), rel=1e-7, abs=0)
    assert (found.dtype, squares.dtype, found.dim(), squares.dim()) == (torch.bool, torch.float64, 0, 0)


def test_check_and_unscale_combines_the_tensors_of_a_list():
    tensors = [randoms(1000 * i, DTYPES[i % 3], seed=i) for i in range(12)]
    exact = sum((t * 0.5).double().square().sum().item() for t in tensors)
    found, squares = kernels.check_and_unscale(tensors, 0.5)
    assert not found.item()
    assert squares.item() == pytest.approx(exact, rel=1e-6)
    tensors[7][-1] = math.inf
    assert kernels.check_and_unscale(iter(tensors))[0].item()
    assert [t.item() for t in kernels.check_and_unscale([])] == [False, 0.0]


def test_check_and_unscale_reports_an_overflow_of_the_result():
    found, squares = kernels.check_and_unscale(torch.full((10,), 60000.0, dtype=torch.float16), 2.0)
    assert found.item()
    assert squares.item() == math.inf


@pytest.mark.parametrize("kernel", ["check_and_unscale", "adamw"])
def test_autograd_detects_an_in_place_write_of_a_kernel(kernel):
    weight = torch.ones(4, requires_grad=True)
    saved = torch.ones(4)
    loss = (weight * saved).sum()
    if kernel == "adamw":
        options = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "step": 1}
        kernels.adamw(saved, *torch.zeros(3, 4), None, **options)
    else:
        kernels.check_and_unscale(saved, 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def arguments(**changes):
    given = {"master": torch.ones(8), "grad": torch.ones(8), "exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8)}
    given |= {"out16": torch.ones(8, dtype=torch.bfloat16), "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    return given | {"weight_decay": 0.0, "step": 1} | changes


SHARED = torch.ones(12)
REFUSALS = {
    "master is bfloat16": {"master": torch.ones(8, dtype=torch.bfloat16)},
    "grad is float64": {"grad": torch.ones(8, dtype=torch.float64)},
    "out16 is float32": {"out16": torch.ones(8)},
    "master is a list": {"master": [1.0]},
    "grad has shape": {"grad": torch.ones(9)},
    "exp_avg_sq has shape": {"exp_avg_sq": torch.ones(0)},
    "grad of shape .* is not contiguous": {"grad": torch.ones(8, 2)[:, 0]},
    "exp_avg is on the meta device": {"exp_avg": torch.ones(8, device="meta")},
    "grad has layout": {"grad": torch.ones(8).to_sparse()},
    "overlap in memory": {"master": SHARED[:8], "exp_avg": SHARED[4:]},
    "lr is -1": {"lr": -1.0},
    "lr is a str": {"lr": "fast"},
    "eps is nan": {"eps": math.nan},
    r"betas\[1\] is 1": {"betas": (0.9, 1.0)},
    "pass a pair": {"betas": 0.9},
    "step is 0": {"step": 0},
    "step is 1.5": {"step": 1.5},
    "weight_decay is -0.1": {"weight_decay": -0.1},
    "grad_scale is inf": {"grad_scale": math.inf},
    "threads is 0": {"threads": 0},
    "lazily negated": {"grad": torch._neg_view(torch.ones(8))},
}


@pytest.mark.parametrize("message", REFUSALS)
@pytest.mark.parametrize("decoupled", [True, False])
def test_adamw_rejects_a_bad_argument_and_changes_no_tensor(message, decoupled):
    given_arguments = arguments(**REFUSALS[message])
    tensors = [t for t in given_arguments.values() if isinstance(t, torch.Tensor) and not t.is_meta and not t.is_sparse]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(ConfigError, match=message):
        kernels.adamw(**given_arguments, decoupled=decoupled)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_adamw_accepts_channels_last_and_rejects_mixed_strides():
    def made(seed):
        return randoms(2 * 3 * 4 * 5, seed=seed).view(2, 3, 4, 5).to(memory_format=torch.channels_last)

    p, g, m, v = made(1), made(2), made(3), made(4).square()
    twin = [t.contiguous() for t in (p, g, m, v)]
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    with pytest.raises(ConfigError, match="use the same strides"):
        kernels.adamw(p, twin[1], m, v, None, **options)
    kernels.adamw(p, g, m, v, None, **options)
    kernels.adamw(*twin, None, **options)
    assert torch.equal(p, twin[0])
    # A dimension of length one may have any stride.
    kernels.adamw(torch.ones(1, 4), torch.ones(4, 1).t(), torch.ones(1, 4), torch.ones(1, 4), None, **options)


def test_check_and_unscale_rejects_bad_dtypes_overlap_factors_and_strides():
    tensor = torch.ones(8)
    for grads, factor, message in [
        (tensor.int(), 1.0, "int32"),
        ([tensor, tensor.double()], 1.0, r"grads\[1\] is float64"),
        ([tensor, tensor[4:]], 0.5, "overlap"),
        (tensor, math.nan, "inv_scale is nan"),
        (tensor, 1e39, "inv_scale is 1e"),
        (tensor, 10**400, "inv_scale is 1000"),
        (tensor, None, "inv_scale is a NoneType"),
        (torch.ones(4, 4).t()[:2], 1.0, "not contiguous"),
    ]:
        with pytest.raises(ConfigError, match=message):
            kernels.check_and_unscale(grads, factor)
    with pytest.raises(ConfigError, match="not contiguous"):
        kernels.checked(torch.ones(8, 8).t()[1:])
    # A list may contain a tensor twice if the kernel only reads it.
    assert kernels.check_and_unscale([tensor, tensor])[1].item() == 16.0
    assert torch.equal(tensor, torch.ones(8))


SCRIPT = """
import sys, torch, memascend
assert "memascend.kernels" not in sys.modules
from memascend import kernels
assert "triton" not in sys.modules
print(kernels.route("cpu"))
t = torch.arange(100_000, dtype=torch.float32) / 7
print(kernels.check_and_unscale(t, 0.3)[1].item().hex(), t.sum().item().hex())
"""


def test_forced_instruction_set_gives_the_same_bits(python):
    chosen, forced = (python(SCRIPT, env={"MEMASCEND_SIMD": simd}).splitlines() for simd in ("", "portable"))
    assert "why='portable'" in forced[0]
    assert chosen[1:] == forced[1:]
    errors = python(SCRIPT, env={"MEMASCEND_SIMD": "sse9"}, status=1)
    assert "ConfigError" in errors
    assert "MEMASCEND_SIMD" in errors


def test_route_names_the_reason_for_its_choice(monkeypatch):
    assert kernels.route("meta").name == "torch"
    assert "meta" in kernels.route("meta").why
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    old = kernels.route("cuda:0")
    assert old.name == "torch"
    assert "7.5" in old.why
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert kernels.route("cuda:0").name == "triton"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "not installed" in kernels.route("cuda:0").why
