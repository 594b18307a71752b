"""Formats the answers of `memascend plan`: memory, the seconds of a step, drive wear, and the code to write."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.cli.plan.answer import answer, beside, disk_seconds, forecast_of, moved, total
from memascend.cli.storage import mount_point
from memascend.plan.cost import seconds
from memascend.plan.hardware import ENDURANCE_PER_TB, REACHED, slowdown_in_words
from memascend.plan.options import AUTO
from memascend.text import bytes_shown, counted, duration_shown, seconds_shown, size_option, table, terabytes_shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.cli.plan.answer import Answer, Proposal, Question, Total
    from memascend.plan.table import Way


Row = tuple[str, str, str]
_YEAR_DAYS = 365
# A larger budget is shown only if it reduces the seconds of a step to at most this share of the present seconds.
_FASTER = 0.99
# For each of these ways in which updates may run: the name of the way in the table, and a note on the seconds of a
# step.
_WAYS: dict[Way, tuple[str, str]] = {
    "next backward": (
        "updates in the next backward",
        "a step: each update's values are computed in the next forward, and again in its backward, which writes them",
    ),
    "next forward": ("updates in the next forward", "a step: each update is made in the next forward"),
    "early": ("updates in the same backward", "a step while no step is clipped: each update begins before the norm"),
}
_NO_BF16 = "; it has no units for bfloat16, so use --dtype fp16"


def brief(
    model: Path,
    question: Question,
    found: Answer,
    proposal: Proposal | None,
    other: tuple[Question, Answer] | None,
    examples: int,
) -> str:
    """Formats an answer in a few lines: whether the run fits, seconds, memory, a whole run, and the code to write.

    `proposal` is a larger step that takes less time per token, or None. `other` is a similar run that fits, or None.
    `examples` is the number of examples in a whole run.
    """
    title = f"{model}, {question.subject.parameters / 1e9:.3g} B parameters, on {_where(question)}"
    rows = [(title, _fits(question, found))]
    if found.problems:
        rows.append(("what fits", _fitting_run(question, found, other)))
    if found.seconds is None:
        rows.append(("a step", f"not known: {_unknown(question)}"))
    else:
        many = f" in {question.micro_batches} micro-batches" if question.micro_batches > 1 else ""
        in_turn = " one after the other" if question.micro_batches > 1 else ""
        way = f" by layer{_one_after_the_other(question)}" if question.by_layer else in_turn
        speed = f"{seconds_shown(found.seconds)} for {found.tokens:,} tokens{many}{way}"
        rows.append(("a step", f"{speed}, {found.tokens_per_second:,.0f} a second, bound by {_bound(question, found)}"))
    rows.append(("memory", _memory_in_words(question, found)))
    rows.append((counted(examples, "example"), _total_in_words(total(question, found, examples))))
    if proposal is not None:
        rows.append(("a larger step", _larger_step(question, proposal, examples)))
    if not found.problems:
        if (command := _command(model, question)) is not None:
            rows.append(("write, on the command line", command))
        rows.append(("write, for a Trainer", "; ".join(_trainers_lines(question))))
        rows.append(("write, in a loop", "; ".join(_lines(question))))
    return "\n".join(f"{what}: {words}" for what, words in rows)


def _where(question: Question) -> str:
    if question.gpu is not None:
        return question.gpu.name
    return "this processor" if question.on_host else "a GPU that is not named"


def _fits(question: Question, found: Answer) -> str:
    if found.problems:
        return f"does not fit: {'; '.join(found.problems)}"
    if isinstance(question.trace, str):
        return f"fits without its activations, which are not known: {question.trace}"
    if question.gpu is None and not question.on_host:
        return "fits the drive; pass --gpu to check whether it fits the GPU"
    return "fits"


def _bound(question: Question, found: Answer) -> str:
    bound = {"disk": "the drive", "compute": "compute"}.get(found.bound or "", found.bound or "")
    assumed = []
    if question.drive_assumed and question.drive is not None:
        assumed.append(f"a drive of {question.drive.read / 1e9:g} and {question.drive.write / 1e9:g} GB/s (--drive)")
    if question.gpu is not None:
        slow = _NO_BF16 if question.subject.dtype == "bfloat16" and not question.gpu.bf16 else ""
        assumed.append(f"{REACHED:.0%} of the GPU's peak{slow}")
    elif question.processor is not None:
        slow = slowdown_in_words(question.subject.dtype, question.slowdown)
        assumed.append(f"{REACHED:.0%} of its measured {question.processor / 1e9:,.0f} GFLOPS{slow}")
    return f"{bound} (assumed: {' and '.join(assumed)})" if assumed else bound


def _memory_in_words(question: Question, found: Answer) -> str:
    parts = [f"{bytes_shown(found.host_bytes)} of RAM"]
    if question.ram is not None:
        ram = bytes_shown(question.ram)
        each = " a rank" if question.ranks > 1 else ""
        by_source = {
            "here": f" ({ram}{each} are free here)",
            "given": f" of {ram}{each}",
            "assumed": f" of {ram}{each} (--ram)",
        }
        parts[0] += by_source[question.machine_is]
    if not question.on_host:
        of = "" if question.gpu is None else f" of {bytes_shown(question.gpu.usable)}"
        parts.append(f"{bytes_shown(found.device_bytes)}{of} on the GPU")
    parts[-1] += _loss_in_words(question)
    free = "" if question.free is None else f" of {bytes_shown(question.free)} free"
    new = [path for path in map(Path, question.options.paths or ()) if not path.exists()]
    # Show the drive of a path that does not exist yet. If the user mistyped the path, the drive is often the wrong one.
    place = ", ".join(f" of {mount_point(path.parent)} ({path} does not exist yet)" for path in new)
    parts.append(f"{bytes_shown(found.plan.storage_bytes + question.scratch(found.plan))}{free} on the drive{place}")
    return ", ".join(parts)


def _loss_in_words(question: Question) -> str:
    if isinstance(question.trace, str):
        return ""
    if question.trace.loss == "chunked":
        return " (chunked loss; --loss full makes the logits of all tokens)"
    return " (logits of all tokens" + ("; --loss chunked makes none)" if question.loss == "full" else ")")


def _one_after_the_other(question: Question) -> str:
    other = answer(question.one_after_the_other()).seconds
    return "" if other is None else f" ({seconds_shown(other)} one after the other)"


def _larger_step(question: Question, proposal: Proposal, examples: int) -> str:
    """Formats the proposed steps: first with micro-batches one after the other, then by layer."""
    layered = proposal.by_layer
    found = []
    if layered is None or layered[0] is not proposal.question:
        larger, count = proposal.question, proposal.question.micro_batches
        words = [f"--tokens {larger.sequences * larger.length} --accumulation-steps {count}"]
        words += ["--one-after-the-other"] * (count > 1)
        if larger.options.activations != question.options.activations:
            words.append(f"--activations {larger.options.activations}")
        found.append(f"{' '.join(words)}: {_total_in_words(total(larger, proposal.answer, examples))}")
    if layered is not None:
        found.append(f"by layer with {_changes(question, layered[0])}: {_total_in_words(total(*layered, examples))}")
    return "; ".join(found)


def _changes(question: Question, other: Question) -> str:
    """Returns the command's options that change the run `question` into the run `other`."""
    options = []
    if other.sequences != question.sequences and not isinstance(other.trace, str):
        options.append(f"--tokens {other.trace.tokens}")
    if other.micro_batches != question.micro_batches:
        options.append(f"--accumulation-steps {other.micro_batches}")
    if other.options.activations != question.options.activations:
        options.append(f"--activations {other.options.activations}")
    if other.options.state != question.options.state:
        options.append(f"--state {other.options.state}")
    return " ".join(options)


