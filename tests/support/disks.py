"""Provides storage devices for tests: loop devices, small file systems, and a file system that fails on command."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


class FaultyDisk:
    """The only file of a file system that `faulty_fuse.py` serves. `set` chooses the faults of this file."""

    def __init__(self, folder):
        self.folder = folder / "faulty"
        self.folder.mkdir()
        self.control = folder / "control"
        self.set()
        words = [sys.executable, Path(__file__).with_name("faulty_fuse.py"), self.folder, str(16 << 20), self.control]
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


def command(*words):
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout.strip()


def read(volume, nbytes, at=0):
    """Reads `nbytes` bytes of a volume from the offset `at`."""
    into = bytearray(nbytes)
    assert volume.read(into, at).wait() == nbytes
    return into


@pytest.fixture
def path(tmp_path):
    return tmp_path / "volume"


@pytest.fixture(params=["io_uring", "threads"])
def backend(request):
    return request.param


@pytest.fixture
def loop(tmp_path):
    """Yields a function that makes a loop device: of `nbytes` bytes, or over the file `over`.

    Detaches the devices after the test.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root: loop devices")
    made = []

    def make(nbytes, *options, over=None):
        backing = over or tmp_path / f"backing-{len(made)}"
        if over is None:
            backing.touch()
            os.truncate(backing, nbytes)
        device = command("losetup", "--find", "--show", *options, backing)
        made.append(device)
        return device

    yield make
    for device in made:
        subprocess.run(["blockdev", "--setrw", device], check=False, capture_output=True)
        subprocess.run(["losetup", "--detach", device], check=False, capture_output=True)


@pytest.fixture
def small_ext4(tmp_path, loop):
    """Mounts an ext4 file system of 64 MiB and yields its folder."""
    device = loop(64 << 20)
    command("mkfs.ext4", "-q", "-m", "0", device)
    folder = tmp_path / "small"
    folder.mkdir()
    command("mount", device, folder)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=False, capture_output=True)


@pytest.fixture
def faulty(tmp_path):
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs root and /dev/fuse")
    disk = FaultyDisk(tmp_path)
    yield disk
    disk.close()


@pytest.fixture
def child(python):
    """Returns a function that runs an indented program in a new interpreter and returns its output."""
    return lambda program, *arguments: python(textwrap.dedent(program), *arguments).strip()
