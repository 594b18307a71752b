"""Compares memascend's update on SSD with plain I/O of the same bytes, with fio, and with DeepSpeed's NVMe swapper."""

from __future__ import annotations

import argparse
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

from benchmarks.peers import bag, environment
from benchmarks.peers.fio import PASSES, fio, huge_pages
from benchmarks.peers.swapper import Swapper
from memascend import nvme
from memascend.cli.storage import blocks
from memascend.text import bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from memascend import storage
    from memascend.nvme import Ticket, Volume


_MEGA = 1_000_000
_MIB = 1 << 20
_VALUE_BYTES = 2
_BLOCK = 4096
_FORMS = {"own": "", "fp32": "compact", "bf16": "compact bf16", "8bit": "compact 8bit"}


def main(words: Sequence[str] | None = None) -> None:
    """Measures the update and its peers; prints a table or JSON."""
    formats = "format of the state: as in `offload(state=...)`, or own: fp32 master weights and values (default)"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--storage", default=".", metavar="FOLDER", help="where to measure (default: here)")
    parser.add_argument("--parameters", type=int, default=64, metavar="M", help="millions of parameters (default 64)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default 5)")
    parser.add_argument("--chunks", type=int, default=12, metavar="N", help="chunks of staging memory (default 12)")
    parser.add_argument("--chunk-elements", type=int, default=None, metavar="N", help="default: the store's")
    parser.add_argument("--state", choices=_FORMS, default="own", help=formats)
    parser.add_argument("--no-fio", action="store_true", help="leave fio out")
    parser.add_argument("--deepspeed", metavar="PYTHON", help=environment.OPTION_HELP)
    options = parser.parse_args(words)
    # DeepSpeed is not measured with reduced formats, because its optimizer state always has 32 bits.
    python = environment.found(options.deepspeed) if options.state in {"own", "fp32"} else None
    with tempfile.TemporaryDirectory(dir=options.storage, prefix="memascend-bench-") as folder:
        begin = None if python is None else partial(Swapper, python, Path(folder) / "deepspeed")
        result = measure(Path(folder), options, begin)
    peer = result.get("other")
    if peer is not None and "added_bytes" in peer:
        peer["ours_of_added_bytes"] = result["held_bytes"] / peer["added_bytes"]
        peer["ours_of_swap_buffer_bytes"] = result["held_bytes"] / peer["swap_buffer_bytes"]
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(shown(result))
        print(environment.MISSING if peer is None else _peer_text(peer))


@dataclass(frozen=True, kw_only=True)
class _Parameters:
    """The parameters of the benchmark. All of them have the same size."""

    names: list[str]
    numel: int
    chunk: int  # elements of a chunk
    form: str
    state: int  # bytes of a chunk's state, rounded up to whole blocks
    values: int  # bytes of a chunk's values, rounded up to whole blocks
    read_values: bool  # True if a step reads not only the state, but also the values

    @property
    def read(self) -> int:
        """The number of bytes that a step reads for each chunk."""
        return self.state + self.values * self.read_values

    @property
    def moved(self) -> int:
        """The number of bytes that a step reads and writes for each chunk."""
        return self.read + self.state + self.values

    @property
    def parameters(self) -> int:
        return len(self.names) * self.numel

    @property
    def chunks(self) -> int:
        return self.parameters // self.chunk

    @property
    def nbytes(self) -> int:
        return self.chunks * self.moved


def _record(name: str, values: torch.Tensor, form: str) -> storage.Record:
    import torch

    from memascend import storage

    state = storage.adam_state(values)
    if form:
        likes = storage.state_tensors(values, form)
        state = {of: torch.zeros_like(like, device=values.device) for of, like in likes.items()}
    return storage.Record(name=name, values=values, state=state, format=form or None)


