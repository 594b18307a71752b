"""Tests the kernels on a CUDA device: bits of the references, no synchronisation, more than 2^31 elements."""

import math

import pytest
import torch
from support.bits import same_bits

from memascend import kernels
from memascend.kernels.adamw import adamw_reference
from memascend.kernels.check import check_and_unscale_reference
from memascend.kernels.scalars import checked_scalars

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randoms(numel, dtype=torch.float32, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(numel, generator=generator, device="cuda").to(dtype)


def test_cuda_route_is_triton():
    assert kernels.route("cuda").name == "triton", kernels.route("cuda").why


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 4097, 1 << 20, (1 << 24) + 3])
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_check_and_unscale_equals_its_reference_and_the_cpu(dtype, numel, factor):
    tensor = randoms(numel, dtype)
    expected = tensor.clone()
    found, squares = kernels.check_and_unscale(tensor, factor)
    reference = check_and_unscale_reference([expected], factor, tensor.device)
    assert same_bits(tensor, expected)
    assert found.is_cuda
    assert squares.is_cuda
    assert found.item() is False
    assert squares.item() == pytest.approx(reference[1].item(), rel=1e-12, abs=0)
    # The CPU kernel gives the same bits, because the CPU kernel and the GPU kernel round only the final sum.
    assert squares.item() == kernels.check_and_unscale(expected.cpu())[1].item()
    if numel:
        tensor[numel // 2] = math.nan
        assert kernels.check_and_unscale(tensor)[0].item() is True


def test_each_tensor_has_the_exact_sum_of_the_cpu():
    exponents = torch.randint(-140, 120, (70_001,), generator=torch.Generator().manual_seed(1))
    wide = (randoms(70_001).cpu().double() * 2.0**exponents).float().cuda()
    tensors = [wide, wide.bfloat16(), randoms(0), randoms(1), randoms(33_000, torch.float16), wide[3:]]
    sums = kernels.new_sums(len(tensors), wide.device)
    kernels.begin_check(tensors, sums)
    assert kernels.found_in(sums) == [kernels.checked(tensor.cpu()) for tensor in tensors]


def test_check_and_unscale_does_not_synchronize_the_device():
    tensors = [randoms(5000, seed=i) for i in range(50)]
    kernels.check_and_unscale(tensors, 1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.check_and_unscale(tensors, 0.5)
        kernels.check_and_unscale(tensors[0], 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out", [None, torch.bfloat16, torch.float16], ids=str)
def test_adamw_has_the_bits_of_the_cpu(decoupled, dtype, out):
    numel = 100_003
    gpu = [randoms(numel, seed=1), randoms(numel, dtype, 2), randoms(numel, seed=3), randoms(numel, seed=4).square()]
    gpu.append(torch.empty(numel, dtype=out, device="cuda") if out else None)
    cpu, twin = ([None if t is None else t.to(where, copy=True) for t in gpu] for where in ("cpu", "cuda"))
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "step": 7, "grad_scale": 0.3}
    for state in (gpu, cpu):
        kernels.adamw(*state, decoupled=decoupled, **options)
    adamw_reference(*twin, checked_scalars(**options, maximize=False, decoupled=decoupled))
    for on_gpu, on_cpu, reference in zip(gpu, cpu, twin, strict=True):
        assert on_gpu is None or same_bits(on_gpu.cpu(), on_cpu)
        assert on_gpu is None or same_bits(on_gpu, reference)


def test_check_and_unscale_handles_more_than_2_to_the_31_elements():
    numel = (1 << 31) + 70_001
    if torch.cuda.mem_get_info()[0] < 3 * numel * 2:
        pytest.skip("needs 13 GiB of device memory that is not in use")
    tensor = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    tensor[-1] = 3.0
    found, squares = kernels.check_and_unscale(tensor, 0.5)
    assert found.item() is False
    assert squares.item() == (numel - 1) * 0.25 + 2.25
    assert tensor[-1].item() == 1.5
    assert (tensor[(1 << 31) - 2 : (1 << 31) + 2] == 0.5).all()
    tensor[-2] = math.inf
    assert kernels.check_and_unscale(tensor)[0].item() is True
