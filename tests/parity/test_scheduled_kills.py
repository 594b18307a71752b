"""Tests the loops with schedulers that docs/resume.md shows: killed by -9 at random moments, in fresh processes.

Learning rates, weights and optimizer state are those of a run that is never killed.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from support.bits import same_states
from support.loaded import NO_NUMPY

import memascend

PAGE = Path(__file__).resolve().parents[2] / "docs" / "resume.md"
SCHEDULED, BY_METRIC = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
LOOPS = {"cosine": SCHEDULED, "by-metric": BY_METRIC}
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


def life(folder, lines_until, seconds):
    """Runs the program until it printed so many lines, and so many seconds longer; whether it was killed by then."""
    folder.mkdir(exist_ok=True)
    with (folder / "errors").open("w+") as errors:
        command = [sys.executable, "-W", "error", "-W", NO_NUMPY, "-W", "ignore:the stored options stand"]
        command += ["-c", PROGRAM, json.dumps(LOOPS), str(folder)]
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


def test_killed_loops_have_rates_and_weights_of_one_that_was_not(tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    lines = by_step(life(whole, None, 0)[0])
    assert len(lines) == STEPS * len(LOOPS)
    chosen, kills, printed = random.Random(3), 0, []
    # Once in the first loop, once about the second one's beginning; the third life ends by itself.
    for until in (chosen.randint(1, STEPS), chosen.randint(STEPS + 2, STEPS + 8), None):
        more, killed = life(folder, until, chosen.uniform(0, 0.05))
        kills += killed
        printed += more
    assert kills
    said = by_step(printed)
    assert said == {step: lines[step] for step in said}
    (options, values), (wanted_options, wanted) = committed(folder), committed(whole)
    assert options == wanted_options
    assert same_states(values, wanted)
