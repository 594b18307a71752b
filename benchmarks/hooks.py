"""Measures what module hooks cost a forward: microseconds for a call that reads nothing, beside the bare call.

The module is as small as one can be, so that its call is all overhead, and the rounds of both take turns.
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
    """Measure both kinds of module, print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default=".", help="a folder on a disk")
    parser.add_argument("--write", metavar="FOLDER", help="also write hooks.txt and hooks.json there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-hooks-") as folder:
        values = {
            "a unit, resident, bound and unbound": measured(Path(folder, "unit"), inner=False),
            "a module inside a bound unit": measured(Path(folder, "inner"), inner=True),
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
    """One parameter, and as little arithmetic as there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As its modules say."""
        return x * self.weight


class Row(nn.Module):
    """Modules one after the other; as one unit where it has a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(MODULES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As its modules say."""
        for layer in self.layers:
            x = layer(x)
        return x


class Whole(nn.Module):
    """A row inside of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Row()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As its modules say."""
        return self.blocks[0](x)  # type: ignore[no-any-return]


def measured(storage: Path, *, inner: bool) -> dict[str, float]:
    """Medians of a call's microseconds, without and with gates."""
    made: Any = Whole if inner else Row
    bare, gated = made(), made()
    x = torch.ones(16)
    names = ["blocks.0"] if inner else [f"layers.{index}" for index in range(MODULES)]
    _, optimizer = memascend.offload(
        gated,
        torch.optim.AdamW(gated.parameters()),
        storage=storage,
        units=names,
        host_memory="64MiB",
        device="cpu",
    )
    times: dict[str, list[float]] = {"bare": [], "gated": []}
    with optimizer, torch.no_grad():
        for _ in range(ROUNDS):
            for name, model in (("bare", bare), ("gated", gated)):
                began = time.perf_counter()
                model(x)
                times[name].append((time.perf_counter() - began) / MODULES * 1e6)
    found = {name: statistics.median(taken) for name, taken in times.items()}
    return {**found, "added": found["gated"] - found["bare"]}


if __name__ == "__main__":
    main()
