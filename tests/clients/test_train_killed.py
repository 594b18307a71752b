"""Tests that `memascend train` and Trainers, killed at any moment and started again, end as if they never were."""

import hashlib
import json
import random
import signal
import sys

import pytest
import torch
from clients import trained_trainers
from support.lives import life
from support.small_folder import make_model, write_rows
from support.trained_program import compared, logged

from memascend.storage import look

STEPS, KILLS = 24, 5
ROWS = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n * 7}."}]}
    for n in range(40)
]
YAML = """
model: {folder}/model
data: {folder}/rows.jsonl
eval: {folder}/rows.jsonl
output: {folder}/{name}
storage: {folder}/{name}.store
use_cpu: true
packing: true
max_length: 48
eval_steps: 5
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1e-3
warmup_steps: 3
max_steps: {steps}
disable_tqdm: true
{more}
"""


def prepare(folder, dtype):
    make_model(folder / "model", dtype)
    write_rows(folder / "rows.jsonl", ROWS)


def run(folder, name, more, **how):
    """One `life` of the command."""
    config = folder / f"{name}.yaml"
    config.write_text(YAML.format(folder=folder, name=name, steps=STEPS, more=more))
    return life([sys.executable, "-m", "memascend", "train", "--config", config], HF_HOME=str(folder / "hub"), **how)


def results(folder, name):
    """The digest of the weights, and what was logged of each step."""
    digest = hashlib.sha256((folder / name / "model.safetensors").read_bytes()).hexdigest()
    history = json.loads((folder / name / "trainer_state.json").read_text())["log_history"]
    return digest, [compared(line) for line in history if "train_loss" not in line]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("logging", [1, 10])
def test_a_killed_and_repeated_run_is_the_run_that_was_never_killed(tmp_path, logging):
    prepare(tmp_path, torch.bfloat16)
    more = f"logging_steps: {logging}"
    run(tmp_path, "whole", more)
    rng = random.Random(logging)
    # While it loads, when it has made the store, in the midst of a step or an evaluation, at the end.
    places = ["Map", *[rng.choice(("'loss'", "'eval_loss'")) for _ in range(KILLS - 2)], "'train_runtime'"]
    ends = [
        run(tmp_path, "killed", more, kill=(place,), after=rng.uniform(0, 0.15), ends=(0, -signal.SIGKILL))
        for place in places
    ]
    assert any(status for status, _ in ends)
    run(tmp_path, "killed", more)
    assert results(tmp_path, "killed") == results(tmp_path, "whole")


@pytest.mark.timeout(600)
def test_a_stop_names_the_committed_step_and_the_restart_goes_on_there(tmp_path):
    prepare(tmp_path, torch.float32)
    more, step = "logging_steps: 1\nlr_scheduler_type: constant", None
    for place, stop, status in (("'loss'", signal.SIGINT, 130), ("goes on after", signal.SIGTERM, 143)):
        said = run(tmp_path, "own", more, kill=(place,), after=0.2, by=stop, ends=status).splitlines()
        assert step is None or f"memascend train: goes on after step {step} of {STEPS}" in said
        with look([tmp_path / "own.store"]) as store:
            step = store.step
        assert said[-1] == (
            f"memascend train: stopped after step {step}, which is committed: the same command goes on there"
        )
    run(tmp_path, "own", more)


# --- TRL's Trainers, and that of sentence-transformers -------------------------------------------------

MOMENTS = [
    ("creation", 0), ("micro-batch", 1), ("after the commit", 2), ("evaluation", 4), ("checkpoint", 5),
    ("end of the step", 6), ("before the step", 7),
]  # fmt: skip


def start(folder, name, kind, *words, **how):
    """One `life` of the program; its last line is a digest of the weights."""
    store = "memory" if name == "memory" else folder / name
    line = [sys.executable, trained_trainers.__file__, kind, store, folder / f"{name}.log", *words]
    return life(line, PYTHONWARNINGS="ignore", HF_HOME=str(folder / "hub"), **how)


def digest(output):
    return output.splitlines()[-1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", ["one", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", trained_trainers.KINDS)
def test_it_ends_as_in_memory(tmp_path, kind, kills):
    want = digest(start(tmp_path, "memory", kind))
    number = list(trained_trainers.KINDS).index(kind)
    for kill in MOMENTS if kills == "all" else [MOMENTS[number]]:
        start(tmp_path, "killed", kind, *kill, ends=-signal.SIGKILL)
    assert digest(start(tmp_path, "killed", kind)) == want
    assert logged(tmp_path / "killed.log") == logged(tmp_path / "memory.log")
    assert len(logged(tmp_path / "killed.log")) >= 6
