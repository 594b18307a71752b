"""Tests how volumes and tickets end: closed, dropped, at the interpreter's exit."""

import os
import subprocess
import sys

import pytest
import torch
from support.disks import read

from memascend import ConfigError, StorageError, UsageError, nvme

MIB = 1 << 20


def test_tickets(volume):
    ticket = volume.write(b"1" * 5000, 0)
    assert ticket.wait() == 5000
    assert ticket.done()
    assert ticket.wait(timeout=0) == 5000
    with pytest.raises(ConfigError, match="timeout"):
        ticket.wait(timeout=-1)


def test_close_waits_and_ends_everything(path, backend):
    volume = nvme.open(path, size=64 * MIB, backend=backend)
    tickets = [volume.write(bytes([index]) * (4 * MIB), index * 4 * MIB + index) for index in range(15)]
    volume.close()
    assert all(ticket.done() for ticket in tickets)
    assert [ticket.wait() for ticket in tickets] == [4 * MIB] * 15
    volume.close()
    assert volume.closed
    for call in (volume.flush, lambda: volume.read(bytearray(1), 0), lambda: volume.write(b"1", 0)):
        with pytest.raises(UsageError, match="closed"):
            call()
    with nvme.open(path) as again:
        assert read(again, 4 * MIB, 9 * 4 * MIB + 9) == bytes([9]) * (4 * MIB)


def test_no_descriptor_and_no_thread_is_left(path):
    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with nvme.open(path, size=MIB) as volume:
        volume.write(b"unaligned", 1).wait()
    before = held()
    for backend in ["io_uring", "threads"] * 5:
        with nvme.open(path, backend=backend) as volume:
            volume.write(b"unaligned", 1).wait()
            with pytest.raises(StorageError):
                nvme.open(path)
    assert held() == before


def test_the_end_of_the_interpreter_drains(path, child):
    child(
        """
        import sys, torch
        from memascend import nvme
        volume = nvme.open(sys.argv[1], size=1 << 26)
        for index in range(16):
            volume.write(torch.full((1 << 22,), index, dtype=torch.uint8), index << 22)
        """,
        path,
    )
    data = path.read_bytes()
    assert all(data[index << 22 : (index + 1) << 22].count(index) == 1 << 22 for index in range(16))


def test_tmpfs_and_what_it_says_of_itself(tmp_path):
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
    try:
        with nvme.open(folder / "file", size=MIB) as volume:
            volume.write(b"bytes", 3).wait()
            assert read(volume, 5, 3) == b"bytes"
            assert volume.direct == all(device["why_buffered"] is None for device in volume.devices())
    finally:
        subprocess.run(["umount", folder], check=True)


def test_it_shows_itself(path):
    with nvme.open(path, size=MIB, backend="threads", queue_depth=3) as volume:
        assert "threads" in repr(volume)
        assert str(path) in repr(volume)
        assert (volume.backend, volume.queue_depth, volume.closed, volume.paths) == ("threads", 3, False, (str(path),))
        (device,) = volume.devices()
        assert device == {"path": str(path), "kind": "file", "bytes": MIB, "why_buffered": None}
        volume.write(b"1" * 100, 5).wait()
        volume.flush()
        stats = volume.stats()
        assert stats["written"]["bytes"] == 100
        assert (stats["written"]["operations"], stats["flushes"], stats["bounced_bytes"]) == (1, 1, 100)
    assert "closed" in repr(volume)


def test_importing_it_does_not_import_torch(child):
    assert child("import sys, memascend.nvme; print('torch' in sys.modules)") == "False"
    assert sys.modules["torch"] is torch
