"""Tests that the benchmark of the update moves the bytes of each format of the state; not what it measures."""

import json

import pytest

from benchmarks.peers import bench_update


@pytest.mark.parametrize(("state", "moved"), [("own", 26), ("fp32", 24), ("bf16", 16), ("8bit", 12.3125)])
def test_an_update_of_each_state_moves_its_bytes(state, moved, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_update.environment, "found", lambda _: None)
    words = ["--parameters", "1", "--rounds", "1", "--no-fio", "--storage", str(tmp_path), "--state", state, "--json"]
    bench_update.main(words)
    report = json.loads(capsys.readouterr().out)
    # Whole blocks of 4 KiB.
    assert report["bytes"] / report["parameters"] == pytest.approx(moved, rel=0.01)
    assert report["update_seconds"] > 0
    assert report["pure_seconds"] > 0
