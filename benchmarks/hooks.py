"""Measures how many microseconds memascend's module hooks add to the call of a module, if nothing is read from storage.

The module does almost no arithmetic, so nearly all of its call is overhead. Rounds with hooks and rounds without hooks
take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memascend

MODULES = 64
ROUNDS = 40
TARGET_MICROSECONDS = 20.0


def main() -> None:
    """Measures modules that are a unit, and modules that are inside a unit; prints a line for each of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default=".", help="a folder on a disk")
    parser.add_argument("--write", metavar="FOLDER", help="also write hooks.txt and hooks.json there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-hooks-") as folder:
        values = {
            "a cached unit, materialized and offloaded": measured(Path(folder, "unit"), inner=False),
            "a module inside a materialized unit": measured(Path(folder, "inner"), inner=True),
        }
    lines = [
        f"{name}: {value['added']:.1f} us added to {value['bare']:.1f} us (at most {TARGET_MICROSECONDS:.0f})"
        for name, value in values.items()
    ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        Path(options.write).mkdir(parents=True, exist_ok=True)
        Path(options.write, "hooks.txt").write_text(text + "\n")
        Path(options.write, "hooks.json").write_text(json.dumps(values, indent=1) + "\n")


class Scale(nn.Module):
    """A module with one parameter and almost no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x` times the weight."""
        return x * self.weight


class Row(nn.Module):
    """A sequence of `Scale` modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(MODULES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Calls the modules in order; the result of each module is the input of the next module."""
        for layer in self.layers:
            x = layer(x)
        return x


class Whole(nn.Module):
    """A module whose only block is a `Row`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Row()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Calls the block."""
        return self.blocks[0](x)  # type: ignore[no-any-return]


def measured(storage: Path, *, inner: bool) -> dict[str, float]:
    """Returns the median microseconds of a module's call, without hooks and with hooks.

    If `inner` is True, all modules are inside one unit that is materialized. Otherwise each module is a unit.
    """
    made: Any = Whole if inner else Row
    bare, hooked = made(), made()
    x = torch.ones(16)
    names = ["blocks.0"] if inner else [f"layers.{index}" for index in range(MODULES)]
    _, optimizer = memascend.offload(
        hooked,
        torch.optim.AdamW(hooked.parameters()),
        storage=storage,
        units=names,
        host_memory="64MiB",
        device="cpu",
    )
    times: dict[str, list[float]] = {"bare": [], "hooked": []}
    with optimizer, torch.no_grad():
        for _ in range(ROUNDS):
            for name, model in (("bare", bare), ("hooked", hooked)):
                began = time.perf_counter()
                model(x)
                times[name].append((time.perf_counter() - began) / MODULES * 1e6)
    found = {name: statistics.median(taken) for name, taken in times.items()}
    return {**found, "added": found["hooked"] - found["bare"]}


if __name__ == "__main__":
    main()
