"""Tests that `memascend train`, killed at any moment and repeated, has the bits of a run that was never killed."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from support.small_folder import make_model, write_rows

TESTS = Path(__file__).resolve().parents[1]
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


# accelerate divides on GPUs alone.
RANK = (
    "import sys, torch; from support.launched import as_if_on_gpus; as_if_on_gpus(); torch.set_num_threads(1); "
    "from memascend.cli import main; sys.exit(main(['train', *sys.argv[1:]]))"
)


def run_ranks(folder, name, log, *, kill=False):
    """Two ranks under torchrun; all of them killed after the first step."""
    script = folder / "rank.py"
    script.write_text(RANK)
    more = "fsdp: full_shard\nfsdp_config: {fsdp_version: 2, version: 2}\nlogging_steps: 1"
    config = folder / f"{name}.yaml"
    config.write_text(YAML.format(folder=folder, name=name, steps=6, more=more).replace(".store", ".store/"))
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hub"), "PYTHONPATH": path}
    environment["PYTHONUNBUFFERED"] = "1"
    with log.open("ab") as file:
        child = subprocess.Popen(
            [*line, "--config", str(config)], stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        while kill and child.poll() is None and "'loss'" not in log.read_text():
            time.sleep(0.002)
        if kill:
            os.killpg(child.pid, signal.SIGKILL)
        return child.wait(150)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)


@pytest.mark.timeout(600)
def test_ranks_that_are_killed_and_started_again_are_those_that_never_were(tmp_path):
    make_model(tmp_path / "model", torch.float32)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    for name, lives in (("whole", [False]), ("killed", [True, False])):
        log = tmp_path / f"{name}.said"
        statuses = [run_ranks(tmp_path, name, log, kill=kill) for kill in lives]
        assert statuses == [-signal.SIGKILL if kill else 0 for kill in lives], log.read_text()
    assert results(tmp_path, "killed") == results(tmp_path, "whole")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "killed")
