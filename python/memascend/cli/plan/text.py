"""Prints and draws what a plan answers: the lines to write, memory, seconds and what bounds them, wear."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memascend.cli.plan.answer import (
    ENDURANCE_PER_TB,
    IMPORTS,
    REACHED,
    answer,
    disk_seconds,
    forecast_of,
    moved,
    step_seconds,
)
from memascend.plan.table import cost_of_format, format_table
from memascend.session.decide import planned_formats
from memascend.text import IN_MEMORY, OURS, bytes_shown, open_pyplot, seconds_shown, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from memascend.cli.plan.answer import Answer, Candidate, Question, Takeover
    from memascend.plan.table import FormatCost


def formats_compared(question: Question, budget: int) -> list[FormatCost]:
    """What a step costs in each format that goes with the optimizer, with one budget."""
    elements = {name: parameter.numel() for name, parameter in question.model.named_parameters()}
    found = planned_formats(question.model, question.optimizer, question.options, budget, question.ranks)
    return [
        cost_of_format(state, one.plan, elements, disk_seconds(asked, one.plan), step_seconds(asked, one.plan))
        for state, one in found.items()
        for asked in [replace(question, options=replace(question.options, state=state))]
    ]


def next_format(costs: list[FormatCost], now: str | None) -> FormatCost | None:
    """The one with the next fewer bits than what the optimizer has, or was asked to have; None after the last."""
    names = [cost.state for cost in costs]
    at = names.index(now or "fp32") + 1 if (now or "fp32") in names else len(names)
    return costs[at] if at < len(costs) else None


def formats_shown(costs: list[FormatCost], budget: int) -> str:
    """A table, where there is something to compare."""
    if len(costs) < 2:
        return ""
    return (
        "\n\nState formats that move fewer bytes, and change the numerics (docs/state-formats.md):\n\n"
        + format_table(costs, budget)
    )


Row = tuple[str, str, str]
_YEAR_DAYS = 365
# A larger budget is shown where a step then takes at most this part of its time.
_FASTER = 0.99


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What else could be given, and what it would buy; None where it would change nothing."""

    more: Answer | None  # the answer with 16 GiB more of host memory
    fewer: FormatCost | None  # state in the format of the next fewer bits
    takeover: Takeover | None = None  # the tokens from which on compute takes longest


def shown(head: str, question: Question, found: Answer, choices: Choices, speeds: Mapping[str, float]) -> str:
    """All of an answer.

    Args:
        head: the model, with a place for the number of its parameters.
        question: what was asked.
        found: the answer.
        choices: what else could be given.
        speeds: of storage as measured, GB/s by pattern.
    """
    every = list(question.model.parameters())
    count, trained = (sum(one.numel() for one in some) for some in (every, [p for p in every if p.requires_grad]))
    of_them = "" if trained == count else f" ({trained:,} trained)"
    parts = [head.format(parameters=f"{count:,} parameters{of_them}")]
    parts.append("It does not fit: " + "; ".join(found.problems) if found.problems else _lines(question))
    rows = [
        _life(question, found),
        *_memory(question, found),
        *_room(question, found),
        *_moved(question, found),
        *_time(question, found, choices, speeds),
    ]
    parts.append(table(("what", "how much", "note"), rows))
    parts.append(str(found.plan))
    return "\n\n".join(parts)


