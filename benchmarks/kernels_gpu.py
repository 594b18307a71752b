"""Measures the memory bandwidth of memascend's GPU kernels, and compares their speed with torch's operations.

    python -m benchmarks.kernels_gpu [--mebibytes N] [--json]

The table shows the bandwidth of each kernel, in GB/s and as a fraction of the bandwidth of a plain copy in the same
run. Each round runs every case once. CUDA events measure the seconds of each call, and the result is the median of all
rounds. As in a training step, the host queues the call while the device is still busy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import TYPE_CHECKING

import torch

from memascend import kernels
from memascend.text import table

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 25
# Before each call, the device is kept busy for this number of clock cycles. In this time, the host queues the call.
_AHEAD = 1_000_000


def seconds(cases: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns for each case the median seconds of one call on the device. Each round runs every case once."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for call in cases.values():
        call()
    for _ in range(ROUNDS):
        for name, call in cases.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_AHEAD)  # noqa: SLF001 - torch has no public sleep
            start.record()
            call()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / 1e3)
    return {name: statistics.median(times) for name, times in samples.items()}


def check_rows(nbytes: int) -> list[tuple[str, str, float, float, float]]:
    """Measures the check of gradients for infinity and NaN.

    Returns rows: kernel, peer, GB/s, fraction of the copy's bandwidth, and the peer's seconds divided by the kernel's.
    """
    rows = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        grad = torch.randn(nbytes // dtype.itemsize, device="cuda").mul_(0.01).to(dtype)
        copy = torch.empty_like(grad)
        found, scale = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
        cases: dict[str, Callable[[], object]] = {
            "copy": lambda: copy.copy_(grad),  # noqa: B023
            "ours": lambda: kernels.check_and_unscale(grad),  # noqa: B023
            "isinf.any or isnan.any": lambda: grad.isinf().any() | grad.isnan().any(),  # noqa: B023
            # Our kernel also computes the squared norm, by an exact sum. The sum in torch's norm is rounded.
            "isinf.any or isnan.any, norm": lambda: (
                grad.isinf().any() | grad.isnan().any(),  # noqa: B023
                torch.linalg.vector_norm(grad, dtype=torch.float32),  # noqa: B023
            ),
        }
        # torch does not have the following operation for bf16, because only training in fp16 needs GradScaler.
        if dtype != torch.bfloat16:
            cases["_amp_foreach_non_finite_check_and_unscale_"] = (
                lambda: torch._amp_foreach_non_finite_check_and_unscale_([grad], found, scale)  # noqa: B023
            )
        took = seconds(cases)
        bandwidth = 2 * nbytes / took["copy"]
        for peer in list(took)[2:]:
            name = f"check {str(dtype).removeprefix('torch.')}"
            rate = nbytes / took["ours"]
            rows.append((name, peer, rate / 1e9, rate / bandwidth, took[peer] / took["ours"]))
    return rows


def adam_rows(nbytes: int) -> list[tuple[str, str, float, float, float]]:
    """Measures AdamW with a bf16 gradient and a bf16 parameter; returns one row with the columns of `check_rows`."""
    numel = nbytes // 4
    master, m, v, grad32 = (torch.full((numel,), x, device="cuda") for x in (0.02, 1e-3, 1e-3, 1e-2))
    grad, out = grad32.bfloat16(), master.bfloat16()
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    parameter = torch.nn.Parameter(master)
    parameter.grad = grad32
    fused = torch.optim.AdamW([parameter], fused=True, **options)
    fused.state[parameter] = {"step": torch.tensor(10.0, device="cuda"), "exp_avg": m, "exp_avg_sq": v}

    def theirs() -> None:
        grad32.copy_(grad)
        fused.step()
        out.copy_(master)

    took = seconds(
        {
            "copy": lambda: m.copy_(v),
            "ours": lambda: kernels.adamw(master, grad, m, v, out, step=10, **options),
            "AdamW(fused=True) and casts": theirs,
        }
    )
    rate, bandwidth = 28 * numel / took["ours"], 8 * numel / took["copy"]
    ratio = took["AdamW(fused=True) and casts"] / took["ours"]
    return [("adamw bfloat16", "AdamW(fused=True) and casts", rate / 1e9, rate / bandwidth, ratio)]


def main() -> int:
    """Measures the kernels; prints a table or JSON. Returns 1 if torch finds no CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="size of each tensor (default 256)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "torch finds no CUDA device to measure: run this on a machine with a GPU that torch can use",
            file=sys.stderr,
        )
        return 1
    nbytes = options.mebibytes << 20
    rows = check_rows(nbytes) + adam_rows(nbytes)
    if options.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "bytes": nbytes, "rows": rows}, indent=2))
        return 0
    print(f"{torch.cuda.get_device_name()}, {options.mebibytes} MiB a tensor, {kernels.route('cuda')}\n")
    head = ("kernel", "against", "GB/s", "of the bandwidth", "ratio")
    print(table(head, [(n, p, f"{r:.0f}", f"{f:.2f}", f"{x:.2f}") for n, p, r, f, x in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
