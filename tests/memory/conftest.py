"""Provides a folder on a disk, and training runs in separate processes."""

import json
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@pytest.fixture
def disk():
    """Yields a folder within the source tree, which is on a disk.

    The system's temporary folder may be in memory.
    """
    (ROOT / "target").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "target", prefix="memory-") as folder:
        yield Path(folder)


@pytest.fixture
def measure(disk, loaded, python):
    """Returns a function that trains in a separate process.

    The separate process runs measured.py. The function returns the figures that measured.py prints.
    """
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import measured; measured.main(json.loads(sys.argv[2]))"
    )

    def run(**work):
        storage = tempfile.mkdtemp(dir=disk)
        # A forked process shares pages with its parent, and the kernel copies a shared page when the process writes to
        # the page. The limit of a cgroup would count the copies, so a run in a cgroup uses a fresh process.
        in_its_own = python if "cgroup" in work else loaded
        return json.loads(in_its_own(program, HERE, json.dumps({"storage": storage, **work}), timeout=300))

    return run
