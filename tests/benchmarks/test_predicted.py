"""Tests the comparison of predicted with measured steps, on a throttled drive."""

import os
import time
from pathlib import Path

import pytest

from benchmarks import predicted
from benchmarks.throttled import throttled
from memascend import nvme

GROUPS = Path("/proc/self/cgroup")


@pytest.mark.parametrize(("seconds", "verdict"), [(1.09, "met"), (0.91, "met"), (1.11, "MISSED"), (0.89, "MISSED")])
def test_a_verdict_is_of_the_way_that_the_run_took(seconds, verdict):
    case = {
        "seconds": [seconds, 9.0, 0.1], "way": "next forward", "predicted": {"next forward": 1.0, "early": 2.0},
        "drive": 0.5, "held": 0.35, "parameters": 96e6,
    }  # fmt: skip
    text = predicted._shown({"compute": [1.5, 4.1], "drive": [0.3, 0.24]}, {"one batch, clipped": case})
    assert f"{seconds:.3f} ({verdict})" in text
    assert "early 2.00" in text


@pytest.mark.root
def test_a_throttled_drive_is_as_slow_as_it_is_told(tmp_path):
    """The seconds can be more, where the machine does other things, but not fewer."""
    nbytes, speed = 4 << 20, 8e6
    group = GROUPS.read_text()
    try:
        with throttled(tmp_path, speed, speed), nvme.open(tmp_path / "volume", size=nbytes) as volume:
            assert GROUPS.read_text() != group
            took = []
            for begin in (volume.write, volume.read):
                began = time.monotonic()
                begin(bytearray(os.urandom(nbytes)), 0).wait()
                took.append(time.monotonic() - began)
    except SystemExit as error:
        pytest.skip(f"no block I/O to throttle: {error}")
    # What a moment of rest allows comes at once.
    assert min(took) > nbytes / speed / 2
    assert GROUPS.read_text() == group
