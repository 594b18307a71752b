"""Tests the runner of the GPU tests: crashes, hangs and cut-off tests get an outcome."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SLICES = Path(__file__).parents[1] / "device" / "slices.py"
TESTS = """
import os, signal, time
from pathlib import Path
import pytest
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *rest):
        return None if name == "peft" else self.finder.find_spec(name, *rest)

# As if peft were not installed.
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]

HERE = Path(__file__).parent

@pytest.fixture(autouse=True)
def seen(request):
    with (HERE / "ran").open("a") as file:
        file.write(request.node.name + "\\n")

def test_from_the_wheel():
    import of_the_wheel
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"

def test_fails():
    assert 1 == 2

def test_ends_the_process():
    os._exit(7)

def test_is_cut_off_once():
    if not (HERE / "second").exists():
        (HERE / "second").touch()
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(600)

def test_has_no_end():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGUSR1)
    time.sleep(600)

def test_loses_the_context():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_has_another_process_after_it():
    import sys
    assert "lost" not in os.environ

def test_needs_what_is_not_there():
    import peft

def test_needs_what_nobody_has():
    import no_such
"""
# The limit comes when a test asks for it, however slow the machine is.
RUN = """
import signal, subprocess, sys, time, types
sys.path.insert(0, sys.argv.pop(1))
import slices
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
real = subprocess.Popen.wait
def wait(self, timeout=None):
    if timeout is None or timeout <= slices.ENDS_WITHIN:
        return real(self, timeout)
    while not asked:
        try:
            return real(self, 0.1)
        except subprocess.TimeoutExpired:
            pass
    slices.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 1e9)
    raise subprocess.TimeoutExpired(self.args, timeout)
subprocess.Popen.wait = wait
slices.ENDS_WITHIN = 3
sys.exit(slices.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_slices_go_on_where_they_stopped(tmp_path):
    tests = tmp_path / "test_some.py"
    tests.write_text(TESTS)
    wheel = tmp_path / "made.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("of_the_wheel.py", "")
    state, out = tmp_path / "state", tmp_path / "out"
    words = ["--wheel", wheel, "--state", state, "--out", out, "--tests", tests, "--seconds", "100000"]
    statuses, said = [], ""
    for _ in range(8):
        done = subprocess.run(
            [sys.executable, "-c", RUN, SLICES.parent, *words],
            env={**os.environ, "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        said = done.stdout + done.stderr
        statuses.append(done.returncode)
        if done.returncode != 3:
            break
    log = (state / "tests.log").read_text()
    assert statuses == [3, 3, 3, 1], f"{statuses}\n{said}\n{log}"
    lines = [json.loads(line) for line in (state / "told.jsonl").read_text().splitlines()]
    outcomes = {line["end"].rpartition("::")[2]: line for line in lines if "end" in line}
    assert {name: line["outcome"] for name, line in outcomes.items()} == {
        "test_from_the_wheel": "passed",
        "test_fails": "failed",
        "test_ends_the_process": "failed",
        "test_is_cut_off_once": "passed",
        "test_has_no_end": "failed",
        "test_loses_the_context": "failed",
        "test_has_another_process_after_it": "passed",
        "test_needs_what_is_not_there": "skipped",
        "test_needs_what_nobody_has": "failed",
    }, said
    assert "ended the process with 7" in outcomes["test_ends_the_process"]["said"]
    assert "had no end, 2 times" in outcomes["test_has_no_end"]["said"]
    ran = (tmp_path / "ran").read_text().split()
    assert {name: ran.count(name) for name in outcomes} == {
        name: 2 if name in ("test_is_cut_off_once", "test_has_no_end") else 1 for name in outcomes
    }
    assert "9 of 9 tests: 5 failed, 3 passed, 1 skipped" in said
    assert "peft is not installed here" in (out / "summary.txt").read_text()
    assert (out / "tests.log").is_file()
