"""Measures several ranks on this machine: `python -m benchmarks.ranks [--ranks 1 2 4] [--storage D] [--picture F]`.

The ranks are processes with the gloo backend on the CPU. For each number of ranks, they train the same model in these
ways, which take turns: FSDP2 in memory; FSDP2 with its CPU offload; memascend with `reduction="ordered"`, which adds
gradients in the order of ranks; memascend with `reduction="native"`, which lets the backend add gradients.

With one rank, they train in two ways (`OF_ONE`). The tables have three figures:

- the bytes that a rank moves in a step with "ordered", compared with 1/W of the bytes of one process, where W is the
  number of ranks;
- the memory that memascend holds in a rank with "ordered", compared with its plan and with the memory of one process;
- the median seconds of a step, in each way.

Compare only ratios of seconds, because all ranks share the processors and the disk of one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from memascend.text import bytes_shown, open_pyplot, seconds_shown, table

WARM = 2
WIDTH, BLOCKS, ROWS = 512, 6, 64
# With one process, the model is not sharded. FSDP2 then has no CPU offload, and both reductions of memascend do the
# same, so only the ways in `OF_ONE` are measured.
WAYS = ("FSDP2", "CPU offload", "ordered", "native")
OF_ONE = ("FSDP2", "ordered")
PEERS = ("FSDP2", "CPU offload")


def main() -> None:
    """Runs every number of ranks and prints the tables. With `--rank-of`, this process is one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--storage", type=Path, default=Path(), help="a folder on the disk (default: here)")
    parser.add_argument("--picture", type=Path, help="draw the bytes and the memory of a rank into this .png file")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        be_rank(Path(options.rank_of), options.steps)
        return
    found = {count: measured(count, options) for count in options.ranks}
    print(shown(found))
    if options.picture is not None:
        draw(found, options.picture)


def measured(count: int, options: argparse.Namespace, module: str = "benchmarks.ranks") -> list[dict[str, Any]]:
    """Runs a benchmark's module with `count` ranks; returns the measurements of each rank, in the order of ranks."""
    with tempfile.TemporaryDirectory(dir=options.storage, prefix="memascend-bench-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command += ["-m", module, "--steps", str(options.steps), "--rank-of", folder]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]


def be_rank(folder: Path, steps: int) -> None:
    """Trains as one rank; writes the measurements to `folder`. The ways take turns, one step at a time."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, count = distributed.get_rank(), distributed.get_world_size()
    ways = {name: begun(name, folder, count) for name in (WAYS if count > 1 else OF_ONE)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(WARM + steps):
        inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step * count + rank)).bfloat16()
        for name, (model, optimizer) in ways.items():
            distributed.barrier()
            began = time.perf_counter()
            model(inputs).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds[name].append(time.perf_counter() - began)
    found: dict[str, Any] = {"seconds": {name: statistics.median(took[WARM:]) for name, took in seconds.items()}}
    report = ways["ordered"][1].report().to_dict()
    moved = sum(report["read"].values()) + sum(report["written"].values()) - report["written"]["first values"]
    found["moved"] = moved / (WARM + steps)
    found["planned"], found["held"] = ways["ordered"][1].plan.host_peak, report["host"]["peak"]
    for name, (_, optimizer) in ways.items():
        if name not in PEERS:
            optimizer.close()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def begun(name: str, folder: Path, count: int) -> tuple[Any, Any]:
    """Returns a model and its optimizer, set up to train in the way `name`."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    import memascend

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks).bfloat16()
    if count > 1:
        # FSDP2 needs pinned memory only for copies to a GPU. Without a GPU, pinned memory cannot be allocated.
        policy = CPUOffloadPolicy(pin_memory=False) if name == "CPU offload" else OffloadPolicy()
        for block in model:
            fully_shard(block, offload_policy=policy)
        fully_shard(model, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if name in PEERS:
        return model, optimizer
    reduction: Any = name
    where = folder / name if count > 1 else folder / f"{name}.store"
    return memascend.offload(model, optimizer, storage=where, gradients="ssd", reduction=reduction)


def shown(found: dict[int, list[dict[str, Any]]]) -> str:
    """Returns two tables: one of bytes and memory, and one of seconds."""
    one = found[1][0] if 1 in found else None
    rows = []
    for count, ranks in found.items():
        moved, held, planned = (max(rank[name] for rank in ranks) for name in ("moved", "held", "planned"))
        part, beside = (
            ("", "") if one is None else (f"{moved * count / one['moved'] - 1:+.1%}", f"{held / one['held']:.2f}")
        )
        rows.append(
            (str(count), bytes_shown(int(moved)), part, bytes_shown(held), f"{held / planned - 1:+.1%}", beside)
        )
    head = (
        "ranks", "bytes a rank moves in a step", "beside 1/W", "host memory held", "beside its plan", "of one's",
    )  # fmt: skip
    times = []
    for count, ranks in found.items():
        seconds = ranks[0]["seconds"]
        plain = seconds["FSDP2"]
        times.append(
            (
                str(count),
                seconds_shown(plain),
                *(f"{seconds[name] / plain:.2f}" if name in seconds else "" for name in WAYS[1:]),
                f"{seconds['ordered'] / seconds['native']:.2f}" if "native" in seconds else "",
            )
        )
    times_head = (
        "ranks", "a step of FSDP2 in memory", "its CPU offload: times that", "memascend, ordered", "native",
        "ordered / native",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + table(times_head, times)


def draw(found: dict[int, list[dict[str, Any]]], path: Path) -> None:
    """Draws two bar charts over the number of ranks. Each bar has the largest value of all ranks.

    One chart has the bytes that a rank moves in a step. Its marks show the bytes if all ranks together moved as many
    bytes as with the first number of ranks. The other chart has the memory of a rank. Its marks show the planned
    memory.
    """
    plt = open_pyplot()
    counts = list(found)
    moved, held, planned = (
        [max(rank[name] for rank in found[count]) / (1 << 20) for count in counts]
        for name in ("moved", "held", "planned")
    )
    parts = [moved[0] * counts[0] / count for count in counts]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for axis, title, bars, line, of_line in (
        (axes[0], "MiB that a rank moves to and from storage in a step", moved, parts, f"1/W of {counts[0]} rank's"),
        (axes[1], "MiB of host memory that a rank holds", held, planned, "its plan"),
    ):
        places = range(len(counts))
        drawn = axis.bar(places, bars, width=0.6, color="#1f77b4", label="memascend")
        axis.bar_label(drawn, fmt="%.1f", label_type="center", color="white")
        edges = [[place + side for place in places] for side in (-0.36, 0.36)]
        axis.hlines(line, *edges, color="black", label=of_line)
        axis.set_xticks(places, [f"{count} rank{'s' if count > 1 else ''}" for count in counts])
        axis.set_ylim(0, 1.2 * max(*bars, *line))
        axis.set_title(title, fontsize=10)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
