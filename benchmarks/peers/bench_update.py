"""Measures what `memascend bench update` does, with DeepSpeed's NVMe swapper beside it."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers import environment
from benchmarks.peers.swapper import Swapper
from memascend.cli.bench import update
from memascend.text import bytes_shown

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    update.add_arguments(parser)
    parser.add_argument("--deepspeed", metavar="PYTHON", help=environment.OPTION_HELP)
    options = parser.parse_args(words)
    if options.state not in {"own", "fp32"}:
        parser.error(f"--state {options.state}: DeepSpeed has no such state")
    python = environment.required(options.deepspeed)
    with tempfile.TemporaryDirectory(dir=options.storage or ".", prefix="memascend-bench-") as folder:
        result = update.measure(Path(folder), options, lambda numel: Swapper(python, Path(folder) / "deepspeed", numel))
    peer = result["other"]
    if "added_bytes" in peer:
        peer["ours_of_added_bytes"] = result["held_bytes"] / peer["added_bytes"]
        peer["ours_of_swap_buffer_bytes"] = result["held_bytes"] / peer["swap_buffer_bytes"]
    print(json.dumps(result, indent=2) if options.json else f"{update.shown(result)}\n{_beside(peer)}")


def _beside(peer: dict[str, Any]) -> str:
    if "error" in peer:
        return f"DeepSpeed is left out: {peer['error']}"
    return (
        f"the other one is DeepSpeed's NVMe swapper, pipelined, with {peer['buffers']} buffers: "
        f"{bytes_shown(peer['swap_buffer_bytes'])} of swap buffers, {bytes_shown(peer['added_bytes'])} in all; ours "
        f"holds {peer['ours_of_swap_buffer_bytes']:.2%} and {peer['ours_of_added_bytes']:.2%} of that; parameters "
        f"differ by {peer['difference']:.1e} in the mean"
    )


if __name__ == "__main__":
    main()
