"""Provides a folder on a disk, and a training in a process of its own."""

import json
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
def measure(disk, loaded, python):
    """Trains in a process of its own (see measured.py) and returns what it said."""
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import measured; measured.main(json.loads(sys.argv[2]))"
    )

    def run(**work):
        storage = tempfile.mkdtemp(dir=disk)
        # One that is forked copies what it shares, at its end all of it, and a limit counts that.
        in_its_own = python if "cgroup" in work else loaded
        return json.loads(in_its_own(program, HERE, json.dumps({"storage": storage, **work}), timeout=300))

    return run
