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

from memascend.storage import look

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


def run(folder, name, log, *, kill=None, start=("-m", "memascend", "train"), steps=STEPS, more=""):
    """The command in a session of its own; killed, or ended by a signal, so long after its log has one more `place`."""
    config = folder / f"{name}.yaml"
    config.write_text(YAML.format(folder=folder, name=name, steps=steps, more=more))
    line = [sys.executable, *start, "--config", str(config)]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    own = {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hub"), "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    with log.open("ab") as file:
        child = subprocess.Popen(line, stdout=file, stderr=file, env=os.environ | own, start_new_session=True)
    try:
        if kill is not None:
            place, seconds, by = (*kill, signal.SIGKILL)[:3]
            before = log.read_text().count(place)
            until = time.monotonic() + 100
            while child.poll() is None and log.read_text().count(place) == before and time.monotonic() < until:
                time.sleep(0.002)
            time.sleep(seconds)
            if child.poll() is None:
                os.killpg(child.pid, by)
        return child.wait(150)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
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
    assert run(tmp_path, "whole", log, more=more) == 0, log.read_text()
    rng = random.Random(logging)
    # While it loads, when it has made the store, in the midst of a step or an evaluation, at the end.
    places = ["Map", *[rng.choice(("'loss'", "'eval_loss'")) for _ in range(KILLS - 2)], "'train_runtime'"]
    log, killed = tmp_path / "killed.said", 0
    for place in places:
        status = run(tmp_path, "killed", log, kill=(place, rng.uniform(0, 0.15)), more=more)
        assert status in (0, -signal.SIGKILL), log.read_text()
        killed += status != 0
    assert killed
    assert run(tmp_path, "killed", log, more=more) == 0, log.read_text()
    assert results(tmp_path, "killed") == results(tmp_path, "whole")


@pytest.mark.timeout(600)
def test_a_stop_names_the_committed_step_and_the_restart_goes_on_there(tmp_path):
    make_model(tmp_path / "model", torch.float32)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    log, more, step = tmp_path / "log", "logging_steps: 1\nlr_scheduler_type: constant", None
    for place, stop, status in (("'loss'", signal.SIGINT, 130), ("goes on after", signal.SIGTERM, 143)):
        log.write_text("")
        assert run(tmp_path, "own", log, kill=(place, 0.2, stop), more=more) == status, log.read_text()
        said = log.read_text().splitlines()
        goes_on = f"memascend train: goes on after step {step} of {STEPS}"
        assert step is None or goes_on in said
        with look([tmp_path / "own.store"]) as store:
            step = store.step
        assert said[-1] == (
            f"memascend train: stopped after step {step}, which is committed: the same command goes on there"
        )
    assert run(tmp_path, "own", log, more=more) == 0, log.read_text()


# accelerate divides on GPUs alone.
RANK = (
    "import sys, torch; from support.launched import as_if_on_gpus; as_if_on_gpus(); torch.set_num_threads(1); "
    "from memascend.cli import main; sys.exit(main(['train', *sys.argv[1:]]))"
)
SHARDED = "fsdp: full_shard\nfsdp_config: {fsdp_version: 2, version: 2}\nlogging_steps: 1"


@pytest.mark.timeout(600)
def test_ranks_that_are_killed_and_started_again_are_those_that_never_were(tmp_path):
    make_model(tmp_path / "model", torch.float32)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rank.py").write_text(RANK)
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / "rank.py")
    given = {"start": start, "steps": 6, "more": SHARDED}
    for name, lives in (("whole", [None]), ("killed", [("'loss'", 0), None])):
        log = tmp_path / f"{name}.said"
        statuses = [run(tmp_path, name, log, kill=kill, **given) for kill in lives]
        assert statuses == [-signal.SIGKILL if kill else 0 for kill in lives], log.read_text()
    assert results(tmp_path, "killed") == results(tmp_path, "whole")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "killed")
