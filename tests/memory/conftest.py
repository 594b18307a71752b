"""Provides a folder on a disk, and training runs in processes of their own."""

import json
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@pytest.fixture
def disk():
    """Yields a folder beside the source, which is on a disk; the system's temporary folder may be in memory."""
    (ROOT / "target").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "target", prefix="memory-") as folder:
        yield Path(folder)


@pytest.fixture
def measure(disk, loaded, python):
    """Returns a function that trains in a process of its own (see measured.py) and returns the figures it printed."""
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import measured; measured.main(json.loads(sys.argv[2]))"
    )

    def run(**work):
        storage = tempfile.mkdtemp(dir=disk)
        # A forked process copies pages that it shares with its parent, and at its end all of them. The limit of a
        # cgroup would count these copies, so work with a cgroup runs in a fresh process, which shares no pages.
        in_its_own = python if "cgroup" in work else loaded
        return json.loads(in_its_own(program, HERE, json.dumps({"storage": storage, **work}), timeout=300))

    return run
