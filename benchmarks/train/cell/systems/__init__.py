"""The systems under comparison: memascend, torch in memory and under FSDP2, DeepSpeed; one module each.

Each module has `ready()`, which imports what training needs, before memory is counted, and says what that is, and
`begin(work, settings, storage)`, which makes the model and gives a `System`. The module of a peer is read in the
peer's environment.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

__all__ = ["SYSTEMS", "System", "Way"]


class System(Protocol):
    """A model that trains, whoever makes it do so.

    One with a loop of its own has `train(record)`, which adds its steps to a `Record`, instead of the first four. One
    that tries several ways for its steps has `way()`, the name of the next one's.
    """

    def forward(self, tokens: Any) -> Any:
        """The loss of a batch."""

    def backward(self, loss: Any) -> None:
        """Its gradients."""

    def accumulate(self, batches: list[Any]) -> Any:
        """The mean loss of a step's micro-batches, and its gradients."""

    def update(self) -> None:
        """The optimizer's step; gradients are gone afterwards."""

    def counted(self) -> int | None:
        """Bytes to and from SSD so far by the system's own account, if it keeps one."""

    def end(self) -> dict[str, Any]:
        """Finish; what the system itself has to say of the run."""


class Way(NamedTuple):
    """A system under a name, and how it is begun."""

    module: str
    settings: dict[str, Any]
    about: str
    deepspeed: bool = False


SYSTEMS = {
    "memascend": Way("ours", {}, "everything on SSD, the default budget"),
    "memascend-smallest": Way("ours", {"smallest": True}, "everything on SSD, the smallest budget"),
    "memascend-meta": Way("ours", {"weights": True}, "everything on SSD, the model made on meta, from a checkpoint"),
    "memascend-bf16": Way("ours", {"state": "bf16"}, "everything on SSD, moments of 16 bits"),
    "memascend-8bit": Way("ours", {"state": "8bit"}, "everything on SSD, moments of 8 bits"),
    "memascend-held-60": Way("ours", {"held": 60}, "60 % of the parameters held in memory, the rest on SSD"),
    "memascend-held": Way("ours", {"held": 100}, "all held in memory, a log of gradients on SSD"),
    "memascend-held-none": Way("ours", {"held": 100, "durability": "none"}, "all held in memory, written at the end"),
    "memascend-trainer": Way("trainer", {}, "everything on SSD, the default budget, by TRL's SFTTrainer"),
    "torch": Way("in_ram", {}, "in memory: fp32 masters, fused AdamW"),
    "fsdp2-offload": Way("fsdp2", {}, "torch's FSDP2 with CPU offload, on one rank: fp32 masters, fused AdamW"),
    "zero-infinity": Way(
        "zero", {"stage": 3, "parameters": "nvme", "state": "nvme"}, "DeepSpeed, parameters and state on SSD", True
    ),
    "zero-infinity-pipelined": Way(
        "zero",
        {"stage": 3, "parameters": "nvme", "state": "nvme", "pipelined": True},
        "the same, state read ahead and written behind",
        True,
    ),
    "zero-infinity-params-in-ram": Way(
        "zero",
        {"stage": 3, "parameters": "cpu", "state": "nvme"},
        "DeepSpeed, state on SSD, parameters in memory",
        True,
    ),
    "zero-offload": Way(
        "zero", {"stage": 2, "parameters": "none", "state": "cpu"}, "DeepSpeed, everything in memory", True
    ),
}
