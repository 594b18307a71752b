"""Counts memascend's messages between ranks: `python -m benchmarks.messages [--ranks 8] [--storage D]`.

The ranks are processes with the gloo backend on the CPU. They train a small model, without and with clipping. The table
has these figures:

- the exchanges of a step, and the messages of a step and their bytes, summed over all ranks;
- the seconds that a rank spends in the exchanges of a step, which include its waits for other ranks;
- the sockets that a rank opens, and the seconds of `offload()`.

The messages in which FSDP2 moves shards and gradients are not counted. gloo also sends two short notices with each
message, which are not counted either.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.ranks import measured
from memascend.text import bytes_shown, seconds_shown, table

WARM = 3
WIDTH, BLOCKS, ROWS = 64, 2, 4
WAYS = {"no clipping": None, "clipping": 0.1}


def main() -> None:
    """Runs the ranks and prints the table. With `--rank-of`, this process is one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--storage", type=Path, default=Path(), help="a folder on the disk (default: here)")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        be_rank(Path(options.rank_of), options.steps)
        return
    print(shown({count: measured(count, options, "benchmarks.messages") for count in options.ranks}))


def be_rank(folder: Path, steps: int) -> None:
    """Trains as one rank, first without clipping and then with clipping; writes the measurements to `folder`."""
    import torch
    from torch import distributed, nn
    from torch.distributed.fsdp import fully_shard

    import memascend

    torch.set_num_threads(1)
    before = sockets()
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    found: dict[str, Any] = {"sockets": {"torch's own": sockets() - before}, "ways": {}}
    counts = watch()
    for name, limit in WAYS.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        before, began = sockets(), time.perf_counter()
        model, optimizer = memascend.offload(
            model, optimizer, storage=folder / name, gradients="ssd", max_grad_norm=limit
        )
        found["offload"] = time.perf_counter() - began
        found["sockets"]["memascend"] = sockets() - before
        each: list[dict[str, float]] = []
        for step in range(WARM + steps):
            inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step * 100 + rank))
            counts.update(dict.fromkeys(counts, 0))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            each.append(dict(counts))
        found["ways"][name] = {what: statistics.median(one[what] for one in each[WARM:]) for what in counts}
        optimizer.close()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def watch() -> dict[str, float]:
    """Patches `isend` and `Exchange` so that they count this process's messages, bytes, exchanges and seconds.

    Returns the counts. Each later message or exchange changes the returned dict.
    """
    from torch import distributed

    from memascend.distributed.control_plane import Exchange

    counts: dict[str, float] = {"sends": 0, "bytes": 0, "exchanges": 0, "seconds": 0.0}
    send, messages = distributed.isend, Exchange._messages  # noqa: SLF001

    def sent(tensor: Any, *given: Any, **named: Any) -> Any:
        counts["sends"] += 1
        counts["bytes"] += tensor.nbytes
        return send(tensor, *given, **named)

    def counted(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return messages(*given, **named)
        finally:
            counts["exchanges"] += 1
            counts["seconds"] += time.perf_counter() - began

    distributed.isend, Exchange._messages = sent, counted  # type: ignore[assignment,method-assign]  # noqa: SLF001
    return counts


def sockets() -> int:
    """Returns the number of open sockets of this process."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += str(entry.readlink()).startswith("socket:")
        except OSError:
            # This entry is the file descriptor that listed the folder. It is closed by now.
            continue
    return found


def shown(found: dict[int, list[dict[str, Any]]]) -> str:
    """Returns the table. Each number of ranks has two rows: without clipping, and with clipping."""
    head = (
        "ranks", "", "exchanges a step", "messages of all ranks", "bytes", "seconds of a rank", "its sockets: torch's",
        "memascend's", "offload()",
    )  # fmt: skip
    rows = []
    for count, ranks in found.items():
        own, more = (max(rank["sockets"][of] for rank in ranks) for of in ("torch's own", "memascend"))
        for name in WAYS:
            of = {what: [rank["ways"][name][what] for rank in ranks] for what in ranks[0]["ways"][name]}
            rows.append(
                (
                    str(count),
                    name,
                    f"{of['exchanges'][0]:g}",
                    f"{sum(of['sends']):g}",
                    bytes_shown(int(sum(of["bytes"]))),
                    seconds_shown(statistics.median(of["seconds"])),
                    str(own),
                    str(more),
                    seconds_shown(max(rank["offload"] for rank in ranks)),
                )
            )
    return table(head, rows)


if __name__ == "__main__":
    main()
