"""Tests `memascend doctor` on storage: what is fine, slower and will fail."""

import errno
import json
import os
import subprocess

import pytest

from memascend.cli import main


def report(capsys, path, status=0):
    assert main(["doctor", "--json", "--storage", str(path)]) == status
    return {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_a_folder(capsys, tmp_path):
    found = report(capsys, tmp_path)
    assert found["io_uring"]["found"] == "to be had"
    assert found["direct I/O"]["found"].startswith("yes, aligned to ")
    assert found["sequential write"]["found"].endswith("GB/s")
    assert found["sequential read"]["found"].endswith("GB/s")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_files(capsys):
    assert "holds no files" in report(capsys, "/proc", 1)["storage"]["advice"]


def test_a_file_that_is_there_is_not_touched(capsys, path):
    path.write_bytes(b"mine")
    report(capsys, path)
    assert path.read_bytes() == b"mine"


@pytest.mark.root
def test_a_raw_device_is_read_and_not_written(capsys, loop):
    device = loop(16 << 20)
    with open(device, "r+b") as file:
        file.write(b"mine" * 1000)
    found = report(capsys, device)
    assert "free to use" in found["storage"]["found"]
    assert "not tried" in found["sequential write"]["found"]
    with open(device, "rb") as file:
        assert file.read(4000) == b"mine" * 1000


@pytest.mark.root
def test_what_will_fail(capsys, small_ext4, tmp_path):
    device = subprocess.run(["findmnt", "-no", "SOURCE", small_ext4], capture_output=True, text=True, check=True).stdout
    assert "mounted at" in report(capsys, device.strip(), 1)["storage"]["advice"]
    subprocess.run(["mount", "-o", "remount,ro", small_ext4], check=True)
    assert "read-only" in report(capsys, small_ext4, 1)["storage"]["advice"]
    memory = tmp_path / "memory"
    memory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", memory], check=True)
    try:
        assert "tmpfs" in report(capsys, memory, 1)["storage"]["advice"]
    finally:
        subprocess.run(["umount", memory], check=True)


@pytest.mark.root
def test_a_faulty_disk(capsys, faulty):
    faulty.set(read={"errno": errno.EIO})
    device = subprocess.run(
        ["losetup", "--find", "--show", faulty.path], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        assert "errno 5" in report(capsys, device, 1)["storage"]["advice"]
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
    assert os.path.exists(device)
