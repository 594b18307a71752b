"""Runs tests/kernels/interpreted in a process of its own: triton decides at import whether it interprets."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent / "interpreted"


# numpy computes one tile after the other: a minute here, and three on a slow processor that has other work.
@pytest.mark.timeout(820)
def test_the_interpreted_kernels_agree_with_their_references():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted, done.stdout
    # Were the folder not collected, nothing would have failed.
    assert int(counted.group(1)) > 100
    assert not re.search(r"\d+ skipped", done.stdout)
