"""`memascend store`: what a store holds, and whether all of it is whole."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from memascend.cli.show import bytes_shown, table

if TYPE_CHECKING:
    import argparse

    from memascend import engine

# How often the progress bar is drawn again.
_DRAW_SECONDS = 0.1
_BAR_CELLS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the two actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in (
        ("info", "what the last commit says, and what the store holds"),
        ("verify", "read everything that is live and check it against its checksums"),
        ("upgrade", "convert a store of version 1 of the format, where it is"),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        action.add_argument("paths", nargs="+", metavar="P", help="folder, file or device; several in their order")
        action.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Look, check or convert; what is wrong with the store is an error that says where."""
    from memascend import engine

    if options.action == "upgrade":
        upgraded = engine.Store.upgrade(options.paths)
        if options.json:
            print(json.dumps({"upgraded": upgraded}))
        else:
            print("the store has version 2 of the format now" if upgraded else "there was nothing to do")
        return 0
    with engine.Store.open(options.paths) as store:
        if options.action == "info":
            _info(store, as_json=options.json)
            return 0
        return _verify(store, as_json=options.json)


def _info(store: engine.Store, *, as_json: bool) -> None:
    info, entries = store.info(), store.entries()
    if as_json:
        print(json.dumps({**info, "entries": entries}, indent=2))
        return
    buffers = sum(entry["buffer"] for entry in entries)
    print(
        f"step {info['step']} of {info['optimizer']}, generation {info['generation']}, store {info['uuid']}\n"
        f"{len(entries) - buffers} parameters and {buffers} buffers in {len(info['units'])} units\n"
        f"{bytes_shown(info['slot_bytes'])} of state, {bytes_shown(info['total_bytes'])} with both slots on "
        f"{', '.join(info['devices'])}\n"
        f"{bytes_shown(info['index_bytes'] + info['buffer_bytes'])} of memory while it is open\n"
        f"user state: {info['user'] or 'none'}\n"
    )
    rows = [
        (
            entry["name"],
            info["units"][entry["unit"]],
            entry["dtype"],
            " x ".join(map(str, entry["shape"])) or "scalar",
            str(entry["step"]),
            ", ".join(f"{name} ({dtype})" for name, dtype, _ in entry["state"]) or "none",
        )
        for entry in entries
    ]
    print(table(("name", "unit", "dtype", "shape", "updates", "state"), rows))


def _verify(store: engine.Store, *, as_json: bool) -> int:
    began = time.perf_counter()
    drawn = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal drawn
        now = time.perf_counter()
        if now - drawn >= _DRAW_SECONDS or done == total:
            drawn = now
            cells = _BAR_CELLS * done // max(1, total)
            bar = "#" * cells + "." * (_BAR_CELLS - cells)
            print(f"\r[{bar}] {bytes_shown(done)} of {bytes_shown(total)}", end="", file=sys.stderr, flush=True)

    shows = sys.stderr.isatty() and not as_json
    try:
        pieces, nbytes = store.verify(progress if shows else None)
    finally:
        if shows:
            print(file=sys.stderr)
    seconds = time.perf_counter() - began
    damaged = store.damaged()
    if as_json:
        found = {"pieces": pieces, "bytes": nbytes, "seconds": seconds, "step": store.step, "damaged": damaged}
        print(json.dumps(found))
    else:
        speed = nbytes / seconds / 1e9
        print(f"step {store.step} is whole: {pieces} pieces, {bytes_shown(nbytes)}, {speed:.2f} GB/s")
        for copy in damaged:
            print(f"{copy}; its other copy is whole, and the next training step repairs it")
    # Nothing is lost, and yet something is wrong.
    return 1 if damaged else 0
