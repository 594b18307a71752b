"""Tests benchmarks of planning: the measured speed of this processor, and the memory that pools reserve for models."""

import json
from types import SimpleNamespace

import pytest
import torch
from support.planned import CONFIG
from torch import nn

from benchmarks import processor
from benchmarks.reservation import POOLS, load_models, reserve, unit_bytes
from memascend.cli.plan.model import describe

PROCESSOR = processor.Processor(
    forward_seconds=1.0, backward_seconds=2.0, update_seconds={"fp32": 1e-3, "bf16": 2e-3, "8bit": 4e-3},
    check_seconds=0.0, copy_seconds=0.0, bind_seconds=1e-3, hand_seconds=2e-3,
)  # fmt: skip


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "num_hidden_layers": 12}))
    return path


@pytest.mark.parametrize(("seconds", "deepest"), [(1e-6, 12), (0.05, 9), (100.0, 2)])
def test_model_seconds_extrapolates_from_the_measured_blocks(config, monkeypatch, seconds, deepest):
    """A simulated pass takes a constant time, and the same additional time for each block that it runs.

    If the blocks are slower, the benchmark measures fewer blocks.
    """
    model, depths = describe(config, None)[0], []

    def passed(_, depth, *__):
        depths.append(depth)
        return 0.01 + seconds * depth, 0.02 + 2 * seconds * depth

    monkeypatch.setattr(processor, "_pass_seconds", passed)
    found = processor._model_seconds(model, SimpleNamespace(), (1, 16))
    assert found == pytest.approx((0.01 + 12 * seconds, 0.02 + 24 * seconds))
    assert depths[0] == 1
    assert depths[1] <= deepest


def test_shallow_model_keeps_the_first_blocks_only_if_blocks_are_alike(config):
    model = describe(config, None)[0]
    assert processor._depth(model) == 12
    assert len(processor._shallow(model, 3).model.layers) == 3
    assert len(model.model.layers) == 12
    passed = processor._pass_seconds(model, 2, SimpleNamespace(recomputes=True), (1, 16))
    assert all(0 < seconds < 60 for seconds in passed)
    # If the blocks of a model differ, the benchmark measures the whole model. A list of modules inside a block does not
    # count as a list of blocks.
    model.model.layers[7] = nn.Linear(4, 4, device="meta")
    assert processor._depth(model) == 1
    assert len(processor._shallow(model, 3).model.layers) == 12
    experts = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(4)) for _ in range(5))
    assert processor._depth(nn.ModuleDict({"blocks": experts})) == 5


def test_step_seconds_use_the_update_speed_of_the_asked_state(capsys, config, monkeypatch):
    monkeypatch.setattr(processor, "measure", lambda *_: PROCESSOR)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1024)
    asked = ("--drive", "1e6,1e6", "--tokens", "16", "--keep-activations", "--gradients", "fused")
    asked = (*asked, "--host-memory", "default")

    def answer(*words):
        assert processor.main([str(config), *asked, *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    found = answer()
    elements, tensors = found["model"]["parameters"], 12 * 9 + 3
    forward, backward, *_ = found["step"]["phases"]
    assert forward["parts"]["compute"] == pytest.approx(1 + tensors * 1e-3)
    assert backward["seconds"] == pytest.approx(2 + tensors * 2e-3 + elements * 1e-3, rel=1e-3)
    step = answer("--state", "8bit")["step"]["seconds_per_step"]
    assert step == pytest.approx(3 + tensors * 3e-3 + elements * PROCESSOR.update_seconds["8bit"], rel=1e-3)


@pytest.mark.parametrize("model", load_models(), ids=lambda model: model["model"])
def test_shapes_add_up_to_the_published_size(model):
    assert sum(sum(unit) for unit in unit_bytes(model)) // 2 == model["parameters"]


def test_reserve_equals_a_reservation_computed_by_hand():
    embedding, block, head = (1_000_000,), (300_000, 50_000), (1_000_000,)
    result = reserve([embedding, block, block, block, head], window=2)
    # The windows are embedding + block (1,350,000), block + block, and block + head. ZeRO-Infinity keeps tensors of
    # fewer than 100,000 elements in memory, here the three tensors of 50,000 bytes. It swaps at most two other tensors
    # at once.
    assert result.needed == 1_350_000
    assert result.reserved["one size"] == 2 * 1_000_000 + 3 * 50_000
    assert result.reserved["one size, rounded"] == 2**21 + 3 * 50_000
    assert result.reserved["per shape"] == 1_000_000 + 2 * 350_000
    # The arena has one slot that the embedding and the head share, and two slots for blocks. Each slot has whole pages.
    assert 1_700_000 <= result.reserved["arena"] <= 1_700_000 * 1.01 + 4096
    assert result.waste("one size") == pytest.approx(100 * (2_150_000 / 1_350_000 - 1))


@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("model", load_models(), ids=lambda model: model["model"])
def test_the_arena_reserves_no_more_than_any_other_pool(model, window):
    result = reserve(unit_bytes(model), window)
    assert all(result.reserved[pool] >= result.needed for pool in POOLS)
    # Alignment costs the arena at most 0.1% here.
    assert result.reserved["arena"] <= 1.001 * min(result.reserved.values())
