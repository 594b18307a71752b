"""Tests that the benchmark of storage measures a raw device beside files, draws, and leaves nothing behind."""

import json
import shutil

import pytest

from benchmarks.peers import bench_io


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.root
def test_a_raw_device_beside_files(capsys, tmp_path):
    picture = tmp_path / "io.png"
    folder = tmp_path / "storage"
    folder.mkdir()
    words = ["--storage", str(folder), "--size", "64", "--rounds", "1", "--raw", "--json", "--picture", str(picture)]
    bench_io.main(words)
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"machine", "size_bytes", "rounds", "left_out", "files", "raw device", "weights"}
    assert report["machine"]["kernel"]
    assert report["raw device"]["read: io_uring"]["gb_per_second"] > 0
    ways = ("io_uring", "fio", "fio, huge pages", "threads", "two files, striped", "unaligned memory")
    assert {f"read: {way}" for way in ways} <= report["files"].keys()
    assert report["weights"]["volume"]["gb_per_second"] > 0
    assert picture.stat().st_size > 1000
    assert list(folder.iterdir()) == []


def test_wrong_options_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_io.main(["--size", "1"])
    assert "--size is at least 64" in capsys.readouterr().err
