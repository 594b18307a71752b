"""`memascend bench update`: the pipelined AdamW on SSD, against the same bytes moved and nothing computed."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from memascend import engine, nvme
from memascend.cli.show import bars, bytes_shown, seconds_shown, table
from memascend.cli.transfer import blocks

if TYPE_CHECKING:
    import argparse

    import torch

    from memascend.nvme import Ticket, Volume

SUMMARY = "a step of AdamW on SSD, against pure I/O of the same bytes"

_MEGA = 1_000_000
# Bytes of a parameter in a step: state and 16-bit values.
_STATE_BYTES, _VALUE_BYTES = 12, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--storage", default=None, metavar="FOLDER", help="where to measure (default: here)")
    parser.add_argument("--parameters", type=int, default=64, metavar="M", help="millions of parameters (default 64)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default 5)")
    parser.add_argument("--chunks", type=int, default=4, metavar="N", help="staging chunks (default 4)")
    parser.add_argument("--chunk-elements", type=int, default=engine.CHUNK_ELEMENTS, metavar="N")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory(dir=options.storage or ".", prefix="memascend-bench-") as folder:
        result = _measure(Path(folder), options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(_shown(result))
    if options.picture:
        series = {"GB/s": {name: result[name] for name in ("update_gb_per_second", "pure_gb_per_second")}}
        bars(Path(options.picture), "A step of AdamW on SSD", "GB/s", series)
    return 0


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    import torch

    chunk = options.chunk_elements
    whole = max(1, options.parameters * _MEGA // chunk)
    # Few large parameters, as models have; the size of one gradient is what the queue must take.
    names = [f"weight.{index}" for index in range(8)]
    numel = max(1, whole // len(names)) * chunk
    values = torch.randn(numel).bfloat16()
    entries = [engine.Entry(name=name, values=values, state=engine.adam_state(values)) for name in names]
    gradient = torch.randn(numel).bfloat16()
    store = engine.Store.create(folder / "store", entries, chunk_elements=chunk)
    del entries, values
    chunks = len(names) * numel // chunk
    nbytes = chunks * chunk * (2 * _STATE_BYTES + _VALUE_BYTES)
    size = 2 * chunks * chunk * (_STATE_BYTES + _VALUE_BYTES)
    seconds: dict[str, list[float]] = {"update": [], "pure": [], "commit": []}
    volume = nvme.open(folder / "pure", size=size)
    with (
        volume,
        engine.Engine(store, chunks=options.chunks) as updates,
        blocks(chunk * (_STATE_BYTES + _VALUE_BYTES), options.chunks) as memory,
    ):
        # Both slots of both are written once before anything counts: fresh extents are slower.
        for step in range(1, options.rounds + 3):
            began = time.perf_counter()
            for name in names:
                updates.update(name, gradient, step=step)
            updates.finish()
            updated = time.perf_counter()
            updates.commit(step)
            committed = time.perf_counter()
            _pure(volume, memory, chunks, chunk, slot=step % 2)
            moved = time.perf_counter()
            if step > 2:
                seconds["update"].append(updated - began)
                seconds["commit"].append(committed - updated)
                seconds["pure"].append(moved - committed)
        counters, staging = updates.counters(), updates.staging_bytes
    info = store.info()
    store.close()
    median = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = [pure / update for pure, update in zip(seconds["pure"], seconds["update"], strict=True)]
    return {
        "parameters": len(names) * numel,
        "bytes": nbytes,
        "update_seconds": median["update"],
        "update_gb_per_second": nbytes / median["update"] / 1e9,
        "pure_seconds": median["pure"],
        "pure_gb_per_second": nbytes / median["pure"] / 1e9,
        "update_over_pure": statistics.median(ratios),
        "commit_seconds": median["commit"],
        "commit_share": median["commit"] / median["update"],
        "sealing_share": counters["seconds"]["sealing"]
        / sum(seconds["update"])
        * len(seconds["update"])
        / (len(seconds["update"]) + 2),
        "staging_bytes": staging,
        "index_bytes": info["index_bytes"],
        "index_bytes_per_mib": info["index_bytes"] / (info["slot_bytes"] / 2**20),
    }


def _pure(volume: Volume, memory: list[torch.Tensor], chunks: int, chunk: int, slot: int) -> None:
    """Read each chunk's state, write its state and values to the other slot: as many in flight, nothing computed."""
    state, values = chunk * _STATE_BYTES, chunk * _VALUE_BYTES
    values_at = 2 * chunks * state
    reading: deque[tuple[int, torch.Tensor, Ticket]] = deque()
    writing: deque[tuple[torch.Tensor, Ticket, Ticket]] = deque()
    free = list(memory)
    begun = 0
    while begun < chunks or reading:
        while begun < chunks and len(reading) < max(1, len(memory) // 2):
            if not free:
                tensor, one, two = writing.popleft()
                one.wait()
                two.wait()
                free.append(tensor)
            tensor = free.pop()
            offset = (slot * chunks + begun) * state
            reading.append((begun, tensor, volume.read(tensor[:state], offset)))
            begun += 1
        index, tensor, ticket = reading.popleft()
        ticket.wait()
        other = (1 - slot) * chunks + index
        one = volume.write(tensor[:state], other * state)
        two = volume.write(tensor[state:], values_at + other * values)
        writing.append((tensor, one, two))
    for _, one, two in writing:
        one.wait()
        two.wait()


def _shown(result: dict[str, float]) -> str:
    rows = [
        (
            "update",
            seconds_shown(result["update_seconds"]),
            f"{result['update_gb_per_second']:.2f}",
            f"{result['update_over_pure']:.2f}",
        ),
        (
            "pure I/O of the same bytes",
            seconds_shown(result["pure_seconds"]),
            f"{result['pure_gb_per_second']:.2f}",
            "1",
        ),
    ]
    return (
        f"A step of AdamW on {result['parameters'] / _MEGA:.0f} M bf16 parameters, "
        f"{bytes_shown(int(result['bytes']))}\n\n"
        + table(("what", "time", "GB/s", "ratio"), rows)
        + f"\n\ncommit, durable: {seconds_shown(result['commit_seconds'])}, {result['commit_share']:.2%} of the step\n"
        f"checksums of what is written: {result['sealing_share']:.1%} of the step\n"
        f"staging memory: {bytes_shown(int(result['staging_bytes']))}\n"
        f"index: {bytes_shown(int(result['index_bytes']))}, {result['index_bytes_per_mib']:.0f} bytes per MiB of state"
    )