def _total_in_words(run: Total) -> str:
    took = "" if run.seconds is None else f"{duration_shown(run.seconds)}, "
    return f"{counted(run.steps, 'step')}, {took}{terabytes_shown(run.written)} written"


def _fitting_run(question: Question, asked: Answer, found: tuple[Question, Answer] | None) -> str:
    if found is None and question.free is not None and len(asked.problems) == 1 and question.free < asked.disk_bytes:
        return "the store of this model does not fit in any format of the state (--state): use a larger drive"
    if found is None:
        return (
            "not one sequence of this length fits: use a shorter --length, or a machine with a larger GPU, RAM or drive"
        )
    other, its = found
    took = "" if its.seconds is None else f", {seconds_shown(its.seconds)} a step"
    return f"{_changes(question, other)}: {_memory_in_words(other, its)}{took}"


def shown(head: str, question: Question, found: Answer) -> str:
    """Formats all figures of an answer (`--verbose`).

    `head` is the first line. It has the placeholder `{parameters}` for the number of parameters.
    """
    count, trained = question.subject.parameters, question.subject.trained
    of_them = "" if trained == count else f" ({trained:,} trained)"
    parts = [head.format(parameters=f"{count:,} parameters{of_them}")]
    rows = [
        _life(question, found),
        *_memory(question, found),
        *_room(question, found),
        *_moved(question, found),
        *_time(question, found),
    ]
    if found.seconds is not None and question.by_layer:
        rows += _in_turn(question, found.seconds)
    parts.append(table(("what", "how much", "note"), rows))
    parts.append(str(found.plan))
    return "\n\n".join(parts)


