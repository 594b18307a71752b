"""Measures training steps that clip gradients by the norm of all gradients.

There are three tables. "habits" compares two options in loops that clip no step, each step, or every other step. With
`gradients="auto"`, memascend begins updates before the norm is known. With `gradients="ssd"`, memascend waits for the
norm. "memory" compares clipped steps of memascend with unclipped steps of memascend, and with clipped steps of torch in
memory. "first" compares the first steps of new processes with later steps.

Each case trains in a separate process. In "habits" and "memory", the processes take turns. The benchmark multiplies the
loss by a factor: a large factor puts the norm above the limit, so the step is clipped; a small factor puts the norm
below the limit.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.turns import Process, at_work, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Each function gets the number of a step, and returns True if the benchmark clips this step.
_HABITS: dict[str, Callable[[int], bool]] = {
    "never": lambda _: False,
    "always": lambda _: True,
    "every other": lambda step: step % 2 == 1,
}
# The two ways to clip gradients: the option `max_grad_norm` of `offload()`, or torch's function in the training loop.
_OPTION, _FUNCTION = "max_grad_norm", "clip_grad_norm_"
_IN_MEMORY, _UNCLIPPED = "torch in memory, clipped", "unclipped"
_BY_OPTION, _BY_FUNCTION = f"clipped by {_OPTION}", f"clipped by {_FUNCTION}"
_BESIDE: dict[str, dict[str, Any]] = {
    _IN_MEMORY: {"in_memory": True, "habit": "always", "clip": _FUNCTION},
    # The habit "always" makes the loss of this case as large as the loss of the other cases. But the case has no
    # "clip", so its gradients are not clipped.
    _UNCLIPPED: {"habit": "always"},
    _BY_OPTION: {"habit": "always", "clip": _OPTION},
}
# Factors of the loss. `_SMALL` puts the norm of the gradients far below its limit. `_LARGE` puts the norm far above its
# limit.
_SMALL, _LARGE = 1e-3, 1e3
# The number of steps in which `gradients="auto"` detects how the training loop clips.
_WARM_STEPS = 6
# The table "first" shows the first `_FIRST` steps. Step 1 may take any time. Each of the steps 2 to `_FIRST` may take
# at most `_MOST_OF_LATER` times as long as a later step.
_FIRST, _MOST_OF_LATER = 6, 1.15
_CONFIDENCE, _RESAMPLES = 0.95, 4000


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The cases, comparisons and default options of one table."""

    cases: Mapping[str, Mapping[str, Any]]
    compared: Sequence[tuple[str, str, float | None]]  # (case, case to compare it with, largest ratio)
    least_tokens: int = 0  # steps of fewer tokens have no targets
    defaults: Mapping[str, Any]


_TABLES = {
    "habits": _Table(
        cases={
            _UNCLIPPED: {"habit": "never"},
            **{
                f"{gradients}, {habit}": {"habit": habit, "clip": _OPTION, "gradients": gradients}
                for habit in _HABITS
                for gradients in ("auto", "ssd")
            },
        },
        compared=(
            ("auto, never", _UNCLIPPED, 1.15),
            ("auto, always", "ssd, always", 1.02),
            ("auto, every other", "ssd, every other", 1.0),
        ),
        defaults={"parameters": "125M", "batch": 1, "length": 128, "threads": 0, "rounds": 5, "steps": 4},
    ),
    "memory": _Table(
        cases={**_BESIDE, _BY_FUNCTION: {"habit": "always", "clip": _FUNCTION}},
        compared=(
            (_BY_OPTION, _IN_MEMORY, 1.10),
            (_BY_OPTION, _UNCLIPPED, 1.03),
            (_BY_FUNCTION, _IN_MEMORY, None),
            (_BY_FUNCTION, _UNCLIPPED, None),
            (_UNCLIPPED, _IN_MEMORY, None),
        ),
        # With fewer tokens, the computation of a step is too short to hide the update.
        least_tokens=2048,
        defaults={"parameters": "500M", "batch": 4, "length": 512, "threads": 1, "rounds": 12, "steps": 2},
    ),
    "first": _Table(
        cases=_BESIDE,
        compared=((_BY_OPTION, _IN_MEMORY, None), (_BY_OPTION, _UNCLIPPED, None)),
        defaults={"parameters": "125M", "batch": 4, "length": 512, "threads": 1, "rounds": 5, "steps": 6},
    ),
}


