"""Tests the loops with schedulers that docs/resume.md shows: killed by -9 at random moments, in fresh processes.

Learning rates, weights and optimizer state are those of a run that is never killed.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.bits import same_states
from support.loaded import NO_NUMPY

import memascend

PAGE = Path(__file__).resolve().parents[2] / "docs" / "resume.md"
SCHEDULED, BY_METRIC = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
GIVEN = "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)"
OTHERS = {
    "lambda": "LambdaLR(optimizer, lambda step: 1 / (step + 1))",
    "multiplicative": "MultiplicativeLR(optimizer, lambda step: 0.9)",
    "step": "StepLR(optimizer, 2, 0.5)",
    "milestones": "MultiStepLR(optimizer, [3, 5, 5], 0.5)",
    "constant": "ConstantLR(optimizer, 0.5, 3)",
    "linear": "LinearLR(optimizer, 0.5, total_iters=8)",
    "exponential": "ExponentialLR(optimizer, 0.9)",
    "polynomial": "PolynomialLR(optimizer, 12, 2.0)",
    "restarts": "CosineAnnealingWarmRestarts(optimizer, 2, 2)",
    "cyclic": "CyclicLR(optimizer, 1e-4, 1e-3, 3, mode='exp_range', gamma=0.9)",
    "one-cycle": "OneCycleLR(optimizer, 1e-2, total_steps=12)",
    "chained": "ChainedScheduler([{0}LinearLR(optimizer, 0.1), {0}ExponentialLR(optimizer, 0.9)])",
    "sequential": "SequentialLR(optimizer, [{0}LinearLR(optimizer, 0.1), {0}CosineAnnealingLR(optimizer, 7)], [5])",
}
MODULE = "torch.optim.lr_scheduler."
LOOPS = {
    "sequential": SCHEDULED.replace(GIVEN, MODULE + OTHERS.pop("sequential").format(MODULE)),
    "cosine": SCHEDULED,
    "by-metric": BY_METRIC,
    **{name: SCHEDULED.replace(GIVEN, MODULE + made.format(MODULE)) for name, made in OTHERS.items()},
}
STEPS = 12

# Runs the loops that have not ended, each in a folder of its own.
PROGRAM = """
import json, os, pathlib, sys
import torch
loops = json.loads(sys.argv[1])
print("begun", flush=True)
for name, loop in loops.items():
    folder = pathlib.Path(sys.argv[2], name)
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    if pathlib.Path("ended").exists():
        continue
    print(name, flush=True)
    torch.manual_seed(0)
    exec(loop, {})
    pathlib.Path("ended").touch()
"""


def life(loops, folder, lines_until, seconds):
    """Runs the program until it printed so many lines, and so many seconds longer; whether it was killed by then."""
    with (folder / "errors").open("w+") as errors:
        command = [sys.executable, "-W", "error", "-W", NO_NUMPY, "-W", "ignore:the stored options stand"]
        command += ["-c", PROGRAM, json.dumps(loops), str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            printed = []
            for line in process.stdout:
                printed.append(line.strip())
                if len(printed) == lines_until:
                    time.sleep(seconds)
                    process.kill()
        errors.seek(0)
        assert process.returncode in (0, -9), errors.read()
    return printed[1:], process.returncode == -9


def by_step(printed):
    """The lines about steps, by loop and step."""
    found, name = {}, ""
    for line in printed:
        if line in LOOPS:
            name = line
        else:
            found[name, line.split()[0]] = line
    return found


def committed(folder):
    """What the stores of a folder hold."""
    values, options = {}, {}
    for path in sorted(folder.glob("*/*.store")):
        with memascend.engine.Store.open(path) as store:
            assert store.step == STEPS
            options[path.parent.name] = store.hyperparameters, store.user_state
            for record in store.each_record():
                value, state = store.read(record["name"])
                own = {"": value, **state}
                values |= {f"{path.parent.name} {record['name']} {of}": tensor for of, tensor in own.items()}
    return options, values


@pytest.fixture
def undisturbed(tmp_path, monkeypatch):
    """Runs loops in this process, to their ends; returns their lines, and what their stores hold."""

    def run(loops):
        import torch

        printed = io.StringIO()
        for name, loop in loops.items():
            (tmp_path / "whole" / name).mkdir(parents=True)
            monkeypatch.chdir(tmp_path / "whole" / name)
            torch.manual_seed(0)
            print(name, file=printed)
            with contextlib.redirect_stdout(printed):
                exec(loop, {})  # noqa: S102 - it is ours
        return by_step(printed.getvalue().splitlines()), committed(tmp_path / "whole")

    return run


@pytest.mark.parametrize(
    ("kills", "loops", "lines_most", "seed"),
    [
        pytest.param(2, 3, 24, 0, id="some"),
        pytest.param(50, len(LOOPS), 6, 1, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_killed_loops_have_rates_and_weights_of_one_that_was_not(tmp_path, undisturbed, kills, loops, lines_most, seed):
    loops = dict(list(LOOPS.items())[:loops])
    lines, stores = undisturbed(loops)
    assert len(lines) == STEPS * len(loops)
    chosen = random.Random(seed)
    made, rounds = 0, 0
    while made < kills:
        # All loops again, where they ended before so many kills.
        rounds += 1
        folder = tmp_path / f"killed-{rounds}"
        folder.mkdir()
        killed, printed = True, []
        while killed:
            until = chosen.randint(1, lines_most) if made < kills else None
            more, killed = life(loops, folder, until, chosen.uniform(0, 0.05))
            made += killed
            printed += more
        said = by_step(printed)
        assert said == {step: lines[step] for step in said}
        options, values = committed(folder)
        assert options == stores[0]
        assert same_states(values, stores[1])
    assert made == kills
