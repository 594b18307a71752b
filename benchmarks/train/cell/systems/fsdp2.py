"""Trains with torch's FSDP2 and its CPU offload, on one rank: float32 parameters, gathered in the model's type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.train.cell.systems import in_ram
from benchmarks.train.cell.workload import LEARNING_RATE, Workload, made

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

__all__ = ["Sharded", "begin", "ready"]


def ready() -> list[ModuleType]:
    """Import what a user imports."""
    libraries = in_ram.ready()
    import torch.distributed.fsdp  # noqa: F401 - counted with what is imported

    return libraries


def begin(work: Workload, settings: dict[str, Any], storage: Path) -> Sharded:  # noqa: ARG001 - as every system is begun
    """The model's blocks sharded one by one, over one process."""
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
    """The loop of FSDP2's documents."""

    def __init__(self, work: Workload, model: Any) -> None:
        import torch

        self.work, self.model = work, model
        self.adam = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def forward(self, tokens: Any) -> Any:
        """The loss of a batch."""
        return self.model(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: Any) -> None:
        """Gradients."""
        loss.backward()

    def accumulate(self, batches: list[Any]) -> Any:
        """The mean loss of the step's batches, with its gradients."""
        return in_ram.one_after_the_other(self, batches)

    def update(self) -> None:
        """The step."""
        import torch

        if self.work.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.work.clip)
        self.adam.step()
        self.adam.zero_grad()

    def counted(self) -> int | None:
        """It keeps no account."""
        return None

    def end(self) -> dict[str, Any]:
        """Leave the group."""
        import torch

        torch.distributed.destroy_process_group()
        return {}
