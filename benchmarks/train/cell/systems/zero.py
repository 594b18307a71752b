"""Trains with DeepSpeed: ZeRO-Offload, or ZeRO-Infinity with parameters on SSD or in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.peers import start
from benchmarks.train.cell.systems import in_ram
from benchmarks.train.cell.workload import LEARNING_RATE, LOSS_SCALE_POWER, Workload, configuration, made, prepared

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

__all__ = ["Zero", "begin", "config", "ready"]


def ready() -> list[ModuleType]:
    """Imports the libraries that a user of this system imports; returns them.

    Also loads DeepSpeed's extensions and makes its process group, so that they do not count as memory of training.
    """
    import deepspeed

    libraries = in_ram.ready()
    start.start()
    return [*libraries, deepspeed]


def begin(work: Workload, settings: dict[str, Any], storage: Path) -> Zero:
    """Makes the model and DeepSpeed's engine. `config` explains the settings."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    answer = config(work, settings, storage)
    if settings.get("lean") and settings["stage"] == 3:
        import torch
        import transformers

        with deepspeed.zero.Init(config_dict_or_path=answer, dtype=getattr(torch, work.dtype)):
            model = prepared(work, transformers.Qwen2ForCausalLM(configuration(work)))
    else:
        model = made(work)
    adam = DeepSpeedCPUAdam(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, adamw_mode=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=answer)
    return Zero(engine)


def config(work: Workload, settings: dict[str, Any], storage: Path) -> dict[str, Any]:
    """Returns DeepSpeed's configuration, with small buffers and fast I/O.

    `settings` must have `stage`, `state` and, for stage 3, `parameters`. The other entries are optional.

    - `stage`: the stage of ZeRO.
    - `parameters`, `state`: where DeepSpeed puts the parameters and the optimizer state: "nvme", "cpu" or "none".
    - `parameter_buffers`, `state_buffers`: the numbers of swap buffers, which `benchmarks.train.tuning` finds.
    - `pipelined`: True means that DeepSpeed reads the next group's state and writes the previous group's state while it
      updates a group.
    - `lean`: True means that DeepSpeed moves each parameter to `parameters` while the model is made. Only stage 3 uses
      it.
    """
    largest = work.vocabulary * work.hidden
    matrix = work.hidden * work.intermediate
    pinned = work.device != "cpu"
    pipelined = bool(settings.get("pipelined", False))
    zero: dict[str, Any] = {
        "stage": settings["stage"],
        "contiguous_gradients": True,
        "overlap_comm": False,
        # A bucket has space for the largest matrix of a block. DeepSpeed reduces a larger gradient without a bucket.
        "reduce_bucket_size": matrix,
        "offload_optimizer": {
            "device": settings["state"],
            "nvme_path": str(storage),
            "pin_memory": pinned,
            "buffer_count": settings.get("state_buffers", 4),
            "pipeline_read": pipelined,
            "pipeline_write": pipelined,
            "fast_init": False,
        },
    }
    if settings["stage"] == 3:
        zero |= {
            "sub_group_size": matrix,
            # With parameters on SSD, an assertion of DeepSpeed fails for any other value.
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": largest,
            "stage3_max_reuse_distance": largest,
            "offload_param": {
                "device": settings["parameters"],
                "nvme_path": str(storage),
                "pin_memory": pinned,
                "buffer_count": settings.get("parameter_buffers", 5),
                "buffer_size": largest,
                "max_in_cpu": 0,
            },
        }
    described: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": work.micro_batches,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
        "gradient_clipping": work.clip or 0.0,
        # These settings were the fastest on the measured disks.
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }
    if work.dtype == "float16":
        # With hysteresis 1, DeepSpeed halves the loss scale after each overflow, as memascend and `in_ram` do.
        scale = {"initial_scale_power": LOSS_SCALE_POWER, "hysteresis": 1, "loss_scale_window": 2000}
        described["fp16"] = {"enabled": True, **scale}
    elif work.dtype == "bfloat16":
        described["bf16"] = {"enabled": True}
    return described


class Zero:
    """Trains with DeepSpeed's engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def forward(self, tokens: Any) -> Any:
        """Returns the loss of a batch."""
        return self.engine(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: Any) -> None:
        """Computes the gradients of a loss."""
        self.engine.backward(loss)

    def accumulate(self, batches: list[Any]) -> Any:
        """Computes the gradients of all micro-batches of a step; returns their mean loss.

        DeepSpeed counts micro-batches by the calls of `step()`. This function calls `step()` after each micro-batch but
        the last, and `update` calls it after the last. DeepSpeed divides the gradients by the number of micro-batches.
        """
        total = 0.0
        for batch in batches:
            loss = self.forward(batch)
            self.backward(loss)
            total = total + loss.detach()
            if batch is not batches[-1]:
                self.engine.step()
        return total / len(batches)

    def update(self) -> None:
        """Makes the optimizer's step."""
        self.engine.step()

    def counted(self) -> int | None:
        """Returns None, because DeepSpeed does not count its bytes."""
        return None

    def end(self) -> dict[str, Any]:
        """Returns an empty dict, because this system adds no entries to the answer."""
        return {}