def _options(question: Question, *without: str) -> list[str]:
    """Returns the arguments of `offload()` as Python code, except the arguments named in `without`."""
    options = question.options
    paths = list(options.paths or ["/mnt/nvme/run"])
    given = [f"storage={json.dumps(paths if len(paths) > 1 else paths[0])}"]
    # An option that has the default of offload() is left out.
    for name, default in (("host_memory", None), ("device_memory", None), ("gradients", "auto"),
                          ("max_grad_norm", None), ("activations", "device"), ("state", None)):  # fmt: skip
        value = AUTO if name == "host_memory" and options.spare is not None else getattr(options, name)
        if value != default and name not in without:
            given.append(f"{name}={_as_python(value)}")
    return given


def _command(model: Path, question: Question) -> str | None:
    """Returns the command `memascend train` for this run.

    Returns None if `memascend train` cannot do this run, or if the model cannot be traced.
    """
    options, trace = question.options, question.trace
    if question.ranks > 1 or isinstance(trace, str) or not question.is_usual:
        return None
    folder = model.parent if model.is_file() else model if model.exists() or "/" in str(model) else f"path/to/{model}"
    words = ["memascend", "train", "--model", str(folder), "--data", "data.jsonl", "--output", "tuned"]
    for path in options.paths or ["/mnt/nvme/run"]:
        words += ["--storage", str(path)]
    words += ["--max_length", str(question.length), "--per_device_train_batch_size", str(question.sequences)]
    words += ["--gradient_accumulation_steps", str(question.micro_batches)]
    words += ["--max_grad_norm", f"{options.max_grad_norm or 0:g}"]
    words += ["--gradient_checkpointing", str(trace.recomputes)]
    for option, default in (("host_memory", None), ("device_memory", None), ("gradients", "auto"),
                            ("activations", "device"), ("state", None)):  # fmt: skip
        value = getattr(options, option)
        if value != default and not (option == "host_memory" and options.spare is not None):
            words += [f"--{option}", str(value)]
    return shlex.join(words)


