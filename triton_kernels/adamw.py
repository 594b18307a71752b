"""Computes one step of AdamW or Adam on fp32 state, with gradients and parameters of 16 or 32 bits."""

from __future__ import annotations

import dataclasses

import torch

from memascend import _core
from memascend.tensors import flat

from .arguments import FLOATS, require, require_apart, require_same, threads_of
from .routes import route
from .scalars import Scalars, checked_scalars

# The number of elements that `adamw_reference` updates at a time. The temporary tensors take about 100 bytes per
# element.
PIECE_ELEMENTS = 1 << 20


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out16: torch.Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    maximize: bool = False,
    decoupled: bool = True,
    threads: int | None = None,
) -> None:
    """Does one AdamW step in place, in one pass over memory.

    The results are bit-identical on CPU and GPU, and for any number of threads.

    On CPU the results are bit-identical to `torch.optim.AdamW(fused=True)`, with one exception. Each thread of torch
    updates a share of the elements. For the last elements of each share (`numel % 16` elements with AVX-512), torch
    computes the second moment in another order of operations.

    Args:
        master: the parameter, fp32, updated in place.
        grad: the gradient, fp32, bf16 or fp16; not changed.
        exp_avg: first moment, fp32, updated in place.
        exp_avg_sq: second moment, fp32, updated in place.
        out16: receives the updated parameter in bf16 or fp16, rounded to nearest even. None if the parameter itself is
            fp32.
        lr: learning rate.
        betas: the decays of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: the parameter is multiplied by `1 - lr * weight_decay`.
        step: the number of this update; the first update is 1.
        grad_scale: the fp32 factor that **multiplies** the gradient. torch's argument `grad_scale` divides the gradient
            instead.
        maximize: if true, the step maximizes the loss instead of minimizing it.
        decoupled: False for Adam, which adds `weight_decay` times the parameter to the gradient (L2) instead. The
            results are then bit-identical to `torch.optim.Adam(fused=True)`, with the exception described above.
        threads: the number of threads on CPU; None means `torch.get_num_threads()`.

    Raises:
        ConfigError: an argument is not valid. The message names this argument. Nothing has been changed.
    """
    scalars = checked_scalars(
        lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=step, grad_scale=grad_scale, maximize=maximize,
        decoupled=decoupled,
    )  # fmt: skip
    count = threads_of(threads)
    state = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    others = {"grad": require("grad", grad)}
    for name, tensor in state.items():
        require(name, tensor, (torch.float32,))
    if out16 is not None:
        others["out16"] = require("out16", out16, (torch.bfloat16, torch.float16))
    require_same(("master", master), state | others)
    require_apart((state | others).items())
    if not master.numel():
        return
    taken = route(master.device).name
    if taken == "rust":
        half = None if out16 is None else (out16.data_ptr(), FLOATS.index(out16.dtype))
        _core.kernel_adam(
            master.data_ptr(), (grad.data_ptr(), FLOATS.index(grad.dtype)), exp_avg.data_ptr(), exp_avg_sq.data_ptr(),
            half, master.numel(), dataclasses.astuple(scalars), count,
        )  # fmt: skip
    elif taken == "triton":
        from memascend.kernels.adamw_jit import launch

        launch(master, grad, exp_avg, exp_avg_sq, out16, scalars)
    else:
        adamw_reference(master, grad, exp_avg, exp_avg_sq, out16, scalars)
        return
    written = [master, exp_avg, exp_avg_sq] if out16 is None else [master, exp_avg, exp_avg_sq, out16]
    torch.autograd.graph.increment_version(written)


def adamw_reference(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out16: torch.Tensor | None,
    scalars: Scalars,
) -> None:
    """Does the update of `adamw` with plain torch operations, for devices without a kernel.

    The results are bit-identical to the kernels' results.
    """
    with torch.no_grad():
        for start in range(0, master.numel(), PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            p, m, v = (flat(tensor)[piece] for tensor in (master, exp_avg, exp_avg_sq))
            new_p, new_m, new_v = _formula(p, flat(grad)[piece].float(), m, v, scalars)
            p.copy_(new_p)
            m.copy_(new_m)
            v.copy_(new_v)
            if out16 is not None:
                flat(out16)[piece].copy_(new_p)


def _formula(
    p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, s: Scalars
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = g * s.grad_factor
    p = p * s.decay
    if s.l2 != 0:
        g = _fma(p, torch.full_like(p, s.l2), g)
    m = _fma(torch.full_like(g, s.first_weight), g - m, g if s.from_gradient else m)
    v = _fma(g * s.one_minus_beta2, g, v * s.beta2)
    # Compute the root in float64, and round the root to fp32. The result is correctly rounded, while the last bit of
    # torch's own fp32 root on CPU is sometimes wrong. Divide by a tensor: a GPU does not divide by a Python number, but
    # multiplies by the number's rounded reciprocal, which would round twice.
    denominator = v.double().sqrt().float() / torch.full_like(v, s.bias2_root) + s.eps
    return p + (m * s.step_size) / denominator, m, v


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Returns `a * b + c` in fp32, rounded once.

    The product of two fp32 numbers is exact in float64. The sum is rounded to odd in float64. Rounding this sum to fp32
    then gives the same result as a single rounding.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    adjust = (error != 0) & (bits & 1 == 0) & torch.isfinite(total) & (total != 0)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(adjust, bits + toward, bits).view(torch.float64).float()
