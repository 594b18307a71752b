"""`memascend demo`: what memascend does, shown on this machine in under a minute."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from memascend import engine, kernels, memory, nvme
from memascend.cli.bench.memory import reservation_table
from memascend.cli.bench.reservation import load_models, reserve, unit_bytes
from memascend.cli.bench.rounds import interleaved
from memascend.cli.show import bytes_shown, seconds_shown, table
from memascend.errors import TimeoutExpired

if TYPE_CHECKING:
    import argparse

    import torch

_WINDOW = 3
# A small model's step: enough units for every slot of the arena to be reused many times.
_LAYERS = 48
_WIDTH = 1024
# What is written and read back, and the gradient that is checked.
_STORED_BYTES = 256 << 20
_CHUNKS = 6
_GRADIENT_ELEMENTS = 16 << 20
_TRAINED_ELEMENTS = 16 << 20
_STEPS = 3
_LR, _BETAS, _EPS, _DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """Declare no options."""


def run(_options: argparse.Namespace) -> int:
    """Show each part in turn."""
    _show_reservations()
    _show_flat_memory()
    _show_pressure()
    _show_storage()
    _show_kernels()
    _show_engine()
    return 0


def _show_reservations() -> None:
    print(f"1. Host memory that a pool reserves to hold any {_WINDOW} consecutive units of a model, bf16.")
    print("   One-size slots are what ZeRO-Infinity has; the waste beside each is what lies unused.\n")
    print(reservation_table({model["model"]: reserve(unit_bytes(model), _WINDOW) for model in load_models()}))


def _show_flat_memory() -> None:
    import torch

    unit = 12 * _WIDTH * _WIDTH * 2
    print(f"\n2. A step over {_LAYERS} blocks of {bytes_shown(unit)} through an arena of {_WINDOW} slots.\n")
    with memory.Region(memory.layout({unit: _WINDOW}).reserved, owner="demo") as region:
        arena = memory.Arena(region, {unit: _WINDOW})
        began = time.perf_counter()
        window: list[torch.Tensor] = []
        for layer in range(_LAYERS):
            if len(window) == _WINDOW:
                window.pop(0)
            weight = arena.lease(unit, owner="units").tensor((12 * _WIDTH, _WIDTH), torch.bfloat16)
            window.append(weight.fill_(layer))
        took = time.perf_counter() - began
        held = arena.stats()
        rows = [
            ("weights that passed through", bytes_shown(_LAYERS * unit)),
            ("host memory reserved", bytes_shown(region.mapped_bytes)),
            ("on huge pages", bytes_shown(region.huge_bytes)),
            ("pinned by", region.pinned or "nothing"),
            ("peak in use", bytes_shown(held["peak"])),
            ("reserved but not asked for", bytes_shown(held["reserved"] - held["capacity"])),
            ("time, filling included", seconds_shown(took)),
        ]
        print(table(("what", "value"), rows))
        window.clear()
        del weight


def _show_pressure() -> None:
    print("\n3. When everything is taken a lease waits, and says who holds what.\n")
    with memory.ChunkRing(1 << 20, 2) as ring:
        chunks = [ring.lease(owner="prefetch"), ring.lease(owner="update")]
        try:
            ring.lease(timeout=0.2, owner="demo")
        except TimeoutExpired as error:
            print(f"   {type(error).__name__}: {error}")
        threading.Timer(0.1, lambda: chunks.pop().release()).start()
        began = time.perf_counter()
        ring.lease(owner="demo").release()
        print(f"   another thread gave one back: granted after {seconds_shown(time.perf_counter() - began)}")
        chunks.pop().release()


def _show_storage() -> None:
    import torch

    print(f"\n4. {bytes_shown(_STORED_BYTES)} to a file and back, through {_CHUNKS} chunks; every byte compared.\n")
    with (
        tempfile.TemporaryDirectory(prefix="memascend-demo-") as folder,
        nvme.open(Path(folder) / "store", size=_STORED_BYTES) as volume,
        memory.ChunkRing(1 << 20, _CHUNKS) as ring,
    ):
        chunks = [ring.lease(owner="demo").tensor(1 << 18, torch.int32) for _ in range(_CHUNKS)]
        rates = {}
        for action in ("write", "read"):
            tickets: list[nvme.Ticket | None] = [None] * _CHUNKS
            began = time.perf_counter()
            for index in range((_STORED_BYTES >> 20) + _CHUNKS):
                ticket, chunk = tickets[index % _CHUNKS], chunks[index % _CHUNKS]
                if ticket is not None:
                    ticket.wait()
                    if action == "read" and not chunk.eq(index - _CHUNKS).all():
                        raise SystemExit("what came back is not what was written")
                if index < _STORED_BYTES >> 20:
                    if action == "write":
                        chunk.fill_(index)
                    move = volume.write if action == "write" else volume.read
                    tickets[index % _CHUNKS] = move(chunk, index << 20)
            if action == "write":
                volume.flush()
            rates[action] = _STORED_BYTES / (time.perf_counter() - began)
        rows = [
            ("through", f"{volume.backend}, {'direct' if volume.direct else 'buffered'}"),
            ("written and flushed", f"{rates['write'] / 1e9:.2f} GB/s"),
            ("read and compared", f"{rates['read'] / 1e9:.2f} GB/s"),
        ]
        print(table(("what", "value"), rows))
        del chunks, chunk, ticket, tickets


def _show_kernels() -> None:
    import torch

    print(f"\n5. Is there an overflow in a bf16 gradient of {_GRADIENT_ELEMENTS >> 20} Mi elements?\n")
    gradient = torch.randn(_GRADIENT_ELEMENTS).bfloat16()
    times = interleaved(
        {
            "isinf().any() or isnan().any()": lambda: bool(gradient.isinf().any() or gradient.isnan().any()),
            "memascend.kernels, with its norm": lambda: kernels.check_and_unscale(gradient),
        },
        rounds=3,
    )
    print(table(("how", "time"), [(name, seconds_shown(seconds)) for name, seconds in times.items()]))
    gradient[-1] = float("inf")
    found, _ = kernels.check_and_unscale(gradient)
    print(f"\n   with one infinity at the very end: found={bool(found)}; {kernels.route('cpu')}")


def _show_engine() -> None:
    import torch

    print(f"\n6. {_STEPS} steps of AdamW on {_TRAINED_ELEMENTS >> 20} Mi bf16 parameters that live in a file.\n")
    with tempfile.TemporaryDirectory(prefix="memascend-demo-") as folder:
        path = Path(folder) / "store"
        weight = torch.randn(_TRAINED_ELEMENTS).bfloat16()
        state = engine.adam_state(weight)
        in_memory = {name: tensor.clone() for name, tensor in state.items()}
        entry = engine.Entry(name="weight", values=weight, state=state)
        with engine.Store.create(path, [entry]) as store, engine.Engine(store) as updates:
            began = time.perf_counter()
            for step in range(1, _STEPS + 1):
                updates.update(
                    "weight", _gradient(step), lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY, step=step
                )
                updates.commit(step)
            took = (time.perf_counter() - began) / _STEPS
            staging = updates.staging_bytes
        for step in range(1, _STEPS + 1):
            kernels.adamw(
                in_memory["master"],
                _gradient(step),
                in_memory["exp_avg"],
                in_memory["exp_avg_sq"],
                weight,
                lr=_LR,
                betas=_BETAS,
                eps=_EPS,
                weight_decay=_DECAY,
                step=step,
            )
        with engine.Store.open(path) as store:
            values, _ = store.read("weight")
            rows = [
                ("state on storage", bytes_shown(path.stat().st_size)),
                ("held in memory for it", bytes_shown(staging)),
                ("a step, durable", seconds_shown(took)),
                ("reopened at step", str(store.step)),
                (
                    "same bits as in memory",
                    "yes" if torch.equal(values.view(torch.int16), weight.view(torch.int16)) else "NO",
                ),
            ]
        print(table(("what", "value"), rows))


def _gradient(step: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(step)
    return torch.randn(_TRAINED_ELEMENTS, generator=generator).bfloat16()
