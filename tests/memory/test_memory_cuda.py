"""Tests CUDA registration with a simulated driver that logs calls, and on a real device if the machine has one."""

import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, os, sys
from pathlib import Path
import memascend
from memascend.memory import Arena, Region, regions
"""
LOADED = "driver = ctypes.CDLL('libcuda.so.1')\n"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "found no C compiler: install cc or gcc, which the Rust build also needs"
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("libcuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return folder


@pytest.fixture
def cuda(driver, python, tmp_path):
    def run(program, mode=""):
        log = tmp_path / "log"
        log.write_text("")
        environment = {"LD_LIBRARY_PATH": str(driver), "FAKE_CUDA_LOG": str(log), "FAKE_CUDA": mode}
        output = python(PROGRAM + program, env=environment)
        return output, [line.split() for line in log.read_text().splitlines()]

    return run


def test_auto_pins_with_cuda_if_the_process_has_loaded_the_driver(cuda):
    _, log = cuda(
        LOADED
        + """
region = Region(5000)
assert region.pinned == "cuda" and region.why_not is None, region.why_not
assert [listed["pinned"] for listed in regions()] == ["cuda"]
region.close()
assert driver.fakeRetained() == 0
"""
    )
    (_, first, start, nbytes), (_, second, same, _) = log
    assert (first, second) == ("register", "unregister")
    assert start == same
    assert int(nbytes) == 8192


def test_only_an_explicit_cuda_pin_loads_the_driver(cuda):
    _, log = cuda(
        """
region = Region(4096)
assert region.pinned != "cuda"
assert "libcuda.so.1 is not loaded" in region.why_not
assert "libcuda" not in Path("/proc/self/maps").read_text()
Region(4096, pin="cuda").close()
"""
    )
    assert [line[1] for line in log] == ["register", "unregister"]


@pytest.mark.parametrize(("mode", "says"), [("nocontext", "no CUDA context"), ("refuse", "CUDA_ERROR_OUT_OF_MEMORY")])
def test_region_explains_why_cuda_does_not_pin_it(cuda, mode, says):
    output, log = cuda(
        LOADED
        + """
region = Region(4096)
assert region.pinned != "cuda"
print(region.why_not)
try:
    Region(4096, pin="cuda")
except memascend.ConfigError as error:
    print(error)
assert driver.fakeRetained() == 0
""",
        mode,
    )
    assert output.count(says) == 2
    assert log == []


def test_doctor_reports_the_cost_of_refused_cuda_registration(cuda):
    """If CUDA refuses to register memory, a region with pin="auto" uses mlock instead, which slows a run.

    `memascend doctor` reports this in a separate finding.
    """
    program = LOADED + "from memascend.cli.doctor import examine_registration\nprint(examine_registration())"
    output, _ = cuda(program)
    assert "possible" in output
    assert "fine" in output
    output, _ = cuda(program, "refuse")
    assert "verdict='slower'" in output
    assert "CUDA_ERROR_OUT_OF_MEMORY" in output
    assert "buffer of the CUDA driver" in output
    assert "mlock is used instead" in output


def test_the_memory_stays_registered_until_the_last_lease_is_gone(cuda):
    cuda(
        LOADED
        + """
region = Region(4096)
arena = Arena(region, {4096: 1})
buffer = arena.lease(4096).buffer()
region.close()
log = Path(os.environ["FAKE_CUDA_LOG"])
assert "unregister" not in log.read_text()
del buffer
assert "unregister" in log.read_text()
"""
    )


def test_a_forked_child_does_not_unregister(cuda):
    _, log = cuda(
        LOADED
        + """
region = Region(4096)
child = os.fork()
if child == 0:
    region.close()
    del region
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
del region
"""
    )
    assert [line[1] for line in log] == ["register", "unregister"]
    assert log[0][0] == log[1][0]


def test_ignore_captures_sets_the_thread_local_capture_mode(cuda):
    """`ignore_captures` sets the driver's capture mode for the calling thread.

    It returns False if no driver is loaded.
    """
    _, log = cuda(
        """
from memascend.memory import ignore_captures
assert not ignore_captures()
"""
        + LOADED
        + """
assert ignore_captures()
mode = ctypes.c_int(0)
driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
assert mode.value == 1, "the mode is not thread-local"
"""
    )
    assert [(line[1], line[3]) for line in log] == [("capture", "1"), ("capture", "0")]


@pytest.mark.gpu
def test_a_real_device_copies_from_a_region():
    import torch

    from memascend.memory import Arena, Region

    torch.zeros(1, device="cuda")
    region = Region(8 << 20)
    assert region.pinned == "cuda"
    tensor = Arena(region, {8 << 20: 1}).lease(8 << 20).tensor(2 << 20, torch.float32).normal_()
    assert tensor.is_pinned()
    assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), tensor)
