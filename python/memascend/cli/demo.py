"""`memascend demo`: what memascend does, shown on this machine in under a minute."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from memascend import memory
from memascend.cli.bench.memory import reservation_table
from memascend.cli.bench.reservation import load_models, reserve, unit_bytes
from memascend.cli.show import bytes_shown, seconds_shown, table
from memascend.errors import TimeoutExpired

if TYPE_CHECKING:
    import argparse

_WINDOW = 3
# A small model's step: enough units for every slot of the arena to be reused many times.
_LAYERS = 48
_WIDTH = 1024


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """Declare no options."""


def run(_options: argparse.Namespace) -> int:
    """Show each part in turn."""
    _show_reservations()
    _show_flat_memory()
    _show_pressure()
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
