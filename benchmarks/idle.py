"""Shows when the disk is idle in a training step: `python -m benchmarks.idle`.

A separate process reads the disk's counters every 10 ms, while memascend trains the model of a workload. For each part
of a step, the table has the seconds of the part, the seconds in which no request was in flight, the average number of
requests in flight, and the GB/s moved.

A line below the table compares the step with fio. fio runs right before the steps and right after the steps. It uses
requests of 1 MiB, depth 16, and huge pages if this process may reserve them. The proportion of reads to writes is the
same as in the step. The line has fio's GB/s. It also has the ratio of the step's seconds to the seconds in which fio
moves the same number of bytes. The picture shows the last two steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import counters
from benchmarks.peers.fio import fio, huge_pages
from benchmarks.train.cell.systems import SYSTEMS, ours
from benchmarks.train.cell.workload import WORKLOADS, tokens
from memascend.errors import ConfigError
from memascend.text import open_pyplot, table

# The program of the process that reads the disk's counters. It does nothing else, so it does not delay the training.
SAMPLER = """
import json, select, sys, time
path, seconds = sys.argv[1], float(sys.argv[2])
samples, file = [], open(path)
print("ready", flush=True)
while not select.select([sys.stdin], [], [], seconds)[0]:
    file.seek(0)
    samples.append((time.perf_counter(), file.read()))
found = [(at, *(int(words[place]) for place in (2, 6, 8, 10))) for at, text in samples for words in [text.split()]]
print(json.dumps(found))
"""
_SECTOR = 512
_SAMPLED_SECONDS = 0.01
_FIO_BLOCK, _FIO_DEPTH = 1 << 20, 16
_FIO_FILE_BYTES = 4 << 30
_PARTS = ("forward", "backward", "step()")


def main() -> None:
    """Measures the steps and prints the table. With `--write`, also writes the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="125M-1x128")
    parser.add_argument("--system", choices=[name for name, way in SYSTEMS.items() if way.module == "ours"],
                        default="memascend")  # fmt: skip
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after two warm-up steps (6)")
    parser.add_argument("--storage", type=Path, default=Path(), help="a folder on the disk to measure (here)")
    parser.add_argument(
        "--write", type=Path, help="a folder for idle.txt and idle.png; the picture shows the last two steps"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.storage, prefix="memascend-bench-") as folder:
        spans, samples, peer = measured(options, Path(folder))
    text = f"{shown(options, spans, samples)}\n\n{peer}"
    print(text)
    if options.write:
        (options.write / "idle.txt").write_text(text + "\n")
        draw(options.write / "idle.png", options, spans[-2 * len(_PARTS) :], samples)