def _lines(question: Question) -> str:
    """What to write, in a loop of one's own."""
    options = question.options
    given = [f'storage="{options.paths[0] if options.paths else "/mnt/nvme/run"}"']
    # What nobody gave is left to offload(), which takes the same.
    for name in ("host_memory", "device_memory", "max_grad_norm", "state"):
        value = getattr(options, name)
        if value is not None:
            given.append(f"{name}={value!r}")
    if question.micro_batches > 1 and not question.by_layer:
        given.append(f"accumulation_steps={options.accumulation_steps}")
    lines = ["The lines to write:"]
    if not isinstance(question.trace, str) and question.trace.recomputes:
        # Its name from transformers 5.23 on.
        later = hasattr(question.model, "activation_checkpointing_enable")
        lines.append(f"  model.{'activation' if later else 'gradient'}_checkpointing_enable()")
    lines.append(f"  model, optimizer = memascend.offload(model, optimizer, {', '.join(given)})")
    if question.by_layer:
        lines.append(f"  optimizer.accumulate(loss_of, batches, scale=1 / {question.micro_batches})  # in each step")
    return "\n".join(lines)


def _memory(question: Question, found: Answer) -> list[Row]:
    plan, trace, gpu = found.plan, question.trace, question.gpu
    rows: list[Row] = []
    if gpu is not None:
        rows.append(("GPU memory", bytes_shown(found.device_bytes), f"of {bytes_shown(gpu.usable)} for tensors"))
        rows.append(
            ("  memascend", bytes_shown(plan.device_peak), "parameters in use, gradients on their way to the host")
        )
        rows += _torchs(question)
    rows.append(("host memory, the whole process", bytes_shown(found.host_bytes), _fewer(found)))
    rows.append(("  memascend", bytes_shown(plan.host_peak), f"within the budget of {bytes_shown(plan.budget)}"))
    rows.append(("  Python, torch and objects", bytes_shown(IMPORTS + plan.object_bytes), "assumed"))
    if gpu is None:
        rows += _torchs(question)
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
    if question.by_layer:
        more = bytes_shown(question.torchs - trace.peak)
        what = "checkpoints of each from its forward to its backward, and gradients of parameters used twice"
        rows.append((f"  of {question.micro_batches - 1} more micro-batches", more, what))
    return rows


def _fewer(found: Answer) -> str:
    return (
        f"in memory, training takes {bytes_shown(found.in_memory)} and activations: "
        f"{found.in_memory / found.plan.host_peak:.3g} times memascend's part"
    )


def _room(question: Question, found: Answer) -> list[Row]:
    plan = found.plan
    written = sum(plan.written_bytes.values())
    notes = []
    if plan.log_steps:
        notes.append(f"{bytes_shown(plan.log_bytes)} of it a gradient log of {plan.log_steps} steps")
    if question.free is not None:
        notes.append(f"{bytes_shown(question.free)} are free")
    return [
        ("disk space", bytes_shown(plan.storage_bytes), "; ".join(notes)),
        ("written in a step", bytes_shown(written), f"{10**14 // max(1, written):,} steps write 100 TB"),
        ("read in a step", bytes_shown(sum(plan.read_bytes.values())), ""),
    ]


def _moved(question: Question, found: Answer) -> list[Row]:
    """What one of several ranks exchanges with the others, and with its device."""
    if found.network is None:
        return []
    nbytes = moved(question, found)
    rows = [
        (
            "over the network in a step",
            bytes_shown(nbytes["received_bytes"]),
            f"received, and as much sent; this table is of one of {question.ranks} ranks",
        )
    ]
    if question.gpu is not None:
        link = f"to the device, {bytes_shown(nbytes['from_device_bytes'])} from it"
        rows.append(("over PCIe in a step", bytes_shown(nbytes["to_device_bytes"]), link))
    rows.append(("gathered by torch at once", bytes_shown(nbytes["gathered_bytes"]), "whole parameters and gradients"))
    return rows


