"""Trains with torch's FSDP2 and its CPU offload on one rank.

Parameters are fp32; FSDP2 gathers them in the workload's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.train.cell.systems import in_ram
from benchmarks.train.cell.workload import LEARNING_RATE, Workload, made

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

__all__ = ["Sharded", "begin", "ready"]


def ready() -> list[ModuleType]:
    """Imports the libraries that a user of this system imports; returns them."""
    libraries = in_ram.ready()
    import torch.distributed.fsdp  # noqa: F401 - imported before memory is counted

    return libraries


def begin(work: Workload, settings: dict[str, Any], storage: Path) -> Sharded:  # noqa: ARG001 - part of every `begin`
    """Makes the model. Shards each of its blocks, and then the rest of it, over a process group of one process."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group(init_method=f"file://{storage}/ranks", rank=0, world_size=1)
    dtype = getattr(torch, work.dtype)
    model = made(work).float()
    options: dict[str, Any] = {
        "mesh": init_device_mesh(work.device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=work.device != "cpu"),
    }
    for block in model.model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return Sharded(work, model)


class Sharded:
    """Trains with FSDP2 as described in its documentation."""

    def __init__(self, work: Workload, model: Any) -> None:
        import torch

        self.work, self.model = work, model
        self.adam = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def forward(self, tokens: Any) -> Any:
        """Returns the loss of a batch."""
        return self.model(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: Any) -> None:
        """Computes the gradients of a loss."""
        loss.backward()

    def accumulate(self, batches: list[Any]) -> Any:
        """Computes the gradients of all micro-batches of a step; returns their mean loss."""
        return in_ram.one_after_the_other(self, batches)

    def update(self) -> None:
        """Clips the gradients if the workload clips, makes the optimizer's step, and drops the gradients."""
        import torch

        if self.work.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.work.clip)
        self.adam.step()
        self.adam.zero_grad()

    def counted(self) -> int | None:
        """Returns None, because FSDP2 does not count its bytes."""
        return None

    def end(self) -> dict[str, Any]:
        """Ends the process group. Adds no entries to the answer."""
        import torch

        torch.distributed.destroy_process_group()
        return {}
