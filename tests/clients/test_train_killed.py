"""Tests that `memascend train`, killed at any moment and repeated, ends as a run that was never killed."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from support.small_folder import make_model, write_rows

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
# Times, and figures of one process.
_NOT_COMPARED = ("runtime", "per_second", "host_memory_bytes", "read_bytes", "written_bytes", "waiting_seconds")


def run(folder, name, *, kill=None, log=None, kind=(), more=""):
    """The command in a process of its own; killed so long after it reported a further step, if it has not ended."""
    config = folder / f"{name}.yaml"
    config.write_text(YAML.format(folder=folder, name=name, steps=STEPS, more=more))
    line = [sys.executable, "-m", "memascend", "train", *kind, "--config", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hub"), "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as file:
        child = subprocess.Popen(line, stdout=file, stderr=file, env=environment)
    try:
        if kill is not None:
            place, seconds = kill
            before = log.read_text().count(place)
            until = time.monotonic() + 100
            while child.poll() is None and log.read_text().count(place) == before and time.monotonic() < until:
                time.sleep(0.002)
            time.sleep(seconds)
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)
        return child.wait(150)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def results(folder, name):
    """The digest of the weights, and what was logged of each step."""
    digest = hashlib.sha256((folder / name / "model.safetensors").read_bytes()).hexdigest()
    history = json.loads((folder / name / "trainer_state.json").read_text())["log_history"]
    return digest, [
        {key: value for key, value in line.items() if not any(part in key for part in _NOT_COMPARED)}
        for line in history
        if "train_loss" not in line
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("logging", [1, 10])
def test_a_killed_and_repeated_run_is_the_run_that_was_never_killed(tmp_path, logging):
    make_model(tmp_path / "model", torch.bfloat16)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    more = f"logging_steps: {logging}"
    log = tmp_path / "said"
    assert run(tmp_path, "whole", log=log, more=more) == 0, log.read_text()
    rng = random.Random(logging)
    # While it loads, when it has made the store, in the midst of a step or an evaluation, at the end.
    places = ["Map", *[rng.choice(("'loss'", "'eval_loss'")) for _ in range(KILLS - 2)], "'train_runtime'"]
    log, killed = tmp_path / "killed.said", 0
    for place in places:
        status = run(tmp_path, "killed", kill=(place, rng.uniform(0, 0.15)), log=log, more=more)
        assert status in (0, -signal.SIGKILL), log.read_text()
        killed += status != 0
    assert killed
    assert run(tmp_path, "killed", log=log, more=more) == 0, log.read_text()
    assert results(tmp_path, "killed") == results(tmp_path, "whole")
