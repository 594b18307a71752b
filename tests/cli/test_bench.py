"""Tests that `memascend bench io` and `update` run, compare, and leave nothing behind; not what they measure."""

import json
import shutil

import pytest

from memascend.cli import main


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.root
def test_it_compares_with_fio(capsys, tmp_path):
    assert main(["bench", "io", "--storage", str(tmp_path), "--size", "64", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    for way in ("io_uring", "fio", "fio, huge pages", "threads", "two files, striped", "unaligned memory"):
        assert way in out
    assert "ours is x as fast" in out
    assert list(tmp_path.iterdir()) == []


def test_wrong_options_are_refused(capsys):
    assert main(["bench", "io", "--size", "1"]) == 1
    assert "--size is at least 64" in capsys.readouterr().err


@pytest.mark.parametrize(("state", "moved"), [("own", 26), ("fp32", 24), ("bf16", 16), ("8bit", 12.3125)])
def test_an_update_of_each_state_moves_its_bytes(state, moved, capsys, tmp_path):
    words = ["bench", "update", "--parameters", "1", "--rounds", "1", "--no-fio", "--storage", str(tmp_path)]
    assert main([*words, "--state", state, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    # Whole blocks of 4 KiB.
    assert report["bytes"] / report["parameters"] == pytest.approx(moved, rel=0.01)
    assert report["update_seconds"] > 0
    assert report["pure_seconds"] > 0
