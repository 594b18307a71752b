"""Validates the options of `memascend train`, and says which of them change the result."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError
from memascend.planning.options import Options

if TYPE_CHECKING:
    import argparse

SCHEDULES = ("linear", "cosine", "constant")
REPORTERS = ("tensorboard", "wandb")
# What a step is computed from. A run keeps these as it began; all others may change from one start to the next.
_OF_THE_RESULT = (
    "max_length", "batch", "accumulate", "lr", "schedule", "epochs", "warmup", "max_grad_norm", "state", "lora", "seed",
)  # fmt: skip
# What the other options are, where a change is told.
SHOWN = ("host_memory", "device", "device_memory", "activations", "save_every")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is asked to do."""

    model: Path
    data: Path
    output: Path
    storage: tuple[str, ...]
    host_memory: str | None = None
    device: str | None = None
    device_memory: str | None = None
    activations: str = "device"
    max_length: int = 2048
    batch: int = 1
    accumulate: int = 8
    lr: float = 1e-5
    schedule: str = "linear"
    epochs: float = 1.0
    warmup: float = 0.03
    max_grad_norm: float = 1.0
    state: str | None = None
    lora: int | None = None
    eval: Path | None = None
    save_every: int = 500
    seed: int = 0
    report: tuple[str, ...] = ()
    json: bool = False
    dry_run: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> Settings:
        """As the command line has them."""
        given = {field.name: getattr(options, field.name) for field in fields(cls)}
        given["storage"], given["report"] = tuple(options.storage), tuple(options.report or ())
        return cls(**given)

    def __post_init__(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            ConfigError: one of them does.
        """
        for name, least in (("max_length", 2), ("batch", 1), ("accumulate", 1), ("save_every", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{_flag(name)} is at least {least}, not {getattr(self, name)}")
        for name in ("lr", "epochs"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{_flag(name)} is a number above 0, not {value}")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"--warmup is the part of all steps that warms up, from 0 to less than 1: {self.warmup}")
        if not (math.isfinite(self.max_grad_norm) and self.max_grad_norm >= 0):
            raise ConfigError(f"--max-grad-norm is a number above 0, or 0 for no clipping, not {self.max_grad_norm}")
        if self.lora is not None and self.lora < 1:
            raise ConfigError(f"--lora is the rank of the adapters, at least 1, not {self.lora}")
        # Those of offload() are refused before any data is read.
        self.offload_options()

    def offload_options(self, ranks: int = 1) -> Options:
        """What `offload()` is given of these, with its own checks."""
        return Options(**self.offloaded(ranks))

    def offloaded(self, ranks: int = 1) -> dict[str, Any]:
        """The keywords for `offload()` that do not depend on what is there already, on one of so many ranks."""
        return {
            # Ranks share a folder, and divide what is a list.
            "storage": list(self.storage) if len(self.storage) > 1 else self.storage[0],
            "host_memory": self.host_memory,
            "device": self.device,
            "device_memory": self.device_memory,
            "activations": self.activations,
            "max_grad_norm": self.max_grad_norm or None,
            "accumulation_steps": self.accumulate // ranks,
            "state": self.state,
        }

    def of_the_result(self) -> dict[str, Any]:
        """By their flags: those that a run keeps as it began."""
        return {_flag(name): getattr(self, name) for name in _OF_THE_RESULT}

    def of_the_machine(self) -> dict[str, Any]:
        """By their flags: those that may change from one start to the next, as JSON has them."""
        found = {_flag(name): getattr(self, name) for name in SHOWN}
        found["--eval"] = None if self.eval is None else str(self.eval)
        return found


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    where = parser.add_argument_group("what and where")
    where.add_argument(
        "--model", metavar="FOLDER", type=Path, required=True, help="config.json, safetensors, tokenizer"
    )
    where.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        required=True,
        help=".jsonl or .parquet with rows of `messages`, of `prompt` and `completion`, or of `text`; or .txt",
    )
    where.add_argument(
        "--output",
        metavar="OUT",
        type=Path,
        required=True,
        help="a folder for the trained model; from_pretrained loads it",
    )
    where.add_argument(
        "--storage", metavar="PATH", action="append", required=True,
        help="a folder, file or NVMe device for the training state; several: given again; {rank} is filled in",
    )  # fmt: skip
    where.add_argument(
        "--eval", metavar="FILE", type=Path, help="rows that are held out; their loss is told at each save"
    )
    memory = parser.add_argument_group("memory")
    memory.add_argument("--host-memory", metavar="B", help='a hard budget, as "48GiB"; default: the least that is fast')
    memory.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1; default: cuda where there is one")
    memory.add_argument("--device-memory", metavar="B", help="a budget there; default: the least that is fast")
    memory.add_argument(
        "--activations", choices=("device", "host", "ssd"), default="device",
        help="where what each block is recomputed from waits for the backward (%(default)s)",
    )  # fmt: skip
    memory.add_argument("--state", metavar="FORMAT", help="of the moments: fp32, bf16, 8bit; default: exact")
    learning = parser.add_argument_group("learning")
    learning.add_argument("--max-length", metavar="N", type=int, default=2048, help="tokens of a row (%(default)s)")
    learning.add_argument("--batch", metavar="N", type=int, default=1, help="rows computed at once (%(default)s)")
    learning.add_argument("--accumulate", metavar="N", type=int, default=8, help="batches of a step (%(default)s)")
    learning.add_argument("--lr", metavar="X", type=float, default=1e-5, help="the peak (%(default)s)")
    learning.add_argument(
        "--schedule", choices=SCHEDULES, default="linear", help="how the rate falls after warm-up (%(default)s)"
    )
    learning.add_argument("--epochs", metavar="X", type=float, default=1.0, help="passes over the data (%(default)s)")
    learning.add_argument("--warmup", metavar="X", type=float, default=0.03, help="part of all steps (%(default)s)")
    learning.add_argument(
        "--max-grad-norm", metavar="X", type=float, default=1.0, help="clip the global norm; 0: do not (%(default)s)"
    )
    learning.add_argument("--lora", metavar="RANK", type=int, help="train adapters of this rank on all linear layers")
    learning.add_argument("--seed", metavar="N", type=int, default=0, help="of order, dropout, adapters (%(default)s)")
    telling = parser.add_argument_group("what is told and kept")
    telling.add_argument(
        "--save-every", metavar="N", type=int, default=500, help="steps from one saved model to the next (%(default)s)"
    )
    telling.add_argument("--report", choices=REPORTERS, action="append", help="tell it the figures, too")
    telling.add_argument("--json", action="store_true", help="print one JSON line a step")
    telling.add_argument("--dry-run", action="store_true", help="print what would be done, and the plan; do nothing")