def main() -> None:
    """Measures all cases of a table and prints the table. With `--work`, trains one case in this process."""
    options = _options()
    if options.work:
        serve(_Worker(json.loads(options.work)).turn)
        return
    from benchmarks.machine import described

    settings = {name: getattr(options, name) for name in ("table", "parameters", "batch", "length", "threads")}
    before = _before(options.baseline, settings) if options.baseline else None
    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-clipped-") as folder:
        works = {
            name: {**settings, **case, "storage": f"{folder}/{name}.store"}
            for name, case in _TABLES[options.table].cases.items()
        }
        measure = _first_steps if options.table == "first" else _by_turns
        cases = {name: _summary(name, turns) for name, turns in measure(works, options).items()}
    found = {"machine": described(), "settings": settings, "cases": cases}
    text = _shown(settings, cases)
    if before is not None:
        text += f"\n\n{_compare_with_before(before, cases)}"
    print(text)
    if options.write:
        _write(options.write, found, text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=_TABLES, default="habits")
    parser.add_argument("--parameters", choices=("4M", "25M", "125M", "500M"))
    parser.add_argument("--batch", type=int, help="sequences in a step")
    parser.add_argument("--length", type=int, help="tokens in a sequence")
    parser.add_argument("--threads", type=int, help="number of torch's threads (0: torch's default)")
    parser.add_argument("--rounds", type=int, help='turns of each process; for "first", processes of each case')
    parser.add_argument("--steps", type=int, help=f'steps in a turn; for "first", steps after the first {_FIRST}')
    parser.add_argument(
        "--uncounted",
        type=int,
        default=1,
        help="unmeasured steps at the start of a turn, while the disk may still write for another case",
    )
    parser.add_argument(
        "--warm", type=int, default=_WARM_STEPS, help='warm-up steps of each process, except for "first"'
    )
    parser.add_argument("--storage", default=".", help="a folder on the disk to measure")
    parser.add_argument("--write", metavar="FOLDER", type=Path, help="also write clipped_TABLE.txt and .json there")
    parser.add_argument("--baseline", metavar="FILE", type=Path, help="a .json of an earlier run, to compare with")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, value in _TABLES[options.table].defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _before(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the cases of an earlier run. Raises SystemExit if that run had other settings."""
    found = json.loads(path.read_text())
    if found.get("settings") != settings:
        raise SystemExit(
            f"{path} was measured with {found.get('settings')}, but this run uses {settings}: use the same options"
        )
    cases: dict[str, Any] = found["cases"]
    return cases


def _write(folder: Path, found: Mapping[str, Any], text: str) -> None:
    settings = found["settings"]
    # The files of the table "habits" have no suffix, because "habits" was the first table.
    name = "clipped" if settings["table"] == "habits" else f"clipped_{settings['table']}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    about = "\n".join(f"{name}: {value}" for name, value in found["machine"].items())
    (folder / f"{name}.txt").write_text(f"{about}\n{text}\n")


# --- measuring -------------------------------------------------------------------------------


def _by_turns(works: Mapping[str, dict[str, Any]], options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Keeps one process for each case. In each round, each process takes one turn.

    The order of processes is reversed in every second round.
    """
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in works}
    # Training in memory does not detect habits of the loop, so one warm-up step is enough.
    warm = {name: {**work, "warm": 1 if work.get("in_memory") else options.warm} for name, work in works.items()}
    with at_work("clipped", warm, steps=1) as processes:
        for number in range(options.rounds):
            for name in list(works)[:: -1 if number % 2 else 1]:
                turns[name].append(processes[name].ask(steps=options.steps, uncounted=options.uncounted))
                _log(number, name, turns[name][-1])
    return turns