def _trainers_lines(question: Question) -> list[str]:
    """Returns the code for a Trainer: the Trainer's arguments, and the call that precedes `train()`."""
    norm = question.options.max_grad_norm
    given = [f"per_device_train_batch_size={question.sequences}", f"max_grad_norm={_as_python(norm or 0.0)}"]
    if question.micro_batches > 1:
        given.insert(1, f"gradient_accumulation_steps={question.micro_batches}")
    if not isinstance(question.trace, str) and question.subject.checkpointing:
        given.append(f"gradient_checkpointing={question.trace.recomputes}")
    if question.subject.dtype != "float32":
        # By default, TRL loads a model in float32 and computes in bfloat16. These arguments keep the dtype of the
        # files.
        given += ['model_init_kwargs={"dtype": "auto"}', "bf16=False"]
    # host_memory= is left out if it is "auto", the machine's spare memory, because trainer.offload() has this default.
    without = ("max_grad_norm", *(["host_memory"] if question.options.spare is not None else ()))
    call = f"memascend.trainer.offload(trainer, {', '.join(_options(question, *without))})"
    if question.options.accumulation_steps > 1 and question.ranks == 1 and not question.carries:
        layered = replace(question, options=replace(question.options, accumulation_steps=1))
        if answer(layered).problems:
            # A Trainer that computes by layer keeps the activations of all micro-batches. Here, they do not fit.
            keeps = not isinstance(question.trace, str) and not question.trace.recomputes
            checkpoints = "gradient_checkpointing=True and " if keeps else ""
            call += f', with {checkpoints}activations="ssd" if the Trainer computes by layer (SFT, Reward)'
    return [", ".join(given), call]


def _lines(question: Question) -> list[str]:
    """Returns the code for a training loop: the call of `offload()`, and other calls that the estimates assume."""
    options, given = question.options, _options(question)
    if question.micro_batches > 1 and not question.by_layer:
        given.append(f"accumulation_steps={options.accumulation_steps}")
    lines = []
    if not isinstance(question.trace, str) and question.trace.recomputes and question.subject.checkpointing:
        lines.append(f"model.{question.subject.checkpointing}()")
    lines.append(f"model, optimizer = memascend.offload(model, optimizer, {', '.join(given)})")
    if not isinstance(question.trace, str) and question.trace.loss == "chunked":
        chunked = "torch.nn.functional.linear_cross_entropy with options=torch.nn.LinearCrossEntropyOptions()"
        lines.append(f"a loss that makes no logits of all tokens ({chunked}, Liger, cut-cross-entropy)")
    if question.by_layer:
        lines.append(f"optimizer.accumulate(loss_of, batches, scale=1 / {question.micro_batches}, by_layer=True)")
    return lines


def _as_python(value: str | float) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _memory(question: Question, found: Answer) -> list[Row]:
    plan, trace, gpu = found.plan, question.trace, question.gpu
    in_memory = (
        f"in memory, training takes {bytes_shown(found.in_memory)} and activations: "
        f"{found.in_memory / plan.host_peak:.3g} times memascend's part"
    )
    rows: list[Row] = []
    if not question.on_host:
        of = "" if gpu is None else f"of {bytes_shown(gpu.usable)} for tensors"
        rows.append(("GPU memory", bytes_shown(found.device_bytes), of))
        in_use = "parameters in use, gradients on their way to the host"
        rows.append(("  memascend", bytes_shown(plan.device_peak), in_use))
        rows += _torchs(question)
    rows.append(("host memory, the whole process", bytes_shown(found.host_bytes), in_memory))
    rows.append(("  memascend", bytes_shown(plan.host_peak), f"within the budget of {bytes_shown(plan.budget)}"))
    libraries = "Python, torch" if question.on_host else "Python, torch, CUDA"
    rows.append((f"  {libraries} and objects", bytes_shown(beside(question, plan)), "assumed"))
    if question.on_host:
        rows += _torchs(question)
        if question.gaps:
            rows.append(("  gaps between torch's", bytes_shown(question.gaps), "assumed; the heap keeps freed memory"))
    if isinstance(trace, str):
        rows.append(("torch's activations", "not counted", trace))
    return rows


