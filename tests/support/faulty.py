"""Provides a disk that fails on command: one file, served by `faulty_fuse.py`."""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


class FaultyDisk:
    """The one file of `faulty_fuse`, and the switch for its faults."""

    def __init__(self, folder):
        self.folder = folder / "faulty"
        self.folder.mkdir()
        self.control = folder / "control"
        self.set()
        words = [sys.executable, HERE / "faulty_fuse.py", self.folder, str(16 << 20), self.control]
        self.server = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert self.server.stdout.readline() == b"mounted\n"
        self.path = self.folder / "disk"

    def set(self, **faults):
        ready = self.control.with_suffix(".new")
        ready.write_text(json.dumps(faults))
        ready.rename(self.control)

    def vanish(self):
        self.server.kill()
        self.server.wait()

    def close(self):
        self.vanish()
        self.server.stdout.close()
        subprocess.run(["umount", "--lazy", self.folder], check=False, capture_output=True)
