"""Measures how fast memascend replays the gradient log of a store that was not closed, in updates and bytes per second.

A child process trains a model that is kept in RAM as a whole, and then kills itself with SIGKILL. The replay then reads
each record and the record's gradients in the log, updates the record, and writes it to the store.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

_WIDTH = 1024
_CHUNKS = 12
# `_STATE_BYTES` is the size of the state of a bf16 parameter, which the replay reads and writes. `_GRADIENT_BYTES` is
# the size of the parameter's gradient. The log has one for each step since the record was last written whole.
_STATE_BYTES, _GRADIENT_BYTES = 12, 2


def main() -> None:
    """Measures some rounds; prints a line for each round and the median, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=25, metavar="MILLIONS")
    parser.add_argument("--steps", type=int, default=16, help="steps of the killed run, and of the gradient log")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads that replay the log")
    parser.add_argument("--storage", default=".", help="a folder on the disk to measure")
    parser.add_argument("--json", action="store_true", help="print values instead of lines")
    options = parser.parse_args()
    rounds = [_measured(options) for _ in range(options.rounds)]
    speed = statistics.median(one["updates_per_second"] for one in rounds)
    if options.json:
        print(json.dumps({"rounds": rounds, "updates_per_second": speed}, indent=1))
        return
    for one in rounds:
        storage = one["bytes"] / one["seconds"] / 1e9
        print(
            f"{one['updates'] / 1e6:.0f} M updates of {one['parameters'] / 1e6:.0f} M parameters in "
            f"{one['seconds']:.2f} s ({one['processor_seconds']:.2f} s of processors): "
            f"{one['updates_per_second'] / 1e9:.3f} Gparam/s, {storage:.2f} GB/s of storage"
        )
    print(f"median: {speed / 1e9:.3f} Gparam/s")


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    from memascend.engine import Engine, Store

    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-replay-") as folder:
        path = str(Path(folder, "run.store"))
        child = multiprocessing.get_context("spawn").Process(
            target=_train, args=(path, options.parameters, options.steps)
        )
        child.start()
        child.join()
        if child.exitcode != -signal.SIGKILL:
            raise SystemExit("the training process failed before its last step; its output is above")
        with Store.open(path) as store:
            parameters = sum(_elements(record["shape"]) for record in store.each_record() if record["state"])
            store.go_back()
            received = [0]
            with Engine(store, chunks=_CHUNKS, threads=options.threads) as engine:
                began, busy = time.perf_counter(), time.process_time()
                if not engine.replay(lambda _done, everything: received.append(everything)):
                    raise SystemExit(
                        "the killed training left no gradient log, so the replay cannot be measured: pass --steps and "
                        "--parameters of at least 1"
                    )
                seconds, busy = time.perf_counter() - began, time.process_time() - busy
    updates = received[-1] // _GRADIENT_BYTES
    return {
        "parameters": parameters,
        "updates": updates,
        "seconds": seconds,
        "processor_seconds": busy,
        "updates_per_second": updates / seconds,
        "bytes": updates * _GRADIENT_BYTES + parameters * 2 * _STATE_BYTES,
    }


def _elements(shape: list[int]) -> int:
    elements = 1
    for length in shape:
        elements *= length
    return elements


def _train(path: str, millions: int, steps: int) -> None:
    """Makes `steps` durable steps, and then kills this process.

    Each step writes all gradients to the log. In the `steps` steps together, memascend writes each record whole once.
    """
    import torch

    import memascend

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(millions)]).bfloat16()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    room = 20 * millions * _WIDTH * _WIDTH + (1 << 30)
    model, optimizer = memascend.offload(
        model, optimizer, storage=path, gradients="fused", host_memory=room, log_steps=steps, device="cpu"
    )
    given = torch.ones(1, _WIDTH, dtype=torch.bfloat16)
    for _ in range(steps):
        model(given).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
