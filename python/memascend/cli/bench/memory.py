"""`memascend bench memory`: computes what pools reserve for published models; measures what a lease costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from memascend import memory
from memascend.cli.bench.reservation import POOLS, load_models, reserve, unit_bytes
from memascend.cli.bench.rounds import interleaved
from memascend.cli.show import bars
from memascend.formatting import bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from memascend.cli.bench.reservation import Reservation

SUMMARY = "host bytes that pools reserve for published models; the cost of a lease"

# Compute on one unit, read the next, write back the last.
_WINDOW = 3
# Sizes of tensors in the lease benchmark.
_LEASE_BYTES = (4 << 10, 1 << 20, 32 << 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--window",
        type=_units,
        default=_WINDOW,
        metavar="N",
        help=f"units in memory at once (default {_WINDOW})",
    )


def _units(text: str) -> int:
    units = int(text)
    if units < 1:
        raise ValueError(text)
    return units


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
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
    return 0


def reservation_table(reservations: dict[str, Reservation]) -> str:
    """One row for each model: needed, and for each pool the bytes reserved and the waste."""
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
