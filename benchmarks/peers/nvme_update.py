"""Runs DeepSpeed's NVMe optimizer swapper. Each order, a line of standard input, updates the parameters once.

Usage, in DeepSpeed's environment: `python -m benchmarks.peers.nvme_update FOLDER NUMEL BUFFERS`. The answer to an order
is JSON. It has the seconds of the optimizer's step, the memory, and a sample of the parameters. The seconds do not
include the backward, in which DeepSpeed also writes the gradients to SSD.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.peers import bag, start
from memascend.cli import process


def main(folder: str, numel: int, buffers: int) -> None:
    """Makes a step for each line of standard input, until standard input ends. Prints an answer after each step."""
    import deepspeed
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    start.start()
    grad = bag.gradient(numel)

    class Weight(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(bag.values(numel))

        def forward(self, gradient: Any) -> Any:
            return (self.weight * gradient).sum()

    class Bag(torch.nn.Module):
        """A model whose parameters all have the gradient that `forward` gets as its argument."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ModuleList(Weight() for _ in range(bag.PARAMETERS))

        def forward(self, gradient: Any) -> Any:
            return torch.stack([weight(gradient) for weight in list(self.weights)]).sum()

    baseline = process.resident()
    model = Bag()
    adam = DeepSpeedCPUAdam(model.parameters(), lr=1e-3, weight_decay=1e-2, adamw_mode=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=_config(folder, numel, buffers))
    first: Any = next(model.parameters())

    def step() -> dict[str, Any]:
        engine.backward(engine(grad))
        process.restart_peak()
        began = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - began
        with deepspeed.zero.GatheredParameters([first]):
            sample = first.data.flatten()[: bag.SAMPLE].float().tolist()
        swapped = engine.optimizer.optimizer_swapper.swap_buffer_manager.all_buffers
        return {
            "seconds": seconds,
            "added_bytes": process.resident_peak() - baseline,
            "swap_buffer_bytes": sum(buffer.nbytes for buffer in swapped),
            "sample": sample,
        }

    print("peer: ready", flush=True)
    for _ in sys.stdin:
        print(f"peer: {json.dumps(step())}", flush=True)


def _config(folder: str, numel: int, buffers: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        # As in memascend, gradients have 16 bits. By default, DeepSpeed would keep all gradients in 32 bits.
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": numel,
            "reduce_bucket_size": numel,
            "overlap_comm": False,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": numel,
            "stage3_max_reuse_distance": 0,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": folder,
                "pin_memory": False,
                "buffer_count": buffers,
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
