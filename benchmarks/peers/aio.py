"""Runs DeepSpeed's aio for `benchmarks.peers.bench_io`.

Standard input has one order in each line, "read" or "write". For each order, this program reads or writes the first
bytes of the file, as many as its buffer has, and prints the bytes, the seconds and the processor seconds. It runs in
DeepSpeed's environment.
"""

import resource
import sys
import time

from deepspeed.ops.op_builder import AsyncIOBuilder


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _serve(path: str, block: int, depth: int, nbytes: int) -> None:
    # These settings are from DeepSpeed's documentation: one handle, overlapped events, requests in batches, one thread.
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
