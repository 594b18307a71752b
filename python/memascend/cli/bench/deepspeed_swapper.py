"""DeepSpeed's NVMe optimizer swapper as a peer: a step of AdamW over parameters whose state it keeps on storage.

Run by `memascend bench update --deepspeed PYTHON` in an environment that has DeepSpeed; nothing here imports memascend.
The loop is that of ZeRO's third stage: a sub-group is read while the one before is computed and the one before that is
written. Gradients go through storage in fp32, as they do there; what writing them takes is told apart, since it happens
in the backward pass. The 16-bit values stay in memory: not read, not written, not counted.
"""

import json
import os
import sys
import time
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

# The fewest that it runs with: master, gradient and two moments of what is read, computed and written.
_BUFFERS = 12


def _resident_bytes() -> int:
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    # Locked or not, shared or not: what it takes of the host's memory.
    return int(fields["VmRSS"].split()[0]) * 1024


def _parameters(count: int) -> list[Any]:
    parameters: list[Any] = [torch.nn.Parameter(torch.Tensor()) for _ in range(count)]
    for index, parameter in enumerate(parameters):
        parameter.ds_id = str(index)
    return parameters


class _Swapped:
    """Parameters of one size, each a sub-group."""

    def __init__(self, folder: str, count: int, numel: int) -> None:
        self.parameters = _parameters(count)
        self.optimizer = DeepSpeedCPUAdam(self.parameters, lr=1e-3, weight_decay=0.01, adamw_mode=True)
        config = DeepSpeedZeroOffloadOptimizerConfig(
            device="nvme", nvme_path=folder, buffer_count=_BUFFERS, pipeline_read=True, pipeline_write=True
        )
        before = _resident_bytes()
        self.swapper = PipelinedOptimizerSwapper(
            swap_config=config,
            aio_config=AIO_DEFAULT_DICT,
            base_folder=folder,
            optimizer=self.optimizer,
            largest_numel=numel,
            device="cpu",
            dtype=torch.float32,
            timers=None,
        )
        self.held_bytes = _resident_bytes() - before
        self.gradient = torch.randn(numel).bfloat16()
        self.values = torch.empty(numel, dtype=torch.bfloat16)
        for parameter in self.parameters:
            self.swapper.initialize_parameters(parameters=[parameter], src_tensors=[torch.randn(numel)])
        for parameter in self.parameters:
            self.swapper.swap_in_optimizer_state(parameter, None)
            parameter.grad = torch.zeros(numel)
            self._update(parameter)
            parameter.grad = None
            self.swapper.swap_out_optimizer_state(parameter, False)

    def backward(self) -> None:
        """Hand every gradient over, which goes to storage."""
        for parameter in self.parameters:
            self.swapper.swap_out_gradients(parameter, [0], [self.gradient.float()])
        self.swapper.flush_gradients()

    def step(self) -> None:
        """Update every parameter."""
        following = [*self.parameters[1:], None]
        for parameter, next_one in zip(self.parameters, following, strict=True):
            self.swapper.swap_in_optimizer_state(parameter, next_one)
            self._update(parameter)
            self.values.copy_(parameter.data)
            self.swapper.swap_out_optimizer_state(parameter, next_one is not None)
            parameter.grad = None

    def _update(self, parameter: Any) -> None:
        # As ZeRO does: the optimizer sees one sub-group at a time.
        self.optimizer.param_groups[0]["params"] = [parameter]
        self.optimizer.step()


def _serve(folder: str, count: int, numel: int) -> None:
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"})
    os.environ.setdefault("MASTER_PORT", "29511")
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    swapped = _Swapped(folder, count, numel)
    print("peer: ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        swapped.backward()
        given = time.perf_counter()
        swapped.step()
        answer = {"gradients": given - began, "step": time.perf_counter() - given, "bytes": swapped.held_bytes}
        print(f"peer: {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
