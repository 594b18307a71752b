"""The Triton body of `adamw`. It does the same operations as the CPU kernel, in the same order."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from memascend.tensors import flat

from .scalars import Scalars

BLOCK = 1024


@triton.jit
def adamw_kernel(  # type: ignore[no-untyped-def]
    master, grad, exp_avg, exp_avg_sq, out16, numel,
    grad_factor, decay, l2, first_weight, beta2, one_minus_beta2, bias2_root, eps, step_size,
    L2: tl.constexpr, FROM_GRADIENT: tl.constexpr, HAS_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Updates one block of elements.

    `launch` passes `enable_fp_fusion=False`, so only the explicit `tl.fma` calls fuse a product and a sum.
    """
    # Convert to 64 bits before the multiplication, because a tensor may have more than 2^31 elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    p = tl.load(master + offsets, mask=inside) * decay
    g = tl.load(grad + offsets, mask=inside).to(tl.float32) * grad_factor
    m = tl.load(exp_avg + offsets, mask=inside)
    v = tl.load(exp_avg_sq + offsets, mask=inside)
    if L2:
        g = tl.fma(p, l2, g)
    m = tl.fma(first_weight, g - m, g if FROM_GRADIENT else m)
    v = tl.fma(g * one_minus_beta2, g, v * beta2)
    # `sqrt_rn` and `div_rn` round to nearest, as IEEE 754 requires; `sqrt` and `/` are approximations.
    denominator = tl.div_rn(tl.sqrt_rn(v), bias2_root) + eps
    p = p + tl.div_rn(m * step_size, denominator)
    tl.store(master + offsets, p, mask=inside)
    tl.store(exp_avg + offsets, m, mask=inside)
    tl.store(exp_avg_sq + offsets, v, mask=inside)
    if HAS_OUT:
        tl.store(out16 + offsets, p.to(out16.dtype.element_ty), mask=inside)


def launch(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out16: torch.Tensor | None,
    scalars: Scalars,
) -> None:
    """Queues the update of dense, non-empty tensors on one device."""
    device = master.device
    numel = master.numel()
    # Without `out16`, the kernel never uses this pointer.
    out = flat(master if out16 is None else out16)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        adamw_kernel[(triton.cdiv(numel, BLOCK),)](
            flat(master), flat(grad), flat(exp_avg), flat(exp_avg_sq), out, numel,
            scalars.grad_factor, scalars.decay, scalars.l2, scalars.first_weight, scalars.beta2,
            scalars.one_minus_beta2, scalars.bias2_root, scalars.eps, scalars.step_size,
            L2=scalars.l2 != 0, FROM_GRADIENT=scalars.from_gradient, HAS_OUT=out16 is not None,
            BLOCK=BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
