"""`memascend bench update`: measures the pipelined AdamW on SSD beside plain I/O, fio and DeepSpeed's swapper.

What checksums cost is measured by `cargo bench -p memascend-engine`, which can leave them out.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict, deque
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend import nvme
from memascend.cli.bench import bag, deepspeed
from memascend.cli.bench.peers import PASSES, fio, huge_pages
from memascend.cli.bench.swapper import Swapper
from memascend.cli.show import bars
from memascend.cli.transfer import blocks
from memascend.formatting import bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    import torch

    from memascend import engine
    from memascend.nvme import Ticket, Volume

SUMMARY = "a step of AdamW on SSD, against pure I/O of the same bytes, fio, and DeepSpeed's NVMe swapper"

_MEGA = 1_000_000
_MIB = 1 << 20
_VALUE_BYTES = 2
_BLOCK = 4096
_FORMS = {"own": "", "fp32": "compact", "bf16": "compact bf16", "8bit": "compact 8bit"}
# What DeepSpeed's parameters are compared with.
_SHARED = ("own", "fp32")
_STATE_HELP = "format of the state: as `offload(state=...)` has it, or own: float32 masters beside the values (default)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--storage", default=None, metavar="FOLDER", help="where to measure (default: here)")
    parser.add_argument("--parameters", type=int, default=64, metavar="M", help="millions of parameters (default 64)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default 5)")
    parser.add_argument("--chunks", type=int, default=12, metavar="N", help="staging chunks (default 12)")
    parser.add_argument("--chunk-elements", type=int, default=None, metavar="N", help="default: what a store takes")
    parser.add_argument("--state", choices=_FORMS, default="own", help=_STATE_HELP)
    parser.add_argument("--no-fio", action="store_true", help="leave fio out")
    parser.add_argument("--deepspeed", metavar="PYTHON", help=deepspeed.OPTION_HELP)


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory(dir=options.storage or ".", prefix="memascend-bench-") as folder:
        result = _measure(Path(folder), options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(_shown(result))
    if options.picture:
        rates = {"update": "update_gb_per_second", "the same bytes without arithmetic": "pure_gb_per_second"}
        series = {"memascend": {words: result[name] for words, name in rates.items()}}
        bars(Path(options.picture), "A step of AdamW on SSD", "GB a second", series)
    return 0


@dataclass(frozen=True, kw_only=True)
class _Bytes:
    """Bytes of a chunk, in whole blocks: of its state, and of its values, which a step writes and may also read."""

    state: int
    values: int
    read_values: bool

    @property
    def read(self) -> int:
        return self.state + self.values * self.read_values

    @property
    def moved(self) -> int:
        return self.read + self.state + self.values


@dataclass(frozen=True)
class _Parameters:
    """What is updated: equal parameters, in chunks of so many elements."""

    names: list[str]
    numel: int
    chunk: int
    form: str
    each: _Bytes

    @property
    def parameters(self) -> int:
        return len(self.names) * self.numel

    @property
    def chunks(self) -> int:
        return self.parameters // self.chunk

    @property
    def nbytes(self) -> int:
        return self.chunks * self.each.moved


def _entry(name: str, values: torch.Tensor, form: str) -> engine.Entry:
    from memascend import engine

    state = engine.encode_state(values, {}, form) if form else engine.adam_state(values)
    return engine.Entry(name=name, values=values, state=state, format=form or None)


def _choose_parameters(options: argparse.Namespace) -> _Parameters:
    import torch

    from memascend import engine

    form = _FORMS[options.state]
    chunk = options.chunk_elements or engine.chunk_elements_of([_entry("", torch.zeros(1, dtype=torch.bfloat16), form)])
    whole = _entry("", torch.empty(chunk, dtype=torch.bfloat16, device="meta"), form)
    each = _Bytes(
        state=_whole_blocks(sum(tensor.nbytes for tensor in whole.state.values())),
        values=_whole_blocks(chunk * _VALUE_BYTES),
        read_values=bool(form),
    )
    # The size of one gradient is what the queue must take.
    names = [f"weight.{index}" for index in range(bag.PARAMETERS)]
    return _Parameters(names, max(1, options.parameters * _MEGA // chunk // len(names)) * chunk, chunk, form, each)


def _whole_blocks(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK


def _create(folder: Path, subject: _Parameters) -> engine.Store:
    from memascend import engine

    values = bag.values(subject.numel)
    entries = [_entry(name, values, subject.form) for name in subject.names]
    return engine.Store.create(folder / "store", entries, chunk_elements=subject.chunk)


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    from memascend import engine

    subject = _choose_parameters(options)
    store = _create(folder, subject)
    gradient = bag.gradient(subject.numel)
    seconds: dict[str, list[float]] = defaultdict(list)
    block_bytes = subject.each.state + subject.each.values
    with ExitStack() as stack:
        volume = stack.enter_context(nvme.open(folder / "pure", size=2 * subject.chunks * block_bytes))
        updates = stack.enter_context(engine.Engine(store, chunks=options.chunks))
        memory = stack.enter_context(blocks(block_bytes, options.chunks))
        peers = _fio_peers(folder, subject, options, stack)
        python = deepspeed.found(options.deepspeed) if options.state in _SHARED else None
        swapper = Swapper(python, folder / "deepspeed", subject.numel) if python is not None else None
        if swapper is not None:
            stack.enter_context(swapper)
            peers["deepspeed"] = swapper.step
        # Both slots of both are written once before anything counts: fresh extents are slower.
        for step in range(1, options.rounds + 3):
            began = time.perf_counter()
            for name in subject.names:
                updates.update(name, gradient, engine.Adam(step=step))
            updates.finish()
            updated = time.perf_counter()
            updates.commit(step)
            committed = time.perf_counter()
            _pure(volume, memory, subject, slot=step % 2)
            took = {
                "update": updated - began,
                "commit": committed - updated,
                "pure": time.perf_counter() - committed,
                **{name: peer() for name, peer in peers.items()},
            }
            for what in took if step > 2 else ():
                seconds[what].append(took[what])
        staging = updates.staging_bytes
        peer: dict[str, Any] = {"error": deepspeed.MISSING if options.state in _SHARED else "it has no such state"}
        if swapper is not None:
            peer = swapper.compared(store.read(subject.names[0])[0].flatten()[: bag.SAMPLE].float())
    info = store.info()
    store.close()
    return _result(subject, seconds, peer, staging, info)


def _fio_peers(
    folder: Path, subject: _Parameters, options: argparse.Namespace, stack: ExitStack
) -> dict[str, Callable[[], float]]:
    """Runs of fio, as people run it and with huge pages, where there is fio: each gives seconds for as many bytes."""
    if options.no_fio or shutil.which("fio") is None:
        return {}

    def moved(memory: Path | None) -> float:
        reads = 100 * subject.each.read // subject.each.moved
        nbytes = subject.nbytes // PASSES
        speed = fio(folder / "pure", "mixed", _MIB, options.chunks, nbytes, memory, reads_percent=reads)
        return speed.seconds * subject.nbytes / speed.nbytes

    huge = stack.enter_context(huge_pages(options.chunks * _MIB))
    peers: dict[str, Callable[[], float]] = {"fio_default": partial(moved, None)}
    if huge is not None:
        peers["fio_huge_pages"] = partial(moved, huge)
    return peers


def _result(
    subject: _Parameters, seconds: dict[str, list[float]], peer: dict[str, Any], staging: int, info: Mapping[str, Any]
) -> dict[str, Any]:
    """Medians, and medians of the ratios of each round."""
    result: dict[str, Any] = {"parameters": subject.parameters, "bytes": subject.nbytes, "deepspeed": peer}
    if "error" in peer:
        # What computes something else is no peer.
        seconds.pop("deepspeed", None)
    for what, times in seconds.items():
        result[f"{what}_seconds"] = statistics.median(times)
        ratios = [took / update for took, update in zip(times, seconds["update"], strict=True)]
        if what != "update":
            result[f"update_over_{what}"] = statistics.median(ratios)
        if what in ("update", "pure"):
            result[f"{what}_gb_per_second"] = subject.nbytes / result[f"{what}_seconds"] / 1e9
    held = staging + info["index_bytes"] + info["buffer_bytes"]
    if "added_bytes" in peer:
        peer["ours_of_added_bytes"] = held / peer["added_bytes"]
        peer["ours_of_swap_buffer_bytes"] = held / peer["swap_buffer_bytes"]
    return result | {
        "commit_share": result.pop("update_over_commit"),
        "staging_bytes": staging,
        "held_bytes": held,
        "index_bytes": info["index_bytes"],
        "index_bytes_per_mib": info["index_bytes"] / (info["slot_bytes"] / 2**20),
    }


def _pure(volume: Volume, memory: list[torch.Tensor], subject: _Parameters, *, slot: int) -> None:
    """Read each chunk's state, write its state and values to the other slot: as many in flight, nothing computed."""
    chunks, each = subject.chunks, subject.each
    state, values = each.state, each.values
    values_at = 2 * chunks * state
    reading: deque[tuple[int, torch.Tensor, list[Ticket]]] = deque()
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
            tickets = [volume.read(tensor[:state], offset)]
            if each.read_values:
                tickets.append(volume.read(tensor[state:], values_at + (slot * chunks + begun) * values))
            reading.append((begun, tensor, tickets))
            begun += 1
        index, tensor, tickets = reading.popleft()
        for ticket in tickets:
            ticket.wait()
        other = (1 - slot) * chunks + index
        one = volume.write(tensor[:state], other * state)
        two = volume.write(tensor[state:], values_at + other * values)
        writing.append((tensor, one, two))
    for _, one, two in writing:
        one.wait()
        two.wait()


