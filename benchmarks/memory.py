"""Computes the memory that pools reserve for published models.

Also measures how long it takes to lease a tensor from memascend's arena, fill it and drop it, against `torch.empty`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.reservation import POOLS, load_models, reserve, unit_bytes
from benchmarks.rounds import interleaved
from benchmarks.show import bars
from memascend import memory
from memascend.text import bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.reservation import Reservation

# The number of units in memory at the same time: one unit is computed, the next unit is read, and the previous unit is
# written back.
_WINDOW = 3
# The sizes in bytes of the tensors that the benchmark leases.
_LEASE_BYTES = (4 << 10, 1 << 20, 32 << 20)


def main(words: Sequence[str] | None = None) -> None:
    """Computes the reserved memory, and measures leases; prints tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", metavar="PNG", help="draw the result into this file")
    parser.add_argument(
        "--window",
        type=_units,
        default=_WINDOW,
        metavar="N",
        help=f"number of units in memory at the same time (default {_WINDOW})",
    )
    _measure(parser.parse_args(words))


def _units(text: str) -> int:
    units = int(text)
    if units < 1:
        raise ValueError(text)
    return units


def _measure(options: argparse.Namespace) -> None:
    window = options.window
    reservations = {model["model"]: reserve(unit_bytes(model), window) for model in load_models()}
    leases = _lease_seconds()
    if options.json:
        result = {
            "window": window,
            "reserved": {
                name: {"needed": reservation.needed, **reservation.reserved}
                for name, reservation in reservations.items()
            },
            "seconds": leases,
        }
        print(json.dumps(result, indent=2))
    else:
        print(f"Host memory that a pool reserves to hold any {window} consecutive units, bf16, and its waste\n")
        print(reservation_table(reservations))
        print("\nA tensor taken, filled and dropped, against torch.empty of the same bytes\n")
        print(_lease_table(leases))
    if options.picture:
        series = {
            pool: {name: reservation.reserved[pool] / 2**30 for name, reservation in reservations.items()}
            for pool in POOLS
        }
        title = f"Host memory reserved for {window} units in flight (bf16)"
        bars(Path(options.picture), title, "GiB", series)


def reservation_table(reservations: dict[str, Reservation]) -> str:
    """Returns a table with a row for each model: the bytes needed, and the bytes and the waste of each pool."""
    rows = [
        (
            name,
            bytes_shown(reservation.needed),
            *(f"{bytes_shown(reservation.reserved[pool])} ({reservation.waste(pool):+.1f} %)" for pool in POOLS),
        )
        for name, reservation in reservations.items()
    ]
    return table(("model", "needed", *POOLS), rows)


def _lease_seconds() -> dict[str, dict[str, float]]:
    import torch

    plan = dict.fromkeys(_LEASE_BYTES, 1)
    with memory.Region(memory.layout(plan).reserved, owner="bench") as region:
        arena = memory.Arena(region, plan)

        def cases(nbytes: int) -> dict[str, Callable[[], object]]:
            return {
                "lease": lambda: arena.lease(nbytes).tensor(nbytes, torch.uint8).fill_(1),
                "torch.empty": lambda: torch.empty(nbytes, dtype=torch.uint8).fill_(1),
            }

        return {str(nbytes): interleaved(cases(nbytes)) for nbytes in _LEASE_BYTES}


def _lease_table(leases: dict[str, dict[str, float]]) -> str:
    rows = [
        (
            bytes_shown(int(nbytes)),
            seconds_shown(seconds["lease"]),
            seconds_shown(seconds["torch.empty"]),
            f"{seconds['torch.empty'] / seconds['lease']:.2f}",
        )
        for nbytes, seconds in leases.items()
    ]
    return table(("size", "lease", "torch.empty", "ratio"), rows)


if __name__ == "__main__":
    main()
