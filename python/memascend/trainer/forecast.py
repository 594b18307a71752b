"""Predicts, before the first step, how long a Trainer's step takes and how many bytes it writes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memascend.plan.cost import Work, assumed_host, fastest, seconds, update_seconds, ways
from memascend.plan.hardware import ASSUMED_DRIVE, DRIVES, REACHED, gpu_here, product_flops, slowdown, slowdown_in_words
from memascend.plan.options import Options
from memascend.session.decide import planned

if TYPE_CHECKING:
    from collections.abc import Mapping

# Floating-point operations per token and parameter: in a forward, in a backward, and in a forward that is repeated
# because of gradient checkpointing.
_FORWARD, _BACKWARD, _RECOMPUTED = 2, 4, 2
# The number of rows that are read to estimate the number of tokens of an example.
_ROWS = 200
# The names of columns that have token ids: in data of transformers, and in prompts and pairs of TRL.
_TOKENS = ("input_ids", "prompt_ids", "completion_ids", "chosen_ids", "rejected_ids")
_log = logging.getLogger("memascend")


@dataclass(frozen=True)
class Forecast:
    """The prediction for one step of a training."""

    written: int  # bytes
    seconds: float | None  # None if the number of tokens or the speed of the computing device is unknown
    assumed: str  # a text for users that names the assumed speeds


def forecast(trainer: Any, options: Mapping[str, Any]) -> Forecast | None:
    """Predicts a step with these options of `offload()`.

    Returns None under FSDP2, because the shards do not exist before `train()`. Also returns None after any error,
    because an unusual Trainer must not fail only because its steps cannot be predicted.
    """
    if trainer.is_fsdp_enabled:
        return None
    try:
        return _forecast(trainer, options)
    except Exception as error:  # noqa: BLE001
        # If the options are wrong, offload() raises the error later.
        _log.debug("steps cannot be predicted: %s", error)
        return None


def _forecast(trainer: Any, options: Mapping[str, Any]) -> Forecast:
    args, model = trainer.args, trainer.model
    given = Options(**options)
    count = args.gradient_accumulation_steps
    if given.gradients == "auto" and (count > 1 or args.max_grad_norm):
        given = replace(given, gradients="ssd")
    plan = planned(model, trainer.optimizer, given).plan
    on_host = given.computes_on == "cpu"
    gpu = None if on_host else gpu_here()
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    speed, whose = None, ""
    if gpu is not None:
        speed, whose = gpu.flops, f"{REACHED:.0%} of the {gpu.name}'s peak"
    elif on_host and dtype in ("bfloat16", "float16", "float32"):
        found = product_flops(dtype)
        speed, whose = found * REACHED, f"{REACHED:.0%} of this processor's {found / 1e9:,.0f} GFLOPS"
        whose += slowdown_in_words(dtype, slowdown(dtype, found))
    length = _tokens_of_example(trainer)
    tokens = None if length is None else length * args.per_device_train_batch_size
    operations = 0.0 if tokens is None else tokens * _parameters_of_token(model)
    backward = _BACKWARD + (_RECOMPUTED if args.gradient_checkpointing else 0)
    work = Work(
        forward=_FORWARD * operations / (speed or 1.0), backward=backward * operations / (speed or 1.0), backwards=count
    )
    drive = DRIVES[ASSUMED_DRIVE]
    host = assumed_host(None if gpu is None else gpu.link, shared=on_host)
    steps = ways(plan, work, drive, replace(host, update=update_seconds(plan, host.update)))
    way = fastest(steps)
    plan = plan.repeated(count - 1).by(way)
    return Forecast(
        written=sum(plan.written_bytes.values()),
        seconds=None if tokens is None or speed is None else seconds(steps[way]),
        assumed=f"a drive of {drive.read / 1e9:g} and {drive.write / 1e9:g} GB/s, {whose}",
    )


def _parameters_of_token(model: Any) -> float:
    """Returns the number of parameters with which the model computes one token.

    Of the experts' parameters, counts only the share that the router chooses for a token.
    """
    config = getattr(model, "config", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    number = next((value for name in names if (value := getattr(config, name, None))), None)
    part = chosen / number if chosen and number else 1.0
    sizes = ((name, parameter.numel()) for name, parameter in model.named_parameters())
    return float(sum(size * (part if ".experts." in name else 1.0) for name, size in sizes))


def _tokens_of_example(trainer: Any) -> float | None:
    """Returns the average number of tokens in the first `_ROWS` examples; None if tokens cannot be counted.

    The average is at most the Trainer's `max_length`. Reads only lists and data sets of the package `datasets`, because
    reading these draws no random numbers. Counts only the columns in `_TOKENS`.
    """
    data: Any = trainer.train_dataset
    if type(data).__module__.startswith("datasets.") and hasattr(data, "select_columns"):
        columns = [name for name in _TOKENS if name in data.column_names]
        data = data.with_format(None).select_columns(columns) if columns else []
    elif type(data) is not list:
        return None
    rows = [data[number] for number in range(min(_ROWS, len(data)))]
    found = [sum(len(row[name]) for name in _TOKENS if name in row) for row in rows if isinstance(row, dict)]
    length = sum(found) / len(found) if found else 0
    longest = getattr(trainer.args, "max_length", None)
    return min(length, longest) if length and longest else length or None