def _torchs(question: Question) -> list[Row]:
    trace = question.trace
    if isinstance(trace, str):
        return []
    how = "with activation checkpointing" if trace.recomputes else "without activation checkpointing"
    kinds = ", ".join(f"{kind} {bytes_shown(nbytes)}" for kind, nbytes in trace.held.items() if nbytes)
    rows = [("  torch", bytes_shown(trace.peak), f"a micro-batch of {trace.tokens:,} tokens, {how}: {kinds}")]
    more = question.torchs - trace.peak
    if more:
        checkpoints = "" if question.carries else "checkpoints of each from its forward to its backward, and "
        what = f"{checkpoints}gradients of parameters used twice"
        rows.append((f"  of {question.micro_batches - 1} more micro-batches", bytes_shown(more), what))
    return rows


def _room(question: Question, found: Answer) -> list[Row]:
    plan, scratch = found.plan, question.scratch(found.plan)
    notes = [f"{bytes_shown(scratch)} of it checkpointed activations"] if scratch else []
    if plan.log_steps:
        notes.append(f"{bytes_shown(plan.log_bytes)} of it a gradient log of {plan.log_steps} steps")
    if question.free is not None:
        notes.append(f"{bytes_shown(question.free)} are free")
    return [
        ("disk space", bytes_shown(plan.storage_bytes + scratch), "; ".join(notes)),
        ("written in a step", bytes_shown(found.written), f"{10**14 // max(1, found.written):,} steps write 100 TB"),
        ("read in a step", bytes_shown(found.read), ""),
    ]


def _moved(question: Question, found: Answer) -> list[Row]:
    """Returns the rows about the bytes that one of several ranks exchanges with the other ranks and with its device."""
    if found.network is None:
        return []
    nbytes = moved(question, found)
    note = f"received, and as much sent; this table is of one of {question.ranks} ranks"
    rows = [("over the network in a step", bytes_shown(nbytes["received_bytes"]), note)]
    if question.gpu is not None:
        link = f"to the device, {bytes_shown(nbytes['from_device_bytes'])} from it"
        rows.append(("over PCIe in a step", bytes_shown(nbytes["to_device_bytes"]), link))
    rows.append(("gathered by torch at once", bytes_shown(nbytes["gathered_bytes"]), "whole parameters and gradients"))
    return rows


def _time(question: Question, found: Answer) -> list[Row]:
    rows = [_disk(question, found), *_ram_tier(question, found)]
    if found.phases is None or found.seconds is None:
        return [*rows, ("a step", "not known", _unknown(question))]
    for phase in found.phases:
        parts = ", ".join(
            f"{part} {seconds_shown(value)}" for part, value in sorted(phase.parts.items(), key=lambda one: -one[1])
        )
        which = "the last gradient" if "backward" in phase.name else "the first unit"
        after = f"; {seconds_shown(phase.tail)} of it not overlapped, for {which}"
        rows.append((f"  {phase.name}", seconds_shown(phase.seconds), parts + (after if phase.tail else "")))
    rows.append(("a step", seconds_shown(found.seconds), f"mostly {found.bound}{_assumed(question)}"))
    if found.ways is not None and len(found.ways) > 1:
        rows += [
            (f"  {_WAYS[way][0]}", seconds_shown(seconds(steps)), _WAYS[way][1]) for way, steps in found.ways.items()
        ]
    more = "raised by more tokens in a step (--tokens, --accumulation-steps)" if found.bound == "disk" else ""
    return [*rows, ("tokens a second", f"{found.tokens_per_second:,.0f}", more)]


def _in_turn(question: Question, now: float) -> list[Row]:
    """Returns the row for the same micro-batches computed one after the other; no row if the seconds are not known."""
    other = answer(question.one_after_the_other())
    if other.seconds is None:
        return []
    what = f"{question.micro_batches} micro-batches one after the other"
    note = f"a step, mostly {other.bound}, instead of {seconds_shown(now)} by layer"
    return [(what, seconds_shown(other.seconds), note)]


