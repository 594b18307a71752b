"""Runs DeepSpeed's aio: obeys the orders "read" and "write"; prints bytes, seconds and processor seconds of each.

`benchmarks.peers.bench_io` runs this file in an environment that has DeepSpeed, so it imports nothing of ours.
"""

import resource
import sys
import time

from deepspeed.ops.op_builder import AsyncIOBuilder


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _serve(path: str, block: int, depth: int, nbytes: int) -> None:
    # DeepSpeed documents these settings: one handle, events overlapped, requests in batches, one thread.
    handle = AsyncIOBuilder().load().aio_handle(block, depth, False, True, 1)
    import torch

    buffer = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    buffer.fill_(1)
    print("peer: ready", flush=True)
    for order in sys.stdin:
        cpu, began = _cpu_seconds(), time.perf_counter()
        if order.strip() == "read":
            handle.sync_pread(buffer, path)
        else:
            handle.sync_pwrite(buffer, path)
        print(f"peer: {nbytes} {time.perf_counter() - began} {_cpu_seconds() - cpu}", flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
