"""Tests what CPU kernels refuse, and which instruction set they take."""

import math

import pytest
import torch
from support.random_values import randoms

from memascend import ConfigError, kernels


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
def test_a_bad_argument_is_refused_and_nothing_changes(message, decoupled):
    given_arguments = arguments(**REFUSALS[message])
    tensors = [t for t in given_arguments.values() if isinstance(t, torch.Tensor) and not t.is_meta and not t.is_sparse]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(ConfigError, match=message):
        kernels.adamw(**given_arguments, decoupled=decoupled)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_other_orders_of_the_elements():
    def made(seed):
        return randoms(2 * 3 * 4 * 5, seed=seed).view(2, 3, 4, 5).to(memory_format=torch.channels_last)

    p, g, m, v = made(1), made(2), made(3), made(4).square()
    twin = [t.contiguous() for t in (p, g, m, v)]
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    with pytest.raises(ConfigError, match="lay both out alike"):
        kernels.adamw(p, twin[1], m, v, None, **options)
    kernels.adamw(p, g, m, v, None, **options)
    kernels.adamw(*twin, None, **options)
    assert torch.equal(p, twin[0])
    # A dimension of length one may have any stride.
    kernels.adamw(torch.ones(1, 4), torch.ones(4, 1).t(), torch.ones(1, 4), torch.ones(1, 4), None, **options)


def test_check_refuses_what_it_would_get_wrong():
    tensor = torch.ones(8)
    for grads, factor, message in [
        (tensor.int(), 1.0, "int32"),
        ([tensor, tensor.double()], 1.0, r"grads\[1\] is float64"),
        ([tensor, tensor[4:]], 0.5, "overlap"),
        (tensor, math.nan, "inv_scale is nan"),
        (tensor, 1e39, "inv_scale is 1e"),
        (tensor, None, "inv_scale is a NoneType"),
        (torch.ones(4, 4).t()[:2], 1.0, "not contiguous"),
    ]:
        with pytest.raises(ConfigError, match=message):
            kernels.check_and_unscale(grads, factor)
    # Reading twice is no harm.
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


def test_the_instruction_set_can_be_forced_and_the_bits_stay(python):
    chosen, forced = (python(SCRIPT, env={"MEMASCEND_SIMD": simd}).splitlines() for simd in ("", "portable"))
    assert "why='portable'" in forced[0]
    assert chosen[1:] == forced[1:]


def test_an_unknown_instruction_set_is_refused(python):
    errors = python(SCRIPT, env={"MEMASCEND_SIMD": "sse9"}, status=1)
    assert "ConfigError" in errors
    assert "MEMASCEND_SIMD" in errors


def test_routes_say_why(monkeypatch):
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
