"""Tests norms, clipping and GradScaler on gradient handles: the bits are torch's."""

import math

import pytest
import torch
from support.bits import same_bits
from support.gradient_handles import DTYPES, KeptInMemory, assert_same, gradient, handle_of, handle_over
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from memascend.grads.lazy_grad import GradientHandle

pytestmark = pytest.mark.usefixtures("process_hooks")


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
    assert set(handle.backing.seen) == {"a norm of gradients"}


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grad_scaler_unscales_and_finds(dtype, bad):
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
                parameter.grad = handle_of(parameter.grad)
                handles.append(parameter.grad)
        scaler.unscale_(optimizer)
        return parameters, optimizer, scaler, handles

    plain, theirs, scaler, _ = run(wrap=False)
    ours, optimizer, our_scaler, handles = run(wrap=True)
    assert all(handle.backing.seen == ["a GradScaler"] for handle in handles)
    assert not any(handle.backing.reads for handle in handles)
    if bad is None:
        assert_all_same(plain, ours)
        assert handles[0].gradient.factors() is not None
    for one, of in ((scaler, theirs), (our_scaler, optimizer)):
        assert sum(found.item() for found in one._found_inf_per_device(of).values()) == (bad is not None)
        one.step(of)
        one.update()
        assert one.get_scale() == 3.0 * 2**10 * (1.0 if bad is None else 0.5)


def test_grad_scaler_sees_what_arithmetic_made_infinite():
    handle = handle_of(torch.full((3,), 1e30))
    handle.mul_(1e30)
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([handle], found, torch.tensor([0.5]))
    assert found.item() == 1.0
