"""Implements `memascend plan`: estimates the training of a model on a machine, without the weights or the machine."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.cli.plan.shapes import ASSUMED_RAM, SHAPES, positive, shape_named
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.cli.plan.answer import Answer, Question
    from memascend.cli.plan.subject import Subject

_TYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
          "float16": "float16", "fp16": "float16"}  # fmt: skip
_TOKENS, _LENGTH = 8192, 2048
_EXAMPLES = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options. An option with the name of an argument of `offload()` has the meaning of that argument.

    But `--accumulation-steps` also counts micro-batches that are computed by layer.
    """
    describes = (
        "config.json of a Hugging Face model, its folder, or a name, as on the hub (meta-llama/Llama-3.1-8B-Instruct, "
        f"qwen2.5-32b) or short: {', '.join(SHAPES)}"
    )
    parser.add_argument("model", metavar="CONFIG|FOLDER|NAME", type=Path, help=describes)
    _add_machine(parser.add_argument_group("the machine").add_argument)
    _add_run(parser.add_argument_group("the run").add_argument)
    parser.add_argument("--verbose", action="store_true", help="print the parts of each figure")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_machine(add: Callable[..., Any]) -> None:
    from memascend.plan.hardware import ASSUMED_DRIVE

    gpu = "a name such as 3090, l40s, h100, mi300x, or TFLOPS,GB,PCIE_GB_S as 165,24,25 (default: this machine's GPU)"
    drive = f"sustained GB/s, or gen3, gen4, gen5 (default: measured on --storage, without it {ASSUMED_DRIVE})"
    storage = "path of the store; repeat the option for several. Its free space and its speed are measured"
    endurance = "terabytes that may be written to the drives in their life"
    ram = f"the RAM of the machine, as 64GB (default: this machine's RAM; with another --gpu, {ASSUMED_RAM})"
    ranks = "the number of processes that shard the model (fully_shard); all figures are for one process"
    add("--gpu", metavar="G", help=gpu)
    add("--ram", metavar="B", help=ram)
    add("--drive", metavar="READ,WRITE", help=drive)
    add("--storage", metavar="P", action="append", help=storage)
    add("--endurance", metavar="TBW", type=_count, help=endurance)
    add("--ranks", metavar="N", type=_count, default=1, help=ranks)
    add("--network", metavar="GB_S", type=_speed, help="GB/s that a rank receives and, at once, sends")


def _add_run(add: Callable[..., Any]) -> None:
    smallest = "(default: the smallest that keeps disk and compute busy)"
    gradients = {"choices": ("auto", "fused", "ssd", "ram"), "default": "auto"}
    activations = "where checkpointed activations wait, as in offload() (%(default)s)"
    micro_batches = "micro-batches of a step, computed by layer on one rank (%(default)s)"
    in_turn = "compute micro-batches one after the other, as every Trainer and loop does"
    loss = (
        "how the loss is computed: full, from the logits of all tokens, the default of transformers' models; or "
        "chunked, without them, as TRL's Trainers and torch's linear_cross_entropy do (%(default)s)"
    )
    examples = "examples of one pass over the data, each of --length tokens, for its hours and terabytes (%(default)s)"
    add("--examples", metavar="N", type=_count, default=_EXAMPLES, help=examples)
    add("--host-memory", metavar="B", help='the budget, as "32GiB" (default: what the machine can spare)')
    add("--tokens", metavar="N", type=_count, default=_TOKENS, help="tokens of a micro-batch (%(default)s)")
    add("--length", metavar="N", type=_count, help=f"tokens of a sequence (default: --tokens, at most {_LENGTH})")
    add("--loss", choices=("full", "chunked"), default="chunked", help=loss)
    add("--activations", choices=("device", "host", "ssd"), default="device", help=activations)
    add("--keep-activations", action="store_true", help="plan without activation checkpointing")
    add("--fit", action="store_true", help="find the largest batches that fit the GPU and the drive")
    add("--device", metavar="D", help="the device that would compute, such as cuda; it need not exist here")
    add("--device-memory", metavar="B", help=f"the budget of the GPU's memory {smallest}")
    add("--gradients", **gradients, help="as in offload() (%(default)s)")
    add("--max-grad-norm", metavar="N", type=float, help="clip the global norm; 0: no clipping")
    add("--accumulation-steps", metavar="N", type=_count, default=1, help=micro_batches)
    add("--one-after-the-other", action="store_true", help=in_turn)
    add("--state", choices=("fp32", "bf16", "8bit"), help="format of the optimizer's moments (default: exact)")
    add("--optimizer", metavar="NAME", default="AdamW", help="a class of torch.optim (%(default)s)")
    add("--dtype", choices=_TYPES, help="dtype of the parameters (default: as config.json says, or bfloat16)")