_ROWS = (
    ("update", "update"),
    ("pure", "pure I/O of the same bytes"),
    ("fio_huge_pages", "fio, huge pages, as many bytes"),
    ("fio_default", "fio as people run it"),
    ("deepspeed", "DeepSpeed's NVMe swapper, pipelined"),
)


def _shown(result: dict[str, Any]) -> str:
    rows = [
        (
            title,
            seconds_shown(result[f"{what}_seconds"]),
            f"{result['bytes'] / result[f'{what}_seconds'] / 1e9:.2f}",
            f"{result.get(f'update_over_{what}', 1):.2f}",
        )
        for what, title in _ROWS
        if f"{what}_seconds" in result
    ]
    peer = result["deepspeed"]
    beside = (
        f"DeepSpeed is left out: {peer['error']}"
        if "error" in peer
        else f"DeepSpeed, {peer['buffers']} buffers: {bytes_shown(peer['swap_buffer_bytes'])} of swap buffers, "
        f"{bytes_shown(peer['added_bytes'])} in all; ours holds {result['held_bytes'] / peer['swap_buffer_bytes']:.2%} "
        f"and {result['held_bytes'] / peer['added_bytes']:.2%} of that; "
        f"parameters differ by {peer['difference']:.1e} in the mean"
    )
    return (
        f"A step of AdamW on {result['parameters'] / _MEGA:.0f} M bf16 parameters, "
        f"{bytes_shown(int(result['bytes']))}\n\n"
        + table(("what", "time", "GB/s", "times the update's"), rows)
        + f"\n\ncommit, durable: {seconds_shown(result['commit_seconds'])}, {result['commit_share']:.2%} of the step\n"
        f"staging memory: {bytes_shown(int(result['staging_bytes']))}\n"
        f"index: {bytes_shown(int(result['index_bytes']))}, {result['index_bytes_per_mib']:.0f} bytes per MiB of state"
        f"\n{beside}"
    )
