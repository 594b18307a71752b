"""Configures all tests.

With MEMASCEND_REQUIRE_ROOT=1, a run fails if it skipped tests that need root or simulated CUDA.
"""

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

# cuBLAS needs this variable for deterministic kernels, and reads it when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Test models are small, and several pytest workers share the processors, so torch gets one thread. A test that needs
# several threads sets their number itself. OpenMP threads sleep while they wait. If they spun instead, they would slow
# down the other pytest workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A shell starts a background job with SIGINT ignored, and child processes inherit this setting. Restore Python's
# handler, so that pytest and the child processes of tests react to SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Hides GPUs from tests, unless MEMASCEND_GPU=1 is set, as `make test-gpu` does. If a GPU were visible, a call of
# `offload()` without `device=` would compute on that GPU.
if os.environ.get("MEMASCEND_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    # Freezing hides the objects of loaded modules from the garbage collector. This saves half a second in each
    # gc.collect() that a test calls.
    gc.collect()
    gc.freeze()


def _has_gpu():
    import torch

    return torch.cuda.is_available()


def _skipped_for_root(reporter):
    return [report for report in reporter.stats.get("skipped", []) if "needs root" in str(report.longrepr)]


def _skipped_on_simulated_cuda(reporter):
    """Returns the reports of skipped tests in device/simulated/.

    These tests are skipped if the simulated CUDA cannot be built, or if a package is missing.
    """
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
            reporter.write_line(f"skipped in spite of MEMASCEND_REQUIRE_ROOT=1: {report.nodeid}: {report.longrepr}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def threads_of_torch():
    """Fails a test that changes torch's number of threads, and restores the number for the tests that follow.

    Results may depend on the number of threads.
    """
    torch = sys.modules.get("torch")
    before = torch and torch.get_num_threads()
    yield
    if torch and torch.get_num_threads() != before:
        left = torch.get_num_threads()
        torch.set_num_threads(before)
        pytest.fail(f"torch had {before} threads before the test, and {left} after it")


@pytest.fixture
def one_thread():
    """Limits torch to one thread during a test, because results may depend on where several threads divide a tensor."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def python():
    """Returns a function that runs a program in a new interpreter and returns the program's output.

    If the exit status is not `status`, the function raises an AssertionError with this output.
    """

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
    """Like the fixture `python`, but runs the program in a fork of an interpreter that has loaded torch.

    Unless `whole` is true, the program ends without most of Python's shutdown: see support/loaded.py.
    """

    def run(program, *arguments, env=None, status=0, timeout=250, whole=False):
        env = {**os.environ, **(env or {})}
        done = _loaded.run(program, *map(str, arguments), env=env, timeout=timeout, whole=whole)
        assert done.status == status, f"status {done.status}\n{done.out}\n{done.err}"
        return done.out + done.err

    return run


@pytest.fixture
def cgroup():
    """Makes a memory cgroup without a limit and yields its folder. Works with cgroup version 1 and version 2."""
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    if first.is_dir():
        parent = first
    elif "memory" in (second / "cgroup.controllers").read_text().split():
        parent = second
        if "memory" not in (second / "cgroup.subtree_control").read_text().split():
            pytest.skip("needs root, and a top cgroup that delegates the memory controller")
    else:
        pytest.fail("the machine has no memory cgroup of version 1 or 2")
    group = parent / f"memascend-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs root with permission to make cgroups: {error}")
    yield group
    # The last process may need a moment to leave the group, so the fixture tries several times to remove the group.
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
    """Mounts an ext4 file system of 24 MiB and yields its folder."""
    image, folder = tmp_path / "disk.image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(24 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
