"""The systems that the benchmark compares: memascend, torch in memory, torch's FSDP2, and DeepSpeed.

Each system names a module with two functions. `ready()` imports the libraries that training needs, and returns them.
The benchmark measures memory only after this call. `begin(work, settings, storage)` makes the model and returns a
`System`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

__all__ = ["SYSTEMS", "System", "Way"]


class System(Protocol):
    """A model and the system that trains it.

    A system that has a training loop (such as a Trainer) has `train(record)` instead of the first four methods.
    `train(record)` adds its steps to a `Record`. A system that tries several ways for its steps also has `way()`, which
    returns the name of the way for the next step.
    """

    def forward(self, tokens: Any) -> Any:
        """Returns the loss of a batch."""

    def backward(self, loss: Any) -> None:
        """Computes the gradients of a loss."""

    def accumulate(self, batches: list[Any]) -> Any:
        """Computes the gradients of all micro-batches of a step; returns their mean loss."""

    def update(self) -> None:
        """Makes the optimizer's step, and drops the gradients."""

    def counted(self) -> int | None:
        """Returns the bytes that the system has moved to and from SSD, if the system counts them; otherwise None."""

    def end(self) -> dict[str, Any]:
        """Ends the run; returns entries that this system adds to the cell's answer."""


class Way(NamedTuple):
    """A system: the name of its module, the settings for `begin`, and a description.

    `deepspeed` is True if the system needs DeepSpeed's environment.
    """

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
    "memascend-held-60": Way("ours", {"held": 60}, "60 % of the parameters kept in RAM, the rest on SSD"),
    "memascend-held": Way("ours", {"held": 100}, "all kept in RAM, a log of gradients on SSD"),
    "memascend-held-none": Way("ours", {"held": 100, "durability": "none"}, "all kept in RAM, written at the end"),
    "memascend-trainer": Way("trainer", {}, "everything on SSD, the default budget, by TRL's SFTTrainer"),
    "torch": Way("in_ram", {}, "in memory: fp32 master weights, fused AdamW"),
    "fsdp2-offload": Way("fsdp2", {}, "torch's FSDP2 with CPU offload, one rank: fp32 master weights, fused AdamW"),
    "zero-infinity": Way(
        "zero", {"stage": 3, "parameters": "nvme", "state": "nvme"}, "DeepSpeed, parameters and state on SSD", True
    ),
    "zero-infinity-pipelined": Way(
        "zero",
        {"stage": 3, "parameters": "nvme", "state": "nvme", "pipelined": True},
        "zero-infinity, state read ahead and written behind",
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
