"""`memascend plan`: estimates what training a model on a machine takes, without weights and without the machine."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    import torch

    from memascend.cli.plan.answer import Answer, Question, Takeover
    from memascend.cli.plan.model import DescribedModel

    Measure = Callable[[Question, tuple[int, int]], Question]

_TYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
          "float16": "float16", "fp16": "float16"}  # fmt: skip
_TOKENS, _LENGTH = 8192, 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; those that `offload()` has mean the same here."""
    parser.add_argument(
        "model",
        metavar="CONFIG|FOLDER",
        type=Path,
        help="config.json of a Hugging Face model, its folder, or safetensors",
    )
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--gpu", metavar="G", help="a name such as 3090, l40s, h100, mi300x, or TFLOPS,GB,PCIE_GB_S as 165,24,25"
    )
    machine.add_argument(
        "--drive", metavar="READ,WRITE", help="sustained GB/s, or gen3, gen4, gen5 (default: measured on --storage)"
    )
    machine.add_argument(
        "--storage",
        metavar="P",
        action="append",
        help="where the store would be; repeat it for several. Its free space and its speed are measured",
    )
    machine.add_argument(
        "--endurance", metavar="TBW", type=_count, help="terabytes that may be written to the drives in their life"
    )
    machine.add_argument(
        "--ranks",
        metavar="N",
        type=_count,
        default=1,
        help="processes that shard the model (fully_shard); all figures are of one of them",
    )
    machine.add_argument(
        "--network", metavar="GB_S", type=_speed, help="GB/s that a rank receives while it sends as much"
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--host-memory",
        metavar="B",
        help='the budget, as "32GiB" (default: the smallest that keeps disk and compute busy)',
    )
    run.add_argument(
        "--tokens", metavar="N", type=_count, default=_TOKENS, help="tokens of a micro-batch (%(default)s)"
    )
    run.add_argument("--length", metavar="N", type=_count, help=f"tokens of a sequence (--tokens, at most {_LENGTH})")
    run.add_argument("--keep-activations", action="store_true", help="without activation checkpointing")
    run.add_argument("--fit", action="store_true", help="find the largest batches that fit the GPU and the drive")
    run.add_argument("--device", metavar="D", help="where the model would compute, as cuda, which need not exist here")
    run.add_argument(
        "--device-memory",
        metavar="B",
        help="the budget of the GPU's memory (default: the smallest that keeps disk and compute busy)",
    )
    run.add_argument(
        "--gradients",
        choices=("auto", "fused", "ssd", "ram"),
        default="auto",
        help="as offload() takes it (%(default)s)",
    )
    run.add_argument("--max-grad-norm", metavar="N", type=float, help="clip the global norm")
    run.add_argument(
        "--accumulation-steps", metavar="N", type=_count, default=1, help="micro-batches of a step (%(default)s)"
    )
    run.add_argument("--state", choices=("fp32", "bf16", "8bit"), help="of the optimizer's moments (default: exact)")
    run.add_argument("--optimizer", metavar="NAME", default="AdamW", help="a class of torch.optim (%(default)s)")
    run.add_argument(
        "--lora", metavar="RANK", type=_count, help="train LoRA adapters of this rank instead of the model"
    )
    run.add_argument("--dtype", choices=_TYPES, help="of the parameters (default: as config.json says, or bfloat16)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", metavar="PNG", type=Path, help="draw memory and bytes moved into this file")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _speed(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def run(options: argparse.Namespace, measure: Measure | None = None) -> int:
    """Print the plan; 1 where it does not fit the GPU or the storage that is named.

    Args:
        options: of the command line.
        measure: puts what computes into a question, for so many sequences of so many tokens.
    """
    from memascend.cli.plan import text
    from memascend.cli.plan.answer import answer, larger

    source, question, speeds = _asked(options, measure)
    if options.fit:
        return _fit(options, question)
    found = answer(question)
    compared = text.formats_compared(question, found.plan.budget)
    more = None if found.plan.all_held <= found.plan.budget else larger(question, found)
    if options.picture is not None:
        text.draw(options.picture, found)
    if options.json:
        described = _values(options, source, question, found, more, speeds)
        print(json.dumps({**described, "formats": [asdict(cost) for cost in compared]}, indent=2))
    else:
        head = f"{options.model}: {{parameters}}, described by {source.by}; {options.optimizer}"
        fewer = text.next_format(compared, options.state)
        choices = text.Choices(more=more, fewer=fewer, takeover=_takes_over(options, question))
        print(text.shown(head, question, found, choices, speeds) + text.formats_shown(compared, found.plan.budget))
    return int(bool(found.problems))


def _asked(options: argparse.Namespace, measure: Measure | None) -> tuple[DescribedModel, Question, dict[str, float]]:
    """What the command line asks, and the measured speed of its storage."""
    import torch

    from memascend.cli.plan.answer import Question, drive_at, free_bytes, parse_drive, parse_gpu
    from memascend.cli.plan.model import describe, with_adapters
    from memascend.plan.options import Options

    gpu = None if options.gpu is None else parse_gpu(options.gpu)
    drive = None if options.drive is None else parse_drive(options.drive)
    asked = Options(
        storage=options.storage,
        host_memory=options.host_memory,
        device=options.device if gpu is None else options.device or "cuda",
        device_memory=options.device_memory,
        gradients=options.gradients,
        max_grad_norm=options.max_grad_norm,
        # One rank's `accumulate()` needs none; several compute one after the other.
        accumulation_steps=1 if options.ranks == 1 else options.accumulation_steps,
        state=options.state,
    )
    if options.network is not None and options.ranks == 1:
        raise ConfigError("--network is the speed between ranks, and there is one: also give --ranks")
    if gpu is not None and asked.where.type == "cpu":
        raise ConfigError("--gpu names a GPU, and --device says that the CPU computes: give one of them")
    source = describe(options.model, None if options.dtype is None else getattr(torch, _TYPES[options.dtype]))
    if options.lora is not None:
        source = with_adapters(source, options.lora)
    paths = [Path(path) for path in asked.paths or ()]
    speeds: dict[str, float] = {}
    if drive is None:
        drive, speeds = drive_at(paths)
    question = Question(
        model=source.model,
        optimizer=_optimizer(options.optimizer, source.model),
        options=asked,
        trace="",
        gpu=gpu,
        drive=drive,
        free=free_bytes(paths),
        endurance=None if options.endurance is None else options.endurance * 10**12,
        ranks=options.ranks,
        network=None if options.network is None else options.network * 1e9,
        micro_batches=options.accumulation_steps,
    )
    return source, _traced(options, question, measure), speeds


def _traced(options: argparse.Namespace, question: Question, measure: Measure | None) -> Question:
    """The question with what torch takes for its tokens, and how fast what computes is where that is measured."""
    from memascend.cli.plan.model import trace

    batch, length = shape_of(options, question.model)
    found = trace(question.model, batch, length, recomputes=not options.keep_activations)
    question = replace(question, trace=found)
    return question if measure is None or isinstance(found, str) else measure(question, (batch, length))


def shape_of(options: argparse.Namespace, model: torch.nn.Module) -> tuple[int, int]:
    """How many sequences of how many tokens a backward has."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    length = options.length or min(options.tokens, _LENGTH, most if isinstance(most, int) else _LENGTH)
    return max(1, options.tokens // length), length


def _takes_over(options: argparse.Namespace, question: Question) -> Takeover | None:
    from memascend.cli.plan.answer import takes_over

    if isinstance(question.trace, str):
        return None
    return takes_over(question, shape_of(options, question.model)[1], recomputes=not options.keep_activations)


def _fit(options: argparse.Namespace, question: Question) -> int:
    from memascend.cli.plan import text
    from memascend.cli.plan.answer import described_fit, find

    if question.gpu is None:
        raise ConfigError("--fit finds batches that fit a GPU: name it, as --gpu 4090")
    found = find(question, options.length, recomputes=not options.keep_activations)
    if options.json:
        print(json.dumps([described_fit(one) for one in found], indent=2))
    else:
        print(text.fitting(found))
    return int(not any(one.fits for one in found))


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    import torch

    kinds: dict[str, Any] = {
        kind.lower(): getattr(torch.optim, kind)
        for kind in dir(torch.optim)
        if isinstance(getattr(torch.optim, kind), type) and kind != "Optimizer"
    }
    kind = kinds.get(name.lower())
    if kind is None or not issubclass(kind, torch.optim.Optimizer):
        raise ConfigError(f"--optimizer must be a class of torch.optim, such as AdamW or SGD, not {name!r}")
    made: torch.optim.Optimizer = kind([one for one in model.parameters() if one.requires_grad])
    return made


def _values(
    options: argparse.Namespace,
    source: DescribedModel,
    question: Question,
    found: Answer,
    more: Answer | None,
    speeds: dict[str, float],
) -> dict[str, Any]:
    from memascend.cli.plan.answer import answer, described, disk_seconds, forecast_of, moved

    plan, trace = found.plan, question.trace
    turns = answer(question.one_after_the_other()) if question.by_layer else None
    written = sum(plan.written_bytes.values())
    step = described(found)
    tokens = None if isinstance(trace, str) else trace.tokens * question.micro_batches * question.ranks
    takeover = _takes_over(options, question)
    return {
        "model": {"path": str(options.model), "described_by": source.by, "parameters": parameters_of(source.model)},
        "optimizer": options.optimizer,
        "fits": not found.problems,
        "problems": list(found.problems),
        "plan": plan.to_dict(),
        "in_memory_bytes": found.in_memory,
        "torch": {"why_not": trace}
        if isinstance(trace, str)
        else {"tokens": trace.tokens, "peak_bytes": trace.peak, "held": trace.held, "flops": trace.flops},
        "host_bytes": found.host_bytes,
        "device_bytes": found.device_bytes or None,
        "gpu": None if question.gpu is None else question.gpu.name,
        "step": {
            **step,
            "tokens_per_second": None if found.seconds is None or tokens is None else tokens / found.seconds,
        },
        "compute_takes_over": None
        if takeover is None
        else {**asdict(takeover), "tokens_per_second": takeover.tokens_per_second},
        "forecast": None if (forecast := forecast_of(question, plan, found.network)) is None else asdict(forecast),
        "one_after_the_other": None if turns is None else {**described(turns), "host_bytes": turns.host_bytes},
        "with_16_gib_more": None if more is None else described(more),
        "ranks": None if found.network is None else {"count": options.ranks, **moved(question, found)},
        "disk": {
            "bytes": plan.disk_bytes,
            "log_bytes": plan.log_bytes,
            "free_bytes": question.free,
            "fits": question.free is None or question.free >= plan.disk_bytes,
        },
        "written_bytes_per_step": written,
        "read_bytes_per_step": sum(plan.read_bytes.values()),
        "steps_per_100_tb_written": 10**14 // max(1, written),
        "drive": {"endurance_bytes": found.endurance, "days": found.days},
        "gb_per_second": speeds or None,
        "disk_seconds_per_step": disk_seconds(question, plan),
    }


def parameters_of(model: torch.nn.Module) -> int:
    """Elements of all its parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
