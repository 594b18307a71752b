"""Implements `memascend store`: shows the contents of a store, or verifies every byte of its last two commits."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from memascend.text import Progress, bytes_shown, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from memascend import storage

_PREVIOUS = '`memascend train ... --existing previous`, or existing="previous" of offload(),'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions `info` and `verify`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in (
        ("info", "show the last commit, and the contents of the store"),
        ("verify", "read the last two commits and check every byte; exit 1 if the last commit is damaged"),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        action.add_argument(
            "paths", nargs="+", metavar="P", help="folder, file or device; if several, in the order of the run"
        )
        action.add_argument("--json", action="store_true", help="print JSON")
        if name == "info":
            action.add_argument(
                "--verbose", action="store_true", help="list each tensor instead of groups of similar tensors"
            )


def run(options: argparse.Namespace) -> int:
    """Runs the action, and returns the exit code.

    The exit code is 1 if `info` cannot open the store, or if `verify` finds that the last commit, or a copy of a label
    or of the store's description, is damaged. Otherwise the exit code is 0.
    """
    if options.action == "verify":
        return _verify(options.paths, as_json=options.json)
    return _info(options.paths, partial(_describe, as_json=options.json, verbose=options.verbose), quiet=options.json)


def _info(paths: list[str], describe: Callable[[storage.Store], None], *, quiet: bool) -> int:
    """Describes the store, and returns the exit code.

    If the store cannot be opened, describes the newest undamaged catalog in the store, and returns exit code 1.

    Raises:
        StorageError: the store cannot be opened, and no undamaged catalog is found.
    """
    from memascend import storage
    from memascend.errors import StorageError

    try:
        with storage.Store.open(paths) as store:
            describe(store)
    except StorageError as error:
        try:
            looked_at = storage.look(paths)
        except StorageError:
            raise error from None
        with looked_at as store:
            print(f"memascend store: {error}", file=sys.stderr)
            if not quiet:
                print("this store cannot be opened as it is. Its newest undamaged catalog describes this commit:")
            describe(store)
        return 1
    return 0


def _describe(store: storage.Store, *, as_json: bool, verbose: bool) -> None:
    info, records = store.info(), store.records()
    if as_json:
        print(json.dumps({**info, "records": records}, indent=2))
        return
    print(f"{_summary(info, records)}\n")
    if not verbose:
        print(_groups(records))
        return
    rows = [
        (
            record["name"],
            info["units"][record["unit"]],
            record["dtype"],
            " x ".join(map(str, record["shape"])) or "scalar",
            str(record["step"]),
            ", ".join(f"{name} ({dtype})" for name, dtype, _ in record["state"]) or "none",
        )
        for record in records
    ]
    print(table(("name", "unit", "dtype", "shape", "updates", "state"), rows))


# Matches a number between dots, or after the last dot, in the name of a tensor. Such a number is usually the index of a
# layer or an expert.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _groups(records: list[dict[str, Any]]) -> str:
    """Returns a table with one row for each group of tensors that differ only in the numbers in their names."""
    groups: dict[tuple[str, ...], int] = {}
    for record in records:
        row = (
            _NUMBER.sub("*", record["name"]),
            record["dtype"],
            " x ".join(map(str, record["shape"])) or "scalar",
            str(record["step"]),
            ", ".join(f"{name} ({dtype})" for name, dtype, _ in record["state"]) or "none",
        )
        groups[row] = groups.get(row, 0) + 1
    states = {row[-1] for row in groups}
    shown = [(row[0], str(count), *row[1:4], *(row[4:] if len(states) > 1 else ())) for row, count in groups.items()]
    common = "" if len(states) > 1 else f"\n\nstate of each: {states.pop()}" if states else ""
    head = ("tensors", "count", "dtype", "shape", "updates", *(["state"] if len(states) > 1 else []))
    return f"{table(head, shown)}{common}"


def _summary(info: dict[str, Any], records: list[dict[str, Any]]) -> str:
    trained = [record for record in records if not record["buffer"]]
    elements = sum(math.prod(record["shape"]) for record in trained)
    kinds = sorted({record["dtype"] for record in trained})
    rows = [
        ("at", f"step {info['step']} of {info['optimizer']}"),
        (
            "model",
            f"{elements:,} parameters in {len(trained)} tensors ({', '.join(kinds)}), {len(info['units'])} units",
        ),
        ("buffers", str(len(records) - len(trained))),
        ("state", f"{bytes_shown(info['slot_bytes'])}, twice: {bytes_shown(info['total_bytes'])} on storage"),
        ("storage", ", ".join(info["devices"])),
        ("memory while open", bytes_shown(info["index_bytes"] + info["buffer_bytes"])),
        ("user state", str(info["user"] or "none")),
        ("store", f"{info['uuid']}, generation {info['generation']}"),
    ]
    if info["log_steps"]:
        rows.append(
            ("log", f"{info['log_steps']} steps of {info['log_records']} parameters; the next run applies these steps")
        )
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {what}" for name, what in rows)


def _verify(paths: list[str], *, as_json: bool) -> int:
    from memascend import storage
    from memascend.errors import CorruptionError

    began = time.perf_counter()
    with Progress("verifying the store", 0) as progress:
        commits = storage.examine(paths, None if as_json else progress.reached)
    seconds = time.perf_counter() - began
    damaged: list[str] = []
    # look() raises CorruptionError if all catalogs are damaged. In this case, `commits` already reports the damage.
    with contextlib.suppress(CorruptionError), storage.look(paths) as store:
        damaged = store.damaged()
    if as_json:
        print(json.dumps({**_as_json(commits, seconds), "damaged": damaged}))
    else:
        _print_commits(commits, seconds)
        for copy in damaged:
            print(f"{copy}; the other copy is undamaged, and the next training step tries to repair the damaged copy")
    # The other copy is undamaged, so no data is lost. But the drive may be failing, so the exit code is 1.
    return 0 if commits[0].whole and not damaged else 1


def _as_json(commits: list[storage.Commit], seconds: float) -> dict[str, object]:
    newest = commits[0]
    described = [
        {
            "generation": commit.generation,
            "step": commit.step,
            "whole": commit.whole,
            "extents": commit.extents,
            "bytes": commit.nbytes,
            "damages": _damages(commit),
            "damages_left_out": commit.others,
        }
        for commit in commits
    ]
    return {
        "extents": newest.extents,
        "bytes": newest.nbytes,
        "seconds": seconds,
        "step": newest.step,
        "whole": newest.whole,
        "commits": described,
    }


def _print_commits(commits: list[storage.Commit], seconds: float) -> None:
    """Prints the state of each commit. If the newest commit is damaged, lists the damage of all commits on stderr."""
    newest, others = commits[0], commits[1:]
    if newest.whole:
        speed = sum(commit.nbytes for commit in commits) / seconds / 1e9
        print(
            f"step {newest.step} is whole: {newest.extents} extents, {bytes_shown(newest.nbytes)}, {speed:.2f} GB/s "
            f"(generation {newest.generation}, the newest)"
        )
    else:
        print(f"memascend store: {_named(newest)} is damaged:", file=sys.stderr)
        _list(newest)
    for other in others:
        if other.whole and newest.whole:
            print(f"{_named(other)} is older, and is whole, too: {_PREVIOUS} goes back to the older commit")
        elif other.whole:
            print(f"{_named(other)} is whole: {_PREVIOUS} opens this commit")
        elif newest.whole:
            count = len(other.damages) + other.others
            print(
                f"{_named(other)} is older, and has {count} overwritten or damaged parts: this is normal once the next "
                "step has begun"
            )
        else:
            print(f"memascend store: {_named(other)} is not whole either:", file=sys.stderr)
            _list(other)
    if not newest.whole and not any(other.whole for other in others):
        print(
            "no commit is whole: start a new run in another file, from a checkpoint or from the last saved model",
            file=sys.stderr,
        )


def _named(commit: storage.Commit) -> str:
    if commit.generation is None:
        return "a root, perhaps the root of the newest commit,"
    step = "" if commit.step is None else f"step {commit.step}, "
    return f"the commit of {step}generation {commit.generation}"


def _damages(commit: storage.Commit) -> list[str]:
    """Returns descriptions of a commit's damage, without the advice to run `memascend store verify`."""
    return [damage.partition(". Run `memascend store verify`")[0] for damage in commit.damages]


def _list(commit: storage.Commit) -> None:
    for damage in _damages(commit):
        print(f"  {damage}", file=sys.stderr)
    if commit.others:
        print(f"  and {commit.others} more", file=sys.stderr)