def _time(question: Question, found: Answer, choices: Choices, speeds: Mapping[str, float]) -> list[Row]:
    rows = [_disk(question, found, speeds), *_held(question, found)]
    if found.phases is None or found.seconds is None:
        why = _unknown(question)
        return [*rows, ("a step", "not known", why)]
    for phase in found.phases:
        parts = ", ".join(
            f"{part} {seconds_shown(value)}" for part, value in sorted(phase.parts.items(), key=lambda one: -one[1])
        )
        after = f"; {seconds_shown(phase.tail)} of it not overlapped, for the last gradient"
        rows.append((f"  {phase.name}", seconds_shown(phase.seconds), parts + (after if phase.tail else "")))
    rows.append(("a step", seconds_shown(found.seconds), f"mostly {found.bound}{_assumed(question)}"))
    trace = question.trace
    if not isinstance(trace, str):
        tokens = trace.tokens * question.micro_batches * question.ranks
        rows.append(("tokens a second", f"{tokens / found.seconds:,.0f}", _wider(found)))
    rows += _in_turn(question, found.seconds)
    rows += _taken_over(choices.takeover)
    return [*rows, *_bought(found.seconds, choices)]


def _in_turn(question: Question, now: float) -> list[Row]:
    """What the same micro-batches take in a loop of backwards."""
    if not question.by_layer:
        return []
    other = answer(question.one_after_the_other())
    if other.seconds is None:
        return []
    what = f"{question.micro_batches} micro-batches one after the other"
    note = f"a step, mostly {other.bound}, instead of {seconds_shown(now)} by layer (accumulate())"
    return [(what, seconds_shown(other.seconds), note)]


def _bought(now: float, choices: Choices) -> list[Row]:
    """What else could be given, with the seconds of a step."""
    rows: list[Row] = []
    more, fewer = choices.more, choices.fewer
    if more is not None and more.seconds is not None:
        gained = 1 - more.seconds / now
        rows.append(("16 GiB more of host memory", seconds_shown(more.seconds), f"a step, {max(gained, 0):.0%} less"))
    if fewer is not None and fewer.step_seconds is not None:
        gained = 1 - fewer.step_seconds / now
        note = f"a step, {gained:.0%} less, with other numerics (below)"
        rows.append((f'state="{fewer.state}"', seconds_shown(fewer.step_seconds), note))
    return rows


def _held(question: Question, found: Answer) -> list[Row]:
    """What the budget saves, and what larger ones would."""
    plan, seconds = found.plan, forecast_of(question, found.plan, found.network)
    if seconds is None:
        return []
    what = "a step" if found.phases is not None else "the disk's part"
    rows = [
        (
            "  with no parameter kept in RAM",
            seconds_shown(seconds.without),
            f"{what}, {bytes_shown(plan.without.total)}",
        )
    ]
    for budget, took in seconds.larger.items():
        if took > _FASTER * seconds.now:
            continue
        instead = f"{what} instead of {seconds_shown(seconds.now)}, {bytes_shown(plan.larger[budget].total)}"
        rows.append((f"  host_memory={budget} ({bytes_shown(budget)})", seconds_shown(took), instead))
    return rows if plan.held else rows[1:]


def _disk(question: Question, found: Answer, speeds: Mapping[str, float]) -> Row:
    """How long the disk takes, and what that rests on."""
    what = "the disk's part of a step"
    took = disk_seconds(question, found.plan)
    if took is None:
        if question.options.paths:
            return what, "not measured", "writing would overwrite what is on the device: give --drive READ,WRITE"
        return what, "not measured", "--storage P measures the disk of P, --drive READ,WRITE gives its speed"
    if speeds:
        shown_speeds = ", ".join(f"{pattern} {speed:.2f} GB/s" for pattern, speed in speeds.items())
        return what, seconds_shown(took), f"measured: {shown_speeds}"
    return what, seconds_shown(took), "at the speeds of --drive"


def _unknown(question: Question) -> str:
    if isinstance(question.trace, str):
        return question.trace
    if question.gpu is None and question.measured is None:
        return "give --gpu G"
    return "give --drive READ,WRITE, or --storage P to measure it"


def _assumed(question: Question) -> str:
    if question.gpu is None:
        return "; compute is measured on this processor, with the share of its cores that offloading takes"
    return f"; assumed: the {question.gpu.name} reaches {REACHED:.0%} of its {question.gpu.tflops:g} TFLOPS"