def _ram_tier(question: Question, found: Answer) -> list[Row]:
    """Returns one row for each useful larger budget. If the plan has a RAM tier, adds a row for a step without it.

    Returns no row if the speed of the drive is not known.
    """
    plan, forecast = found.plan, forecast_of(question, found)
    if forecast is None:
        return []
    what = "a step" if found.phases is not None else "the disk's part"
    note = f"{what}, {bytes_shown(plan.without.total)}"
    rows = [("  with no parameter kept in RAM", seconds_shown(forecast.without), note)]
    for budget, took in forecast.larger.items():
        if took > _FASTER * forecast.now:
            continue
        instead = f"{what} instead of {seconds_shown(forecast.now)}, {bytes_shown(plan.larger[budget].total)}"
        rows.append((f"  host_memory={size_option(budget)}", seconds_shown(took), instead))
    return rows if plan.ram_tier else rows[1:]


def _disk(question: Question, found: Answer) -> Row:
    what = "the disk's part of a step"
    took = disk_seconds(question, found)
    if took is None:
        return what, "not measured", "measuring would overwrite the data on the device: give --drive READ,WRITE"
    note = "at the speeds of --drive"
    if question.drive_assumed:
        note = "assumed; --storage P measures the disk of P, --drive READ,WRITE gives its speed"
    elif question.speeds:
        note = "measured: " + ", ".join(f"{pattern} {speed:.2f} GB/s" for pattern, speed in question.speeds.items())
    return what, seconds_shown(took), note


def _unknown(question: Question) -> str:
    if isinstance(question.trace, str):
        return question.trace
    if question.gpu is None and not question.on_host:
        return "give --gpu G, or --device cpu for an estimate of this processor"
    return "give --drive READ,WRITE, or --storage P to measure it"


def _assumed(question: Question) -> str:
    gpu, name = question.gpu, question.subject.dtype
    if gpu is not None:
        slow = _NO_BF16 if name == "bfloat16" and not gpu.bf16 else ""
        return f"; assumed: the {gpu.name} reaches {REACHED:.0%} of its {gpu.tflops:g} TFLOPS{slow}"
    if question.processor is not None:
        speed = f"{question.processor / 1e9:,.0f} GFLOPS"
        slow = slowdown_in_words(name, question.slowdown)
        reached = f"assumed: it reaches {REACHED:.0%} of the {speed} measured in {name}{slow}"
        return f"; no GPU: this processor computes; {reached}"
    return "; compute is measured on this processor, with the share of its cores that offloading takes"


def _life(question: Question, found: Answer) -> Row:
    tb = found.endurance / 10**12
    wear = f"of training without a pause, until {tb:,.0f} TB are written"
    if question.endurance is None:
        wear += f" (assumed: {ENDURANCE_PER_TB} TB for each TB of a drive just large enough; --endurance gives another)"
    if found.days is not None:
        days = f"{found.days:,.0f} days" if found.days >= 10 else f"{found.days:.1f} days"
        years = f"{found.days / _YEAR_DAYS:.1f} years " if found.days > 2 * _YEAR_DAYS else ""
        return "the drive lasts", days, years + wear
    steps = found.endurance // max(1, found.written)
    return "the drive lasts", f"{steps:,} steps", wear


def fitting(found: Sequence[tuple[Question, Answer]]) -> str:
    """Formats the batches that fit (`--fit`). Each row is for one format of the state and one sequence length."""
    rows = [
        (
            "exact" if one.options.state is None else f'"{one.options.state}"',
            f"{one.sequences} x {one.length:,}",
            bytes_shown(its.device_bytes),
            bytes_shown(its.host_bytes),
            bytes_shown(its.plan.storage_bytes),
            "not known" if its.seconds is None else seconds_shown(its.seconds),
            its.bound or "",
            "" if its.tokens_per_second is None else f"{its.tokens_per_second:,.0f}",
            "; ".join(its.problems) or "fits",
        )
        for one, its in found
    ]
    figures = ("GPU memory", "host memory", "storage", "a step", "mostly", "tokens a second")
    return table(("state=", "batch x tokens", *figures, ""), rows)
