"""Tests the benchmark of the update: the bytes of each format, and DeepSpeed's swapper.

No test depends on timings.
"""

import json
import stat

import pytest
import torch

from benchmarks.peers import bag, bench_update
from benchmarks.peers.swapper import Swapper
from memascend import kernels


@pytest.fixture
def python(tmp_path):
    """Writes a program that simulates a peer; returns its path.

    The program needs ten buffers. It answers with the contents of the file `answer`.
    """
    path = tmp_path / "bin" / "python"
    path.parent.mkdir()
    path.write_text(
        f"#!/bin/sh\n"
        "echo noise; echo peer: ready\n"
        'test "$5" -ge 10 || { read order; echo "AssertionError: ran out of swap buffers"; exit 1; }\n'
        f'while read order; do echo "peer: $(cat {tmp_path}/answer)"; done\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    sample = bag.values(bag.SAMPLE).float()
    answer = {"seconds": 2.0, "added_bytes": 1000, "swap_buffer_bytes": 500, "sample": sample.tolist()}
    (tmp_path / "answer").write_text(json.dumps(answer))
    return path


def test_swapper_starts_with_the_fewest_working_buffers(python, tmp_path):
    with Swapper(python, tmp_path / "state", bag.SAMPLE) as swapper:
        assert [swapper.step() for _ in range(3)] == [2.0] * 3
        assert swapper.compared(bag.values(bag.SAMPLE).float()) == {
            "buffers": 10,
            "swap_buffer_bytes": 500,
            "added_bytes": 1000,
            "difference": 0,
        }


def test_report_has_deepspeed_only_if_its_parameters_equal_ours(python, tmp_path, capsys):
    words = ["--parameters", "1", "--rounds", "1", "--no-fio", "--storage", str(tmp_path), "--json"]
    # The benchmark takes three steps. The first two steps are a warm-up.
    expected = trained(3)
    answer = {"seconds": 9.0, "added_bytes": 10**9, "swap_buffer_bytes": 10**8, "sample": expected.tolist()}
    (tmp_path / "answer").write_text(json.dumps(answer))
    bench_update.main([*words, "--deepspeed", str(python)])
    report = json.loads(capsys.readouterr().out)
    assert report["other_seconds"] == 9.0
    assert report["other"]["difference"] == 0
    assert report["other"]["ours_of_swap_buffer_bytes"] == report["held_bytes"] / 10**8
    # The next peer took two steps instead of three. The benchmark must detect this.
    (tmp_path / "answer").write_text(json.dumps({**answer, "sample": trained(2).tolist()}))
    bench_update.main([*words, "--deepspeed", str(python)])
    report = json.loads(capsys.readouterr().out)
    assert "other_seconds" not in report
    assert "differ from ours" in report["other"]["error"]


def trained(steps):
    """Updates the first values of the bag in memory, `steps` times with the same gradient; returns these values."""
    values, gradient = bag.values(bag.SAMPLE), bag.gradient(bag.SAMPLE)
    master = values.float()
    m, v = torch.zeros_like(master), torch.zeros_like(master)
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    for step in range(1, steps + 1):
        kernels.adamw(master, gradient, m, v, values, step=step, **options)
    return values.float()


@pytest.mark.parametrize(("state", "moved"), [("own", 26), ("fp32", 24), ("bf16", 16), ("8bit", 12.3125)])
def test_update_moves_the_expected_bytes_per_parameter_in_each_state(state, moved, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_update.environment, "found", lambda _: None)
    words = ["--parameters", "1", "--rounds", "1", "--no-fio", "--storage", str(tmp_path), "--state", state, "--json"]
    bench_update.main(words)
    report = json.loads(capsys.readouterr().out)
    # An update moves whole blocks of 4 KiB, so it moves a little more than `moved` bytes for each parameter.
    assert report["bytes"] / report["parameters"] == pytest.approx(moved, rel=0.01)
    assert report["update_seconds"] > 0
    assert report["pure_seconds"] > 0
