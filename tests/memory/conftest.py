"""What measurements share: a folder on a disk, a training in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@pytest.fixture
def disk():
    """A folder beside the source, since a temporary one may be memory."""
    (ROOT / "target").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "target", prefix="memory-") as folder:
        yield Path(folder)


@pytest.fixture
def measure(disk):
    """Trains in a process of its own (see measured.py) and returns what it said."""

    def run(**work):
        storage = Path(tempfile.mkdtemp(dir=disk))
        # The heap is as glibc has it, whatever the one who runs the tests prefers.
        env = {name: value for name, value in os.environ.items() if name not in _MALLOC}
        done = subprocess.run(
            [sys.executable, HERE / "measured.py", json.dumps({"storage": str(storage), **work})],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    return run


_MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