def _count(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")


def _speed(text: str) -> float:
    try:
        return positive(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a speed: give a number of GB/s above 0") from None


def run(options: argparse.Namespace) -> int:
    """Runs `memascend plan`. Returns the exit code of `print_answer()`."""
    # Reports a wrong name of a model before the import of torch, which takes seconds.
    shape_named(options.model)
    return print_answer(options, ask(options))


def print_answer(options: argparse.Namespace, question: Question) -> int:
    """Prints the answer to a question; with `--fit`, prints the largest batches instead.

    Returns exit code 1 if the run, or with `--fit` every batch, does not fit, else 0.
    """
    from memascend.cli.plan import text
    from memascend.cli.plan.answer import alternative, answer, propose

    if options.fit:
        return _fit(options, question)
    found = answer(question)
    if options.json:
        print(json.dumps(_values(options, question, found), indent=2))
        return int(bool(found.problems))
    other = alternative(question) if found.problems else None
    proposal = propose(question, found)
    print(text.brief(options.model, question, found, proposal, other, options.examples))
    if options.verbose:
        head = f"{options.model}: {{parameters}}, described by {question.subject.by}; {options.optimizer}"
        print()
        print(text.shown(head, question, found))
    return int(bool(found.problems))


def ask(options: argparse.Namespace) -> Question:
    """Makes the question from the command's options: describes the model, and measures this machine if necessary."""
    from memascend.cli.plan.answer import Question
    from memascend.cli.plan.machine import drive_at, machine_of, parse_drive, parse_gpu
    from memascend.cli.storage import require_usable
    from memascend.plan import decision
    from memascend.plan.hardware import ASSUMED_DRIVE, gpu_here, has_device_file, product_flops, slowdown
    from memascend.plan.options import AUTO, Options
    from memascend.plan.spare import Spare

    own = gpu_here() if options.device != "cpu" else None
    gpu = own if options.gpu is None else parse_gpu(options.gpu)
    drive = None if options.drive is None else parse_drive(options.drive)
    computes_here = options.device in (None, "cpu") or has_device_file()
    here = (options.gpu is None and computes_here) or (gpu is not None and gpu == own)
    is_spare = options.host_memory in (None, AUTO)
    machine, machine_is = machine_of(options.ram, is_here=here, has_budget=not is_spare)
    given = Options(
        storage=None if options.storage is None else tuple(options.storage),
        host_memory=Spare(machine=machine, processes=options.ranks) if is_spare else options.host_memory,
        device=options.device if gpu is None else options.device or "cuda",
        device_memory=options.device_memory,
        gradients=options.gradients,
        max_grad_norm=options.max_grad_norm or None,
        # A run that computes by layer does not need accumulation_steps=, since accumulate() gets all micro-batches at
        # once. A run with several ranks never computes by layer.
        accumulation_steps=options.accumulation_steps if options.ranks > 1 or options.one_after_the_other else 1,
        activations=options.activations,
        state=options.state,
    )
    if options.network is not None and options.ranks == 1:
        raise ConfigError(
            "--network is the speed between several ranks, but --ranks is 1: add --ranks, or omit --network"
        )
    if gpu is not None and given.computes_on == "cpu":
        raise ConfigError("--gpu and --device cpu contradict each other: give only one of the two")
    if options.keep_activations and options.activations != "device":
        raise ConfigError(
            "--activations is about checkpointed activations, but --keep-activations turns activation checkpointing "
            "off: leave one of the two options out"
        )
    if options.fit and options.device == "cpu":
        raise ConfigError("--fit finds the batches that fit a GPU: omit --device cpu, or omit --fit")
    if options.fit and gpu is None:
        raise ConfigError(
            "--fit finds the batches that fit a GPU, but no GPU is named: add --gpu, for example --gpu 4090"
        )
    subject = _subject(options)
    paths = [Path(path) for path in given.paths or ()]
    speeds: dict[str, float] = {}
    require_usable(paths)
    if drive is None and paths:
        drive, speeds = drive_at(paths)
    sequences, length = _shape_of(options, subject)
    question = Question(
        subject=subject,
        options=given,
        gpu=gpu,
        drive=parse_drive(ASSUMED_DRIVE) if drive is None and not paths else drive,
        drive_assumed=drive is None and not paths,
        speeds=speeds,
        machine=machine,
        machine_is=machine_is,
        free=decision.free_space_beside(given.paths, 0) if given.paths else None,
        endurance=None if options.endurance is None else options.endurance * 10**12,
        is_usual=options.optimizer.lower() == "adamw" and options.dtype is None,
        ranks=options.ranks,
        network=None if options.network is None else options.network * 1e9,
        length=length,
        loss=options.loss,
        sequences=sequences,
        micro_batches=options.accumulation_steps,
    )
    if not isinstance(question.trace, str) and question.drive is not None and given.computes_on == "cpu":
        flops = product_flops(subject.dtype)
        question = replace(question, processor=flops, slowdown=slowdown(subject.dtype, flops))
    return question


def _subject(options: argparse.Namespace) -> Subject:
    """Describes the model.

    Does not import torch if AdamW trains a built-in shape of a kind in `builtin.KINDS` in 16 bits, on one rank, with
    activation checkpointing.
    """
    from memascend.cli.plan import builtin

    shape = shape_named(options.model)
    # The formulas in the module `builtin` assume 16-bit parameters.
    dtype = _TYPES[options.dtype or "bfloat16"]
    plain = options.optimizer.lower() == "adamw" and options.ranks == 1 and not options.keep_activations
    if shape is not None and plain and dtype != "float32" and shape[1]["model_type"] in builtin.KINDS:
        return builtin.subject(*shape, dtype)
    import torch

    from memascend.cli.plan import model

    return model.subject(
        options.model,
        dtype=None if options.dtype is None else getattr(torch, _TYPES[options.dtype]),
        optimizer=options.optimizer,
        recomputes=not options.keep_activations,
    )


def _shape_of(options: argparse.Namespace, subject: Subject) -> tuple[int, int]:
    """Returns the number of sequences in a micro-batch, and the number of tokens in each sequence."""
    length = options.length or min(options.tokens, _LENGTH, subject.longest or _LENGTH)
    if subject.longest is not None and length > subject.longest:
        raise ConfigError(
            f"--length {length} is more than the model's maximum of {subject.longest} tokens: reduce --length"
        )
    if options.tokens % length:
        whole = max(1, options.tokens // length) * length
        raise ConfigError(
            f"--tokens {options.tokens} is not a multiple of {length}, the tokens of a sequence: pass --tokens {whole} "
            "or another --length"
        )
    return options.tokens // length, length


def _fit(options: argparse.Namespace, question: Question) -> int:
    """Prints the largest batches that fit (`--fit`). Returns exit code 1 if no batch fits, else 0."""
    from memascend.cli.plan import text
    from memascend.cli.plan.answer import find

    found = find(question, options.length)
    if options.json:
        print(json.dumps([_fit_values(*one) for one in found], indent=2))
    else:
        print(text.fitting(found))
    return int(all(answer.problems for _, answer in found))


def _fit_values(question: Question, found: Answer) -> dict[str, Any]:
    """Returns the JSON value that `--fit --json` prints for a batch that was tried."""
    from memascend.cli.plan.answer import described

    return {
        "state": question.options.state,
        "batch": question.sequences,
        "length": question.length,
        "fits": not found.problems,
        "problems": list(found.problems),
        "device_bytes": found.device_bytes,
        "host_bytes": found.host_bytes,
        "disk_bytes": found.plan.disk_bytes,
        "log_bytes": found.plan.log_bytes,
        **described(found),
    }


def _values(options: argparse.Namespace, question: Question, found: Answer) -> dict[str, Any]:
    """Returns the JSON value that `--json` prints for an answer."""
    from memascend.cli.plan.answer import answer, described, disk_seconds, forecast_of, moved, propose, total

    plan, trace = found.plan, question.trace
    turns = answer(question.one_after_the_other()) if question.by_layer else None
    subject, proposal = question.subject, propose(question, found)

    def proposed(larger: Question, its: Answer) -> dict[str, Any]:
        return {
            "tokens": larger.sequences * larger.length,
            "micro_batches": larger.micro_batches,
            "activations": larger.options.activations,
            **described(its),
            "run": asdict(total(larger, its, options.examples)),
        }

    return {
        "model": {"path": str(options.model), "described_by": subject.by, "parameters": subject.parameters},
        "optimizer": options.optimizer,
        "fits": not found.problems,
        "problems": list(found.problems),
        "plan": plan.to_dict(),
        "in_memory_bytes": found.in_memory,
        "torch": {"why_not": trace}
        if isinstance(trace, str)
        else {
            "tokens": trace.tokens,
            "loss": trace.loss,
            "peak_bytes": trace.peak,
            "kept_bytes": trace.kept,
            "held": trace.held,
            "flops": trace.forward + trace.backward,
        },
        "host_bytes": found.host_bytes,
        "host_free_bytes": question.ram if question.machine_is == "here" else None,
        "ram_bytes": None if question.machine is None else question.machine.total,
        "ram_assumed": question.machine_is == "assumed",
        "device_bytes": found.device_bytes or None,
        "gpu": None if question.gpu is None else question.gpu.name,
        "processor_flops": question.processor,
        "step": described(found),
        "run": {"examples": options.examples, **asdict(total(question, found, options.examples))},
        "proposal": None
        if proposal is None
        else {
            **proposed(proposal.question, proposal.answer),
            "by_layer": None if proposal.by_layer is None else proposed(*proposal.by_layer),
        },
        "forecast": None if (forecast := forecast_of(question, found)) is None else asdict(forecast),
        "one_after_the_other": None if turns is None else {**described(turns), "host_bytes": turns.host_bytes},
        "ranks": None if found.network is None else {"count": options.ranks, **moved(question, found)},
        "disk": {
            "bytes": found.disk_bytes,
            "log_bytes": plan.log_bytes,
            "free_bytes": question.free,
            "fits": question.free is None or question.free >= found.disk_bytes,
        },
        "written_bytes_per_step": found.written,
        "read_bytes_per_step": found.read,
        "steps_per_100_tb_written": 10**14 // max(1, found.written),
        "drive": {"endurance_bytes": found.endurance, "days": found.days},
        "gb_per_second": question.speeds or None,
        "disk_seconds_per_step": disk_seconds(question, found),
    }