def _wider(found: Answer) -> str:
    return "raised by more tokens in a step (--tokens, --accumulation-steps)" if found.bound == "disk" else ""


def _taken_over(at: Takeover | None) -> list[Row]:
    """From how many tokens on a faster drive would buy nothing."""
    if at is None:
        return []
    note = f"{at.tokens_per_second:,.0f} tokens a second there"
    if at.problem:
        note += f", but {at.problem}"
    return [("compute takes over at", f"{at.tokens:,} tokens a step", note)]


def _life(question: Question, found: Answer) -> Row:
    """How long the drive lasts: what is found out too late if it does not come first."""
    wear = _wear(question, found)
    if found.days is not None:
        shown = f"{found.days:,.0f} days" if found.days >= 10 else f"{found.days:.1f} days"
        years = f"{found.days / _YEAR_DAYS:.1f} years " if found.days > 2 * _YEAR_DAYS else ""
        return "the drive lasts", shown, years + wear
    steps = found.endurance // max(1, sum(found.plan.written_bytes.values()))
    return "the drive lasts", f"{steps:,} steps", wear


def _wear(question: Question, found: Answer) -> str:
    tb = found.endurance / 10**12
    if question.endurance is not None:
        return f"of training without a pause, until {tb:,.0f} TB are written"
    return (
        f"of training without a pause, until {tb:,.0f} TB are written (assumed: {ENDURANCE_PER_TB} TB for each TB of a "
        "drive just large enough; --endurance gives another)"
    )


def fitting(found: Sequence[Candidate]) -> str:
    """The batches that fit, one row for a format of the state and a length."""
    rows = [
        (
            "exact" if one.state is None else f'"{one.state}"',
            f"{one.batch} x {one.length:,}",
            bytes_shown(one.answer.device_bytes),
            bytes_shown(one.answer.host_bytes),
            bytes_shown(one.answer.plan.storage_bytes),
            "not known" if one.answer.seconds is None else seconds_shown(one.answer.seconds),
            one.answer.bound or "",
            "" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}",
            "fits" if one.fits else "; ".join(one.answer.problems),
        )
        for one in found
    ]
    head = (
        "state=",
        "batch x tokens",
        "GPU memory",
        "host memory",
        "storage",
        "a step",
        "mostly",
        "tokens a second",
        "",
    )
    return table(head, rows)


_GIB = 1 << 30


def draw(path: Path, found: Answer) -> None:
    """Draw it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = open_pyplot()
    plan = found.plan
    figure, axes = plt.subplots(1, 3, figsize=(14, 5), layout="constrained")
    beside, owners, moved = axes
    beside.bar(["in memory", "memascend"], [found.in_memory / _GIB, plan.host_peak / _GIB], color=[IN_MEMORY, OURS])
    beside.set_title("Host memory, but for activations")
    _stacked(owners, "of host memory", {name: nbytes for name, nbytes in plan.host.items() if nbytes})
    owners.axhline(plan.budget / _GIB, color=IN_MEMORY, linestyle=":", label="budget")
    owners.set_title("memascend, by owner")
    for direction, kinds in (("read", plan.read_bytes), ("written", plan.written_bytes)):
        _stacked(moved, direction, {f"{direction}: {kind}": nbytes for kind, nbytes in kinds.items()})
    moved.set_title("What a step moves")
    for axis in axes:
        axis.set_ylabel("GiB")
        axis.grid(axis="y", alpha=0.3)
    for axis in (owners, moved):
        axis.margins(x=0.3)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)


def _stacked(axis: Any, where: str, parts: Mapping[str, int]) -> None:
    bottom = 0.0
    for name, nbytes in parts.items():
        axis.bar([where], [nbytes / _GIB], 0.6, bottom=bottom, label=name)
        bottom += nbytes / _GIB