def _first_steps(works: Mapping[str, dict[str, Any]], options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Starts a new process for each case in each round; runs one process at a time."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in works}
    for number in range(options.rounds):
        for name, work in works.items():
            process = Process("clipped", {**work, "warm": 0})
            try:
                answer = process.ask(steps=_FIRST + options.steps, uncounted=0)
            finally:
                process.end()
            Path(work["storage"]).unlink(missing_ok=True)
            _log(number, name, answer)
            seconds = answer["seconds"]
            turns[name].append({**answer, "first": seconds[:_FIRST], "seconds": seconds[_FIRST:]})
    return turns


def _log(number: int, name: str, turn: Mapping[str, Any]) -> None:
    seconds = " ".join(f"{one:.2f}" for one in turn["seconds"])
    print(f"round {number + 1}, {name}: {seconds} s", file=sys.stderr, flush=True)


def _summary(name: str, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarizes all turns of a case. "rounds" has one value for each turn: the seconds of a typical step."""
    taken = [one for turn in turns for one in turn["seconds"]]
    # If a case clips every other step, clipped and unclipped steps take different times. The median would be the time
    # of only one kind of step, so this case uses the mean.
    middle = statistics.fmean if "other" in name else statistics.median
    return {
        "seconds": middle(taken),
        "spread": [min(taken), max(taken)],
        "rounds": [middle(turn["seconds"]) for turn in turns],
        "first": [turn["first"] for turn in turns if "first" in turn],
        **{part: statistics.median(turn[part] for turn in turns) for part in ("processor", "read", "written")},
        **{part: max(turn[part] for turn in turns) for part in ("peak", "added", "owners_peak", "budget")},
        **{part: turns[-1][part] for part in ("early", "anew")},
    }


# --- intervals, verdicts and tables ----------------------------------------------------------


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns a confidence interval of the median, from order statistics: its low end, its high end, its confidence.

    The interval is the narrowest one with a confidence of at least 95 %. Fewer than 6 values cannot reach 95 %. For
    them, the interval goes from the smallest value to the largest value.
    """
    ordered, count = sorted(values), len(values)

    def confidence(left_out: int) -> float:
        return 1 - sum(math.comb(count, below) for below in range(left_out + 1)) / 2.0 ** (count - 1)

    left_out = max((out for out in range((count + 1) // 2) if confidence(out) >= _CONFIDENCE), default=0)
    return ordered[left_out], ordered[-1 - left_out], confidence(left_out)


def ratio_interval(new: Sequence[float], old: Sequence[float]) -> tuple[float, float, float]:
    """Returns the ratio of the medians of two runs, and the 95 % interval of this ratio: ratio, low end, high end.

    The interval comes from a bootstrap, which samples the rounds of each run separately. The rounds of two runs cannot
    be compared in pairs, because the runs did not take turns.
    """
    chance = random.Random(0)  # noqa: S311 - no secret
    ratios = sorted(
        statistics.median(chance.choices(new, k=len(new))) / statistics.median(chance.choices(old, k=len(old)))
        for _ in range(_RESAMPLES)
    )
    out = int(_RESAMPLES * (1 - _CONFIDENCE) / 2)
    return statistics.median(new) / statistics.median(old), ratios[out], ratios[-1 - out]


def _shown(settings: Mapping[str, Any], cases: Mapping[str, Any]) -> str:
    from memascend.text import table

    kind = _TABLES[settings["table"]]
    beside = next(iter(cases))
    rows = [
        (
            name,
            f"{case['seconds']:.3f}",
            f"{case['spread'][0]:.3f}..{case['spread'][1]:.3f}",
            f"{case['processor']:.3f}",
            f"{case['seconds'] / cases[beside]['seconds']:.3f}",
            f"{case['read']:.1f} + {case['written']:.1f} = {case['read'] + case['written']:.1f}",
            f"{case['peak'] / 1e6:.0f} ({case['added'] / 1e6:.0f})",
            f"{case['owners_peak'] / 1e6:.0f} of {case['budget'] / 1e6:.0f}" if case["budget"] else "",
            str(case["early"]),
            str(case["anew"]),
        )
        for name, case in cases.items()
    ]
    columns = (
        "gradients, clipped" if settings["table"] == "habits" else "case",
        "s/step",
        "spread",
        "processor s",
        f"of {beside}",
        "B/param read + written",
        "MB (added)",
        "owners' MB of budget",
        "steps begun early",
        "anew",
    )
    threads = f"torch's threads: {settings['threads'] or 'its own number'}"
    about = f"{settings['parameters']} parameters, {settings['batch']} x {settings['length']} tokens, {threads}"
    lines = [about, "", table(columns, rows), ""]
    if settings["table"] == "first":
        lines += _of_later(cases)
    has_targets = settings["batch"] * settings["length"] >= kind.least_tokens
    for name, other, most in kind.compared:
        ratios = [one / by for one, by in zip(cases[name]["rounds"], cases[other]["rounds"], strict=True)]
        lines.append(f"{name}, of {other}: {_judged(ratios, most if has_targets else None)}")
    return "\n".join(lines)


def _judged(ratios: Sequence[float], most: float | None) -> str:
    """Returns a text with the median of `ratios` and its interval.

    If `most` is given, the text also says whether the median is at most `most`.
    """
    ratio = statistics.median(ratios)
    low, high, confidence = median_interval(ratios)
    verdict = "" if most is None else f"at most {most}: {'met' if ratio <= most else 'MISSED'}; "
    return (
        f"{ratio:.3f} ({verdict}{low:.3f}..{high:.3f} with {confidence:.0%}, order statistics of {len(ratios)} rounds)"
    )


def _of_later(cases: Mapping[str, Any]) -> list[str]:
    """Returns a table of the first steps, and verdicts.

    The table has the median seconds of each first step, and the ratio of these seconds to the seconds of later steps in
    the same process.
    """
    from memascend.text import table

    rows, verdicts = [], []
    for name, case in cases.items():
        steps = list(zip(*case["first"], strict=True))
        ratios = [[one / later for one, later in zip(step, case["rounds"], strict=True)] for step in steps]
        cells = (
            f"{statistics.median(step):.2f} ({statistics.median(ratio):.2f})"
            for step, ratio in zip(steps, ratios, strict=True)
        )
        rows.append((name, *cells, f"{case['seconds']:.2f}"))
        slowest = max(range(1, _FIRST), key=[statistics.median(ratio) for ratio in ratios].__getitem__)
        most = None if name == _IN_MEMORY else _MOST_OF_LATER
        verdicts.append(f"{name}, step {slowest + 1}, of later steps: {_judged(ratios[slowest], most)}")
    columns = ("seconds (of later)", *(f"step {step + 1}" for step in range(_FIRST)), "later")
    return [table(columns, rows), "", *verdicts]


def _compare_with_before(before: Mapping[str, Any], cases: Mapping[str, Any]) -> str:
    """Returns a table that compares `cases` with the cases of an earlier run, `before`.

    The table has two ratios for each case. The first ratio is the case's seconds in this run, divided by its seconds in
    the earlier run. The second ratio uses relative seconds: in each run, the case's seconds are divided by the seconds
    of the first case.
    """
    from memascend.text import table

    def parts(of: Mapping[str, Any], name: str) -> list[float]:
        return [one / by for one, by in zip(of[name]["rounds"], of[beside]["rounds"], strict=True)]

    beside, rows = next(iter(cases)), []
    for name, case in cases.items():
        pairs = ((case["rounds"], before[name]["rounds"]), (parts(cases, name), parts(before, name)))
        shown = ("{:.3f} ({:.3f}..{:.3f})".format(*ratio_interval(new, old)) for new, old in pairs)
        rows.append((name, *shown))
    return table((f"new / old ({_CONFIDENCE:.0%}, bootstrap)", "seconds", f"of {beside}"), rows)


# --- a case, in its own process --------------------------------------------------------------


class _Worker:
    """Trains one case. Makes steps when the main process asks for steps."""

    def __init__(self, work: dict[str, Any]) -> None:
        import torch
        import transformers

        import memascend
        from benchmarks.train.cell.systems.in_ram import InRam
        from benchmarks.train.cell.workload import WORKLOADS, made
        from memascend.cli import process

        transformers.Qwen2ForCausalLM  # noqa: B018 - loads the modules that a user needs, before the baseline is read
        memascend.offload  # noqa: B018
        self.baseline = process.resident()
        if work["threads"]:
            torch.set_num_threads(work["threads"])
        workload = replace(WORKLOADS[f"{work['parameters']}-1x128"], batch=work["batch"], length=work["length"])
        self.parameters = workload.parameters
        self.is_large, self.clip = _HABITS[work["habit"]], work.get("clip")
        self.every_other = work["habit"] == "every other"
        self.model = made(workload)
        self.memory: InRam | None = None
        if work.get("in_memory"):
            self.memory = InRam(self.model, clip=1.0)
        else:
            self._offload(work)
        self.tokens = torch.randint(0, workload.vocabulary, (workload.batch, workload.length))
        self.done = 0
        for _ in range(work["warm"]):
            self._step()

    def _offload(self, work: dict[str, Any]) -> None:
        import torch

        import memascend

        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.model, self.optimizer = memascend.offload(
            self.model,
            optimizer,
            storage=work["storage"],
            device="cpu",
            gradients=work.get("gradients", "auto"),
            max_grad_norm=1.0 if self.clip == _OPTION else None,
        )

    def turn(self, steps: int, uncounted: int = 1) -> dict[str, Any]:
        """Makes `uncounted` unmeasured steps, then `steps` measured steps.

        Returns the seconds, bytes and memory peaks of the measured steps, and figures of `report()`.
        """
        from benchmarks import counters
        from memascend.cli import process

        for _ in range(uncounted):
            self._step()
        if self.every_other and steps % 2 == 1:
            # Makes the number of steps even, so that the turn has as many clipped steps as unclipped steps.
            steps += 1
        process.restart_peak()
        before, seconds = counters.counts(), []
        for _ in range(steps):
            began = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - began)
        moved = counters.counts().since(before)
        report = None if self.memory is not None else self.optimizer.report()
        return {
            "seconds": seconds,
            "processor": moved["processor"] / steps,
            "read": moved["read"] / steps / self.parameters,
            "written": moved["written"] / steps / self.parameters,
            "peak": process.resident_peak(),
            "added": process.resident_peak() - self.baseline,
            "owners_peak": report.peak if report else 0,
            "budget": report.budget if report else 0,
            "early": report.early if report else 0,
            "anew": report.anew if report else 0,
        }

    def _step(self) -> None:
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        large = self.is_large(self.done)
        (loss * (_LARGE if large else _SMALL)).backward()
        norm = self._update()
        if norm is not None and (norm > 1.0) != large:
            raise SystemExit(f"the norm {norm} should be {'above' if large else 'at most'} 1: change _SMALL or _LARGE")
        self.done += 1

    def _update(self) -> float | None:
        """Clips the gradients if the case clips, updates the parameters and drops the gradients.

        Returns the norm of the gradients; None if the case does not clip.
        """
        import torch

        if self.memory is not None:
            self.memory.update()
            return self.memory.grad_norm
        norm: Any = None
        if self.clip == _FUNCTION:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.clip == _OPTION:
            norm = self.optimizer.grad_norm
        self.optimizer.zero_grad()
        return None if norm is None else float(norm)


if __name__ == "__main__":
    main()
