"""Compares memascend's CPU kernels with the kernels of torch, DeepSpeed (cpu_adam), bitsandbytes and torchao.

memascend's kernels and the kernels of the other libraries ("peers") get the same values and the same number of
threads. The buffers into which the peers cast are allocated before the measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.reduced import reduced_calls
from benchmarks.rounds import interleaved
from benchmarks.show import bars
from memascend.cli import process
from memascend.text import bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    Call = Callable[[], object]

_STEP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The times and memory of one kernel and one peer."""

    name: str  # the kernel and its dtypes
    peer: str  # the name of the peer
    seconds: tuple[float, float]  # median seconds of one call: of our kernel, of the peer
    extra: tuple[int, int]  # bytes that one call allocates at its peak: our kernel, the peer

    @property
    def ratio(self) -> float:
        """The seconds of the peer, divided by the seconds of our kernel."""
        return self.seconds[1] / self.seconds[0]


def main(words: Sequence[str] | None = None) -> None:
    """Measures the kernels; prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", metavar="PNG", help="draw the result into this file")
    parser.add_argument(
        "--elements", type=int, default=64, metavar="MI", help="size of a tensor in Mi elements (default 64)"
    )
    parser.add_argument("--threads", type=int, default=None, metavar="N", help="threads (default: torch's)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default 5)")
    _measure(parser.parse_args(words))


def _measure(options: argparse.Namespace) -> None:
    import torch

    from memascend import kernels

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    numel = max(1, options.elements) << 20
    rows = [*_check_rows(numel, options.rounds), *_adam_rows(numel, options.rounds)]
    for name, ours, peers in reduced_calls(numel, _STEP):
        rows += _rows(name, ours, peers, options.rounds)
    route = kernels.route("cpu")
    if options.json:
        facts = {"elements": numel, "threads": torch.get_num_threads(), "simd": route.why}
        result = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows]
        print(json.dumps(facts | {"rows": result}, indent=2))
    else:
        print(f"{numel >> 20} Mi elements, {torch.get_num_threads()} threads, {route.why}\n")
        print(_shown(rows, numel))
    if options.picture:
        rates = [{f"{row.name}\n{row.peer}": numel / row.seconds[i] / 1e9 for row in rows} for i in (0, 1)]
        title = f"Kernels on {numel >> 20} Mi elements, {torch.get_num_threads()} threads ({route.why})"
        bars(
            Path(options.picture),
            title,
            "billions of elements a second",
            dict(zip(("memascend", "peer"), rates, strict=True)),
        )


def _shown(rows: list[Row], numel: int) -> str:
    head = ("kernel", "against", "Gelem/s", "seconds", "peer's", "ratio", "extra memory", "peer's")
    return table(
        head,
        [
            (
                row.name,
                row.peer,
                f"{numel / row.seconds[0] / 1e9:.2f}",
                *(seconds_shown(seconds) for seconds in row.seconds),
                f"{row.ratio:.2f}",
                *(bytes_shown(extra) for extra in row.extra),
            )
            for row in rows
        ],
    )


def _rows(name: str, ours: Call, peers: dict[str, Call], rounds: int) -> list[Row]:
    calls = {"": ours, **peers}
    seconds = interleaved(calls, rounds)
    extra = {peer: _peak_bytes(call) for peer, call in calls.items()}
    return [
        Row(name=name, peer=peer, seconds=(seconds[""], seconds[peer]), extra=(extra[""], extra[peer]))
        for peer in peers
    ]


def _peak_bytes(call: Call) -> int:
    """Returns the largest number of bytes by which the process's resident memory grows while `call` runs.

    Returns 0 if it grows by at most 1 MiB.
    """
    process.restart_peak()
    before = process.resident()
    call()
    # A rise of up to 1 MiB may come from Python and from the stacks of threads.
    rise = process.resident_peak() - before
    return rise if rise > 1 << 20 else 0


def _check_rows(numel: int, rounds: int) -> list[Row]:
    import torch

    from memascend import kernels

    rows = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        grad = torch.full((numel,), 0.01).to(dtype)
        rows += _rows(
            f"check {_short(dtype)}",
            lambda grad=grad: kernels.check_and_unscale(grad),  # type: ignore[misc]
            {"isinf.any or isnan.any": lambda grad=grad: bool(grad.isinf().any() or grad.isnan().any())},  # type: ignore[misc]
            rounds,
        )
    return rows


def _adam_rows(numel: int, rounds: int) -> list[Row]:
    import torch

    from memascend import kernels

    master, m, v, grad32 = (torch.full((numel,), value) for value in (0.02, 1e-3, 1e-3, 1e-2))
    grad, out = grad32.bfloat16(), master.bfloat16()
    parameter = torch.nn.Parameter(master)
    parameter.grad = grad32
    fused = torch.optim.AdamW([parameter], fused=True, **_STEP)  # type: ignore[arg-type]
    fused.state[parameter] = {"step": torch.tensor(10.0), "exp_avg": m, "exp_avg_sq": v}

    def ours() -> None:
        kernels.adamw(master, grad, m, v, out, step=10, **_STEP)  # type: ignore[arg-type]

    def cast_around(step: Call) -> Call:
        def both() -> None:
            grad32.copy_(grad)
            step()
            out.copy_(master)

        return both

    peers = {"AdamW(fused=True) and casts": cast_around(fused.step)}
    deepspeed = _cpu_adam(parameter, m, v)
    if deepspeed is not None:
        peers["cpu_adam and casts"] = cast_around(deepspeed)
    return _rows("adamw bfloat16 to bfloat16", ours, peers, rounds)


def _cpu_adam(parameter: torch.nn.Parameter, m: torch.Tensor, v: torch.Tensor) -> Call | None:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    optimizer = DeepSpeedCPUAdam([parameter], adamw_mode=True, **_STEP)
    optimizer.state[parameter] = {"step": 10, "exp_avg": m, "exp_avg_sq": v}
    step: Call = optimizer.step
    return step


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