def measured(
    options: argparse.Namespace, folder: Path
) -> tuple[list[tuple[str, float, float]], list[list[float]], str]:
    """Returns the parts of the steps, the samples of the disk's counters, and the line that compares a step with fio.

    Each part of a step is (name, begin, end). Each sample is (time, sectors read, sectors written, requests in flight,
    queue time).
    """
    work = WORKLOADS[options.workload]
    ours.ready()
    system = ours.begin(work, SYSTEMS[options.system].settings, folder)
    (batch,) = tokens(work)
    spans: list[tuple[str, float, float]] = []

    def step() -> None:
        at = [time.perf_counter()]
        loss = system.forward(batch)
        at.append(time.perf_counter())
        system.backward(loss)
        at.append(time.perf_counter())
        system.update()
        at.append(time.perf_counter())
        spans.extend(zip(_PARTS, at, at[1:], strict=False))

    step()
    before = counters.counts()
    step()
    moved = counters.counts().since(before)
    spans.clear()
    peers = [_peer(folder, moved)]
    words = [sys.executable, "-S", "-c", SAMPLER, str(_counters(folder)), str(_SAMPLED_SECONDS)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sampler:
        assert sampler.stdout is not None
        sampler.stdout.readline()
        for _ in range(options.steps):
            step()
        output, _ = sampler.communicate("end\n")
    system.end()
    peers.append(_peer(folder, moved))
    ends = [end for name, _, end in spans if name == _PARTS[-1]]
    seconds = statistics.median(end - begin for begin, end in zip([spans[0][1], *ends], ends, strict=False))
    return spans, json.loads(output), _peer_text(seconds, moved, peers)


def _peer(folder: Path, moved: dict[str, float]) -> float:
    """Returns fio's GB/s. fio reads and writes in the proportion of `moved`. Returns 0 if `moved` has no bytes."""
    together = moved["read"] + moved["written"]
    if not together:
        return 0.0
    pattern = "mixed" if moved["read"] else "write"
    with huge_pages(2 * _FIO_BLOCK * _FIO_DEPTH) as huge:
        file, percent = folder / "fio", round(100 * moved["read"] / together)
        speed = fio(file, pattern, _FIO_BLOCK, _FIO_DEPTH, _FIO_FILE_BYTES, huge, reads_percent=percent)
    file.unlink()
    return speed.gb_per_second


def _peer_text(seconds: float, moved: dict[str, float], peers: list[float]) -> str:
    before, after = peers
    together = moved["read"] + moved["written"]
    if not together:
        return "a step moves nothing"
    ratio = seconds / (together / 1e9 / statistics.mean(peers))
    return (
        f"a step moves {together / 1e9:.2f} GB, {moved['read'] / together:.0%} of them read; fio with that mix: "
        f"{before:.2f} GB/s before, {after:.2f} after; so the step takes {ratio:.2f} of fio's time"
    )


def _counters(folder: Path) -> Path:
    device = folder.stat().st_dev
    path = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    if not path.exists():
        raise ConfigError(
            f"the disk of {folder} has no counters in /sys: choose a folder on another disk with --storage"
        )
    return path


def between(samples: list[list[float]]) -> list[dict[str, float]]:
    """Returns one dict for each pair of consecutive samples.

    Each dict has the times of the two samples, the GB/s read and written, the mean number of requests in flight, and
    the idle seconds between the samples.
    """
    found = []
    for (at, read, written, out, queued), (until, *later) in itertools.pairwise(samples):
        seconds = until - at
        moved = later[0] - read + later[1] - written
        found.append({
            "at": at, "until": until,
            "read": (later[0] - read) * _SECTOR / 1e9 / seconds,
            "written": (later[1] - written) * _SECTOR / 1e9 / seconds,
            "queue": (later[3] - queued) / 1e3 / seconds,
            # The kernel also counts busy time, but only in ticks of some milliseconds, which is too coarse for these
            # samples.
            "idle": seconds if not (out or later[2] or moved) else 0.0,
        })  # fmt: skip
    return found


def shown(options: argparse.Namespace, spans: list[tuple[str, float, float]], samples: list[list[float]]) -> str:
    """Returns the table of the parts of a step. It has medians over all steps; "together" adds two medians."""
    moments = between(samples)
    rows = []
    for part in (*_PARTS, "a step"):
        whole = len(_PARTS)
        times = (
            [(spans[at][1], spans[at + whole - 1][2]) for at in range(0, len(spans), whole)]
            if part == "a step"
            else [(begin, end) for name, begin, end in spans if name == part]
        )
        found = [_within(moments, begin, end) for begin, end in times]
        middle = {name: statistics.median(one[name] for one in found) for name in found[0]}
        rows.append((
            part, f"{middle['seconds']:.3f}", f"{middle['idle']:.3f}", f"{middle['queue']:.1f}",
            f"{middle['read']:.2f}", f"{middle['written']:.2f}", f"{middle['read'] + middle['written']:.2f}",
        ))  # fmt: skip
    head = ("part", "s", "s without a request", "requests out", "GB/s read", "GB/s written", "together")
    return f"{options.workload}, {options.system}; medians of {options.steps} steps\n\n{table(head, rows)}"


def _within(moments: list[dict[str, float]], begin: float, end: float) -> dict[str, float]:
    """Returns mean speeds, the mean queue, and the idle seconds between `begin` and `end`.

    The weight of each moment is the number of its seconds that lie between `begin` and `end`.
    """
    seconds = end - begin
    parts = [(moment, max(0.0, min(end, moment["until"]) - max(begin, moment["at"]))) for moment in moments]
    mean = {name: sum(moment[name] * part for moment, part in parts) / seconds for name in ("read", "written", "queue")}
    idle = sum(moment["idle"] * part / (moment["until"] - moment["at"]) for moment, part in parts)
    return {"seconds": seconds, "idle": idle, **mean}


def draw(
    path: Path, options: argparse.Namespace, spans: list[tuple[str, float, float]], samples: list[list[float]]
) -> None:
    """Draws GB/s read and written, and requests in flight, over the two steps in `spans`."""
    plt = open_pyplot()
    began, ended = spans[0][1], spans[-1][2]
    moments = [moment for moment in between(samples) if began <= moment["at"] <= ended]
    figure, (moved, queue) = plt.subplots(2, 1, sharex=True, figsize=(9, 5), layout="constrained")
    seconds = [moment["at"] - began for moment in moments]
    moved.stackplot(
        seconds, [moment["read"] for moment in moments], [moment["written"] for moment in moments],
        labels=("read", "written"), colors=("#1f6feb", "#f0b775"), step="post",
    )  # fmt: skip
    moved.set_ylabel("GB/s")
    moved.legend(loc="upper right", ncols=2, frameon=False)
    queue.step(seconds, [moment["queue"] for moment in moments], where="post", color="#24292f")
    queue.set_ylabel("requests out")
    queue.set_xlabel("seconds")
    for name, begin, _ in spans:
        for axes in (moved, queue):
            axes.axvline(begin - began, color="#8c959f", linewidth=0.8)
        queue.annotate(f" {name}", (begin - began, queue.get_ylim()[1]), va="top", fontsize=8)
    figure.suptitle(f"The disk in two steps of {options.workload}, {options.system}")
    figure.savefig(path, dpi=160)
    plt.close(figure)


if __name__ == "__main__":
    main()