def _choose_parameters(options: argparse.Namespace) -> _Parameters:
    import torch

    from memascend import storage

    form = _FORMS[options.state]
    chunk = options.chunk_elements or storage.chunk_elements_of(
        [_record("", torch.zeros(1, dtype=torch.bfloat16), form)]
    )
    whole = _record("", torch.empty(chunk, dtype=torch.bfloat16, device="meta"), form)
    # The elements are divided over several parameters, because a parameter's whole gradient must fit into the engine's
    # queue.
    names = [f"weight.{index}" for index in range(bag.PARAMETERS)]
    return _Parameters(
        names=names,
        numel=max(1, options.parameters * _MEGA // chunk // len(names)) * chunk,
        chunk=chunk,
        form=form,
        state=_whole_blocks(sum(tensor.nbytes for tensor in whole.state.values())),
        values=_whole_blocks(chunk * _VALUE_BYTES),
        read_values=bool(form),
    )


def _whole_blocks(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK


def _create(folder: Path, subject: _Parameters) -> storage.Store:
    from memascend import storage

    values = bag.values(subject.numel)
    records = [_record(name, values, subject.form) for name in subject.names]
    store = storage.Store.create(folder / "store", records, chunk_elements=subject.chunk)
    with storage.Engine(store) as filling:
        for record in records:
            filling.fill(record.name, record.values, record.state)
        filling.commit(0)
    return store


def measure(folder: Path, options: argparse.Namespace, begin: Callable[[int], Any] | None) -> dict[str, Any]:
    """Measures memascend's update and its peers; returns medians.

    `begin` gets the number of elements of a parameter. It starts another system and returns an object with three
    methods: `step()` makes a step and returns the step's seconds. `compared(sample)` returns the system's memory, or an
    error if its parameters differ from the parameters of memascend. `close()` ends the system.
    """
    from memascend import storage

    subject = _choose_parameters(options)
    store = _create(folder, subject)
    gradient = bag.gradient(subject.numel)
    seconds: dict[str, list[float]] = defaultdict(list)
    block_bytes = subject.state + subject.values
    with ExitStack() as stack:
        volume = stack.enter_context(nvme.open(folder / "pure", size=2 * subject.chunks * block_bytes))
        updates = stack.enter_context(storage.Engine(store, chunks=options.chunks))
        memory = stack.enter_context(blocks(block_bytes, options.chunks))
        peers = _fio_peers(folder, subject, options, stack)
        other = None if begin is None else begin(subject.numel)
        if other is not None:
            stack.callback(other.close)
            peers["other"] = other.step
        # The first two steps are not measured. The first write to a block of the disk is slower, and these two steps
        # write all blocks of both slots.
        for step in range(1, options.rounds + 3):
            began = time.perf_counter()
            for name in subject.names:
                updates.update(name, gradient, storage.Adam(step=step))
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
        sample = store.read(subject.names[0])[0].flatten()[: bag.SAMPLE].float()
        answer = {} if other is None else {"other": other.compared(sample)}
    info = store.info()
    store.close()
    return answer | _result(subject, seconds, answer, staging, info)


def _fio_peers(
    folder: Path, subject: _Parameters, options: argparse.Namespace, stack: ExitStack
) -> dict[str, Callable[[], float]]:
    """Returns functions that run fio, without huge pages and (if the machine allows them) with huge pages.

    Each function moves as many bytes as a step of memascend, and returns the seconds. If fio is not installed or
    `--no-fio` is given, there are no functions.
    """
    if options.no_fio or shutil.which("fio") is None:
        return {}

    def moved(memory: Path | None) -> float:
        reads = 100 * subject.read // subject.moved
        nbytes = subject.nbytes // PASSES
        speed = fio(folder / "pure", "mixed", _MIB, options.chunks, nbytes, memory, reads_percent=reads)
        return speed.seconds * subject.nbytes / speed.nbytes

    huge = stack.enter_context(huge_pages(options.chunks * _MIB))
    peers: dict[str, Callable[[], float]] = {"fio_default": partial(moved, None)}
    if huge is not None:
        peers["fio_huge_pages"] = partial(moved, huge)
    return peers


def _result(
    subject: _Parameters, seconds: dict[str, list[float]], answer: dict[str, Any], staging: int, info: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the median of each list in `seconds`, and the bytes of memory that memascend holds.

    The seconds of each peer, of the commit and of the pure I/O in a round are also divided by the update's seconds in
    this round. The result has the medians of these ratios.
    """
    result: dict[str, Any] = {"parameters": subject.parameters, "bytes": subject.nbytes}
    if "error" in answer.get("other", ()):
        # If the parameters of the other system differ from ours, its seconds are left out.
        seconds.pop("other", None)
    for what, times in seconds.items():
        result[f"{what}_seconds"] = statistics.median(times)
        ratios = [took / update for took, update in zip(times, seconds["update"], strict=True)]
        if what != "update":
            result[f"{what}_over_update"] = statistics.median(ratios)
        if what in ("update", "pure"):
            result[f"{what}_gb_per_second"] = subject.nbytes / result[f"{what}_seconds"] / 1e9
    held = staging + info["index_bytes"] + info["buffer_bytes"]
    return result | {
        "commit_share": result.pop("commit_over_update"),
        "staging_bytes": staging,
        "held_bytes": held,
        "index_bytes": info["index_bytes"],
        "index_bytes_per_mib": info["index_bytes"] / (info["slot_bytes"] / 2**20),
    }


def _pure(volume: Volume, memory: list[torch.Tensor], subject: _Parameters, *, slot: int) -> None:
    """Does the I/O of a step without its arithmetic.

    Reads the chunks from `slot`; writes their state and values to the other slot.
    """
    chunks, state, values = subject.chunks, subject.state, subject.values
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
            if subject.read_values:
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
    ("other", "DeepSpeed's NVMe swapper"),
)


def shown(result: dict[str, Any]) -> str:
    """Returns the measurements as a table."""
    rows = [
        (
            title,
            seconds_shown(result[f"{what}_seconds"]),
            f"{result['bytes'] / result[f'{what}_seconds'] / 1e9:.2f}",
            f"{result.get(f'{what}_over_update', 1):.2f}",
        )
        for what, title in _ROWS
        if f"{what}_seconds" in result
    ]
    return (
        f"A step of AdamW on {result['parameters'] / _MEGA:.0f} M bf16 parameters, "
        f"{bytes_shown(int(result['bytes']))}\n\n"
        + table(("what", "time", "GB/s", "times the update's"), rows)
        + f"\n\ncommit, durable: {seconds_shown(result['commit_seconds'])}, {result['commit_share']:.2%} of the step\n"
        f"staging memory: {bytes_shown(int(result['staging_bytes']))}\n"
        f"index: {bytes_shown(int(result['index_bytes']))}, {result['index_bytes_per_mib']:.0f} bytes per MiB of state"
    )


def _peer_text(peer: dict[str, Any]) -> str:
    if "error" in peer:
        return f"DeepSpeed is left out: {peer['error']}"
    return (
        f"DeepSpeed's NVMe swapper is pipelined, with {peer['buffers']} buffers: "
        f"{bytes_shown(peer['swap_buffer_bytes'])} of swap buffers, {bytes_shown(peer['added_bytes'])} in all; "
        f"memascend holds {peer['ours_of_swap_buffer_bytes']:.2%} and {peer['ours_of_added_bytes']:.2%} of that; "
        f"parameters differ by {peer['difference']:.1e} in the mean"
    )


if __name__ == "__main__":
    main()
