"""Tests the GPU benchmark's counting, without a GPU."""

import json

import pytest

pytest.importorskip("transformers")

from benchmarks import cuda


@pytest.mark.parametrize("parameters", [400_000, 30_000_000, 2_000_000_000])
def test_the_largest_that_fits(parameters):
    vocabulary = 64 if parameters < 10**7 else 32_768
    count = cuda.count_of(cuda.bodiless(cuda.shape(parameters, vocabulary)))
    assert 0.8 * parameters < count <= parameters
    with pytest.raises(SystemExit, match="give more storage"):
        cuda.shape(1000)


def test_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cuda, "bandwidth", lambda _: {"read": 1.0, "mixed": 0.5})
    words = ["--device", "cpu", "--storage", str(tmp_path), "--store", "10MB", "--vocabulary", "64"]
    words += ["--length", "16", "--steps", "2", "--longest", "1024", "--write", str(tmp_path / "results")]
    assert cuda.main(words) == 0
    said = capsys.readouterr().out
    assert "times its bound" in said
    assert "longest context" in said
    values = json.loads((tmp_path / "results" / "cuda.json").read_text())
    assert 0.8 * 10e6 / 24 < values["parameters"] <= 10e6 / 24
    assert len(values["steps"]) == 3
    assert values["steps"][-1]["loss"] < values["steps"][0]["loss"]
    assert values["host"]["peak"] <= values["budgets"]["host_memory"]
    assert values["raised_to_the_smallest"], "a tenth of so small a model holds no chunks"
    assert values["longest_context"] == 1024
    assert not list(tmp_path.glob(".memascend-cuda-*")), "the store was left behind"


def test_the_bound():
    """Whatever takes longest in each part of the step; gradients go out while values come in."""

    class Plan:
        read_bytes = {"values, forward": 2 * 10**9, "values, backward": 2 * 10**9, "state": 10**10}  # noqa: RUF012
        written_bytes = {"values": 2 * 10**9, "state": 10**10}  # noqa: RUF012

    disk = {"read": 4.0, "mixed": 4.0}
    found = cuda.bounds(Plan, {"forward": 1.0, "backward": 2.0}, disk, {})
    assert found == {"compute": 3.0, "disk": 6.5, "step": 7.0}
    found = cuda.bounds(Plan, {"forward": 1.0, "backward": 2.0}, disk, {"in": 1.0, "out": 0.2})
    assert found["PCIe"] == pytest.approx(12.0)
    assert found["step"] == pytest.approx(12.0)


def test_the_longest_context():
    for most in (300, 512, 700, 3000, 4096, 100_000):
        found = cuda.longest(lambda length, most=most: length <= most, 1 << 15)
        assert found <= min(most, 1 << 15)
        assert most < 512 or found > 0.85 * min(most, 1 << 15)
