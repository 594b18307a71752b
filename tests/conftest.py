"""Configures all tests; with MEMASCEND_REQUIRE_ROOT=1 none may be skipped for lack of root or of simulated CUDA."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from support.loaded import NO_NUMPY, Loaded

ROOT = Path(__file__).resolve().parent.parent

# Deterministic kernels need it, and CUDA reads it when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Models here are small, and several workers share the processors: what tests threads of torch asks for them. Those that
# wait do so asleep: awake they hold up whoever has work for the processors, themselves first.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A shell lets what it begins in the background ignore Ctrl-C, and programs inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# On a machine with a GPU, calls without device= would compute there: only `make test-gpu` sees it.
if os.environ.get("MEMASCEND_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    # What is loaded by now stays: collections that tests ask for need not look at it, which took half a second each.
    gc.collect()
    gc.freeze()


def _has_gpu():
    import torch

    return torch.cuda.is_available()


def _skipped_for_root(reporter):
    return [report for report in reporter.stats.get("skipped", []) if "needs root" in str(report.longrepr)]


def _skipped_on_simulated_cuda(reporter):
    """What ran there, had there been g++ and the headers, or another package that the environment has."""
    return [report for report in reporter.stats.get("skipped", []) if "device/simulated/" in report.nodeid]


def pytest_terminal_summary(terminalreporter, exitstatus, config):  # noqa: ARG001
    skipped = len(_skipped_for_root(terminalreporter))
    terminalreporter.write_line(f"root-only tests skipped: {skipped}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    insists = os.environ.get("MEMASCEND_REQUIRE_ROOT") == "1"
    skipped = insists and reporter and [*_skipped_for_root(reporter), *_skipped_on_simulated_cuda(reporter)]
    if skipped and exitstatus == 0:
        for report in skipped:
            reporter.write_line(f"to be run here, and skipped: {report.nodeid}: {report.longrepr}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def threads_of_torch():
    """Refuses a test that leaves torch another number of threads: what comes after it would compute other bits."""
    torch = sys.modules.get("torch")
    before = torch and torch.get_num_threads()
    yield
    if torch and torch.get_num_threads() != before:
        left = torch.get_num_threads()
        torch.set_num_threads(before)
        pytest.fail(f"torch had {before} threads before, and {left} after")


@pytest.fixture
def one_thread():
    """Torch computes by one thread: its result may depend on where threads divide a tensor."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def python():
    """Runs a program in an interpreter of its own; its output is returned, a failure shows it whole."""

    def run(program, *arguments, env=None, status=0, timeout=250):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-W", NO_NUMPY, "-c", program, *map(str, arguments)],
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def _loaded():
    loaded = Loaded()
    yield loaded
    loaded.close()


@pytest.fixture
def loaded(_loaded):
    """As `python`, without what an interpreter does when it starts and, unless `whole`, when it ends: see loaded.py."""

    def run(program, *arguments, env=None, status=0, timeout=250, whole=False):
        env = {**os.environ, **(env or {})}
        done = _loaded.run(program, *map(str, arguments), env=env, timeout=timeout, whole=whole)
        assert done.status == status, f"status {done.status}\n{done.out}\n{done.err}"
        return done.out + done.err

    return run


@pytest.fixture
def cgroup():
    """A memory cgroup without a limit, of whichever version the machine has."""
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    if first.is_dir():
        parent = first
    elif "memory" in (second / "cgroup.controllers").read_text().split():
        parent = second
        if "memory" not in (second / "cgroup.subtree_control").read_text().split():
            pytest.skip("needs root in a machine whose top cgroup hands on the memory controller")
    else:
        pytest.fail("neither version of the memory cgroup can be had")
    group = parent / f"memascend-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs root that may make cgroups: {error}")
    yield group
    # The last process may take a moment to leave.
    for _ in range(100):
        try:
            group.rmdir()
        except OSError:
            os.sched_yield()
        else:
            return
    group.rmdir()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MiB."""
    image, folder = tmp_path / "disk.image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(24 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
