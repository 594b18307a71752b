"""Compares the bytes that a training step moves, at six memory budgets, with a straight line.

The smallest budget is the default; the largest budget keeps all records in RAM. The line predicts the bytes of a step
from the budget. The line begins at the bytes that a step moves with the default budget. Each byte that a larger budget
adds lowers the line by the same amount. If a parameter is kept in RAM, a step moves only the parameter's gradient and,
on average, a sixteenth of the parameter's state.

The kernel counts the bytes that the process moves, so other programs on the machine do not change the result. The
default of --steps is the number of steps in which memascend writes each record in RAM once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

_LOG_STEPS, _WARM_STEPS, _PARTS = 16, 2, 5
# The bytes that a step moves for each parameter that is not kept in RAM, by the parameter's dtype.
_MOVED = {"bfloat16": 26, "float32": 28}
# The bytes of memory that each parameter takes if it is kept in RAM, by the parameter's dtype.
_TAKEN = {"bfloat16": 14, "float32": 16}
# The bytes that a step moves for each parameter that is kept in RAM, by the parameter's dtype. Each step writes the
# gradient. Once in `_LOG_STEPS` steps, memascend also writes the 12 bytes of the parameter's state.
_LOGGED = {"bfloat16": 2 + 12 / _LOG_STEPS, "float32": 4 + 12 / _LOG_STEPS}


def main() -> None:
    """Measures each dtype at each budget; prints a table for each dtype, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", choices=("4M", "25M", "125M", "500M"), default="125M")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(_MOVED), default=list(_MOVED))
    parser.add_argument(
        "--tokens", type=int, default=128, help="tokens in a step; the number of bytes does not depend on it"
    )
    parser.add_argument("--steps", type=int, default=_LOG_STEPS, help="number of measured steps")
    parser.add_argument("--storage", default=".", help="a folder on the disk to use")
    parser.add_argument("--json", action="store_true", help="print values instead of tables")
    options = parser.parse_args()
    found = {dtype: [_measured(options, dtype, part) for part in range(_PARTS + 1)] for dtype in options.dtypes}
    if options.json:
        print(json.dumps(found, indent=1))
        return
    from memascend.text import table

    for dtype, rows in found.items():
        count = rows[0]["parameters"]
        line = f"{_MOVED[dtype]} P - {(_MOVED[dtype] - _LOGGED[dtype]):.2f} (budget - default) / {_TAKEN[dtype]}"
        print(
            f"{count:,} (P) parameters in {dtype}, {options.tokens} tokens, {options.steps} steps; the line is {line}\n"
        )
        columns = (
            "kept in RAM",
            "budget, MB",
            "read B/param",
            "written B/param",
            "moved B/param",
            "planned",
            "the line",
            "off it",
        )
        shown = [
            (
                f"{row['ram_tier_part']:.0%}",
                f"{row['budget'] / 1e6:.0f}",
                f"{row['read'] / count:.2f}",
                f"{row['written'] / count:.2f}",
                f"{(row['read'] + row['written']) / count:.2f}",
                f"{row['planned'] / count:.2f}",
                f"{row['line'] / count:.2f}",
                f"{row['off']:+.1%}",
            )
            for row in rows
        ]
        print(table(columns, shown) + "\n")
    worst = max(abs(row["off"]) for rows in found.values() for row in rows)
    print(f"largest distance from the line: {worst:.1%} of the bytes that a step moves with the default budget")


def _measured(options: argparse.Namespace, dtype: str, part: int) -> dict[str, Any]:
    """Trains with the budget that keeps `part` fifths of the parameters in RAM; returns the measurements.

    "line" has the bytes that the line predicts. "off" has the difference of the measured bytes from the predicted
    bytes, as a fraction of the bytes that a step moves with the default budget.
    """
    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-line-") as folder:
        row = _trained(options, dtype, part, str(Path(folder, "run.store")))
    moved = _MOVED[dtype] * row["parameters"]
    saved = (_MOVED[dtype] - _LOGGED[dtype]) / _TAKEN[dtype]
    row["line"] = moved - saved * (row["budget"] - row["default"])
    row["off"] = (row["read"] + row["written"] - row["line"]) / moved
    return row


def _trained(options: argparse.Namespace, dtype: str, part: int, store: str) -> dict[str, Any]:
    import torch

    import memascend
    from benchmarks import counters
    from benchmarks.train.cell.systems.ours import held_budget
    from benchmarks.train.cell.workload import WORKLOADS, made

    work = replace(WORKLOADS[f"{options.parameters}-1x128"], length=options.tokens, dtype=dtype)
    model = made(work)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    original = torch.optim.AdamW(model.parameters(), lr=1e-4)
    given: dict[str, Any] = {
        "storage": store,
        "gradients": "fused",
        "device": "cpu",
        "log_steps": _LOG_STEPS,
    }
    default, budget = (held_budget(model, original, given, percent) for percent in (0, 100 * part // _PARTS))
    model, optimizer = memascend.offload(model, original, host_memory=budget, **given)
    tokens = torch.randint(0, work.vocabulary, (1, options.tokens))

    def train(steps: int) -> None:
        for _ in range(steps):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with optimizer:
        train(_WARM_STEPS)
        before = counters.counts()
        train(options.steps)
        moved = counters.counts().since(before)
        return {
            "parameters": parameters,
            "budget": budget,
            "default": default,
            "ram_tier_part": optimizer.plan.ram_tier_part,
            "planned": optimizer.plan.moved_bytes,
            "read": moved["read"] / options.steps,
            "written": moved["written"] / options.steps,
        }


if __name__ == "__main__":
    main()
