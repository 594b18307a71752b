"""Tests the calculations of the GPU benchmark, without a GPU."""

import argparse
import json

import pytest

pytest.importorskip("transformers")

from benchmarks import cuda, headline
from memascend.cli.plan.answer import answer
from memascend.plan.cost import Drive

DRIVE = Drive(read=2.2e9, write=3.6e9, mixed=3e9)


@pytest.mark.parametrize(("gpu", "card"), [("h200", "24GiB"), ("3060", "12GiB")])
def test_headline_questions_fit_the_card_and_the_time_limit(gpu, card):
    options = argparse.Namespace(model="qwen2.5-1.5b", length=1024, device="cuda", gpu=gpu, card=card)
    wanted, asked = headline.questions(options, DRIVE)
    assert wanted == pytest.approx(0.93, abs=0.1)
    turns, layers = asked[headline.TURNS], asked[headline.LAYERS]
    assert turns.micro_batches * turns.sequences == layers.micro_batches * layers.sequences
    assert (turns.by_layer, layers.by_layer) == (False, True)
    assert turns.options.host_memory == pytest.approx(9.2 * 2**30, rel=0.01)
    for question in (turns, layers):
        found = answer(question)
        assert not found.problems
        assert found.seconds <= 15
        assert found.disk_bytes < 60e9
    cells = headline.cells(headline._workload(options), asked, None, 23 << 30)
    clips = [cell.work.clip for cell in cells.values() if cell.system.startswith("memascend")]
    assert clips == [1.0, 1.0, None, None]
    assert {cell.work.card for cell in cells.values()} == {None, 23 << 30}


TOY = {
    "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512, "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trl", [True, False])
def test_headline_at_toy_size_writes_the_result_of_each_cell(tmp_path, monkeypatch, trl):
    """Runs the benchmark with --headline on the CPU.

    All cells train the same model. When a cell ends, the benchmark writes the cell's result.
    """
    pytest.importorskip("trl")
    (tmp_path / "config.json").write_text(json.dumps(TOY))
    if not trl:
        (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['trl'] = None")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(headline, "TRAINER", "memascend")
    words = ["--headline", "--device", "cpu", "--model", str(tmp_path), "--length", "16", "--storage", str(tmp_path)]
    words += ["--cells", "torch", "by layer, clipped", "other, not clipped", "--seconds", "550"]
    assert cuda.main([*words, "--write", str(tmp_path)]) == 0
    values = json.loads((tmp_path / "headline.json").read_text())
    ours = [cell for cell in values["cells"].values() if cell["system"].startswith("memascend")]
    assert {cell["system"] for cell in ours} == {"memascend-trainer" if trl else "memascend"}
    assert len(ours) == 2
    for cell in ours:
        assert cell["loss_difference"] < 0.01
        assert cell["planned_seconds"] > 0
        assert cell["read_per_parameter"] + cell["written_per_parameter"] > 5
    text = (tmp_path / "headline.txt").read_text()
    assert ("is not installed" in text) is not trl
    turns, layers = values["cells"]["one after the other, not clipped"], values["cells"]["by layer, clipped"]
    assert not layers["in_turn_since"]
    assert turns["read_per_parameter"] != layers["read_per_parameter"]


@pytest.mark.parametrize("parameters", [400_000, 30_000_000, 2_000_000_000])
def test_shape_has_at_most_the_asked_number_of_parameters(parameters):
    vocabulary = 64 if parameters < 10**7 else 32_768
    count = cuda.count_of(cuda.bodiless(cuda.shape(parameters, vocabulary)))
    assert 0.8 * parameters < count <= parameters
    with pytest.raises(SystemExit, match="pass a larger --store"):
        cuda.shape(1000)


def test_bound_is_the_longest_of_compute_disk_and_pcie():
    """In each part of the step, the bound is the longest time of compute, disk and PCIe.

    PCIe transfers in both directions at the same time.
    """

    class Plan:
        read_bytes = {"values, forward": 2 * 10**9, "values, backward": 2 * 10**9, "state": 10**10}  # noqa: RUF012
        written_bytes = {"values": 2 * 10**9, "state": 10**10}  # noqa: RUF012

    disk = {"read": 4.0, "mixed": 4.0}
    found = cuda.bounds(Plan, {"forward": 1.0, "backward": 2.0}, disk, {})
    assert found == {"compute": 3.0, "disk": 6.5, "step": 7.0}
    found = cuda.bounds(Plan, {"forward": 1.0, "backward": 2.0}, disk, {"in": 1.0, "out": 0.2})
    assert found["PCIe"] == pytest.approx(12.0)
    assert found["step"] == pytest.approx(12.0)


def test_longest_finds_a_context_length_near_the_maximum():
    for most in (300, 512, 700, 3000, 4096, 100_000):
        found = cuda.longest(lambda length, most=most: length <= most, 1 << 15)
        assert found <= min(most, 1 << 15)
        assert most < 512 or found > 0.85 * min(most, 1 << 15)
