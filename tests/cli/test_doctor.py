"""Tests `memascend doctor` on storage: what is fine, slower and will fail."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.disks import command

from memascend import nvme
from memascend.cli import main


def report(capsys, path, status=0):
    assert main(["doctor", "--json", f"--storage={path}"]) == status
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is (status == 0)
    assert all(finding.keys() == {"subject", "found", "verdict", "advice"} for finding in said["findings"])
    assert {finding["verdict"] for finding in said["findings"]} <= {"fine", "slower", "fails"}
    return {finding["subject"]: finding for finding in said["findings"]}


def test_a_folder(capsys, tmp_path):
    found = report(capsys, tmp_path)
    assert found["io_uring"]["found"] == "to be had"
    assert found["direct I/O"]["found"].startswith("yes, aligned to ")
    assert found["sequential write"]["found"].endswith("GB/s")
    assert found["sequential read"]["found"].endswith("GB/s")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_nearly_full_keeps_most_of_its_space(capsys, tmp_path, monkeypatch):
    own, sizes = nvme.open, []
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=8192, f_frsize=4096, f_flag=0))
    monkeypatch.setattr(nvme, "open", lambda path, size: sizes.append(size) or own(path, size=size))
    report(capsys, tmp_path)
    assert sizes == [8 << 20]


@pytest.mark.parametrize(
    ("path", "says"),
    [("/proc", "holds no files"), ("/no/such", "does not exist"), ("~/no/such", f"{Path.home()}/no does not exist")],
)
def test_where_no_file_can_be(capsys, path, says):
    assert says in report(capsys, path, 1)["storage"]["advice"]


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
    device = command("findmnt", "-no", "SOURCE", small_ext4)
    assert "mounted at" in report(capsys, device, 1)["storage"]["advice"]
    command("mount", "-o", "remount,ro", small_ext4)
    assert "read-only" in report(capsys, small_ext4, 1)["storage"]["advice"]
    memory = tmp_path / "memory"
    memory.mkdir()
    command("mount", "-t", "tmpfs", "none", memory)
    try:
        assert "tmpfs" in report(capsys, memory, 1)["storage"]["advice"]
    finally:
        command("umount", memory)


@pytest.mark.root
def test_a_faulty_disk(capsys, faulty, loop):
    faulty.set(read={"errno": errno.EIO})
    device = loop(0, over=faulty.path)
    assert "errno 5" in report(capsys, device, 1)["storage"]["advice"]
    assert os.path.exists(device)
