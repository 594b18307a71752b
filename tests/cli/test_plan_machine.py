"""Tests the machines and models that `memascend plan` knows: shapes by name, GPUs, this processor, drives."""

import json
import re

import pytest
import torch
from support.planned import shown, told

from memascend.cli import main
from memascend.cli.plan.decoder import Decoder
from memascend.cli.plan.machine import drive_at, parse_gpu, product_flops
from memascend.cli.plan.model import Traces, describe
from memascend.cli.plan.shapes import SHAPES
from memascend.cli.storage import Speed
from memascend.errors import ConfigError
from memascend.plan.options import Options
from memascend.session.decide import planned
from memascend.text import bytes_shown

# As their model cards count them; of tied weights once.
PARAMETERS = {
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "qwen-0.5b": 494_032_768,
    "qwen-1.5b": 1_543_714_304,
    "qwen-3b": 3_085_938_688,
    "qwen-7b": 7_615_616_512,
    "qwen-14b": 14_770_033_664,
    "qwen-32b": 32_763_876_352,
    "qwen-72b": 72_706_203_648,
}
SMALL = ("--tokens", 256, "--drive", "5,4")


def test_a_shape_by_its_name_needs_no_transformers_and_a_wrong_one_no_torch(python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = python("""
import sys
sys.modules["transformers"] = None
from memascend.cli import main
assert main(["plan", "lama-8b", "--gpu", "4090"]) == 1
assert "torch" not in sys.modules
assert main(["plan", "llama-8b", "--gpu", "4090", "--drive", "5,4", "--host-memory", "48GiB"]) == 0
assert not {"memascend.distributed.fsdp", "memascend.params.module_hooks"} & sys.modules.keys()
""")
    assert "lama-8b does not exist: give a config.json" in out
    assert "one of llama-1b, llama-3b, llama-8b" in out
    assert "llama-8b: 8,030,261,248 parameters, described by the shape of llama-8b" in out
    assert re.search(r"a step +28\.\d s +mostly disk", out)


def test_a_folder_of_that_name_is_asked_first(capsys, config, monkeypatch):
    monkeypatch.chdir(config.parent)
    (config.parent / "llama-8b").mkdir()
    config.rename(config.parent / "llama-8b" / "config.json")
    assert told(capsys, "llama-8b", *SMALL)["model"]["parameters"] < 1_000_000


def test_shapes_have_the_parameters_of_their_models():
    with torch.device("meta"):
        found = {name: sum(one.numel() for one in Decoder(shape).parameters()) for name, shape in SHAPES.items()}
    assert found == PARAMETERS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama-8b", "qwen-0.5b"])
def test_a_shape_is_planned_as_transformers_model_is(tmp_path, name):
    shape = {**SHAPES[name], "num_hidden_layers": 3}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape))
    theirs = describe(path, torch.bfloat16).model
    with torch.device("meta"):
        ours = Decoder(shape).to(torch.bfloat16)
    options = [Options(device="cuda", host_memory="2GiB"), Options(device="cpu", host_memory="6GiB")]
    for one in options:
        mine, other = (planned(model, torch.optim.AdamW(model.parameters()), one).plan for model in (ours, theirs))
        assert mine.to_dict() == other.to_dict()
    for recomputes, near in ((True, 1e-3), (False, 0.1)):
        mine, other = (Traces(model, 512, recomputes).of(2) for model in (ours, theirs))
        assert (mine.forward, mine.backward) == pytest.approx((other.forward, other.backward), rel=1e-3)
        # A trace of transformers repeats keys and values for its mask, and a run does not.
        assert (mine.peak, mine.kept) == pytest.approx((other.peak, other.kept), rel=near)


@pytest.mark.parametrize(
    ("text", "name", "tflops", "gib", "link"),
    [
        ("rtx-4080", "RTX 4080", 97.5, 16, 25e9), ("nvidia h100-pcie", "H100 PCIe", 756, 80, 50e9),
        ("RTX 4060 Ti 16GB", "RTX 4060 Ti 16 GB", 44.1, 16, 12.5e9), ("5060ti", "RTX 5060 Ti 8 GB", 47.4, 8, 25e9),
        ("Tesla V100-32GB", "V100 32 GB", 125, 32, 12e9), ("a100", "A100 80 GB", 312, 80, 25e9),
        ("GeForce RTX 4070 SUPER", "RTX 4070 Super", 71, 12, 25e9), ("a100-40", "A100 40 GB", 312, 40, 25e9),
    ],
)  # fmt: skip
def test_cards_have_their_figures(text, name, tflops, gib, link):
    card = parse_gpu(text)
    assert (card.name, card.tflops, card.nbytes, card.link) == (name, tflops, gib << 30, link)


def test_a_card_without_bf16_is_said(capsys, config):
    for kind, says in (("bf16", True), ("fp16", False)):
        assert (
            "it has no units for bfloat16: with --dtype fp16"
            in shown(capsys, config, "--gpu", "T4", "--dtype", kind, *SMALL)
        ) == says
    with pytest.raises(ConfigError, match="5060ti8, 5060ti16, 5070"):
        parse_gpu("5055")


def test_without_a_gpu_this_processor_is_measured(capsys, config, monkeypatch):
    asked = []
    monkeypatch.setattr("memascend.cli.plan.machine.product_flops", lambda kind: asked.append(kind) or 2e6)
    found = told(capsys, config, *SMALL)
    assert asked == [torch.bfloat16]
    assert found["step"]["bound"] == "compute"
    # Half of the speed of a product, and little beside it.
    assert found["step"]["seconds_per_step"] == pytest.approx(found["torch"]["flops"] / 1e6, rel=0.01)
    assert found["processor_flops"] == 2e6
    assert main(["plan", str(config), *map(str, SMALL), "--dtype", "fp32"]) == 0
    assert "no GPU: this processor computes; assumed: it reaches 50% of the 0 GFLOPS measured in float32" in (
        capsys.readouterr().out
    )
    # Without a drive there are no seconds; of a card that is not there, neither.
    assert told(capsys, config)["step"]["seconds_per_step"] is None
    assert len(asked) == 2
    assert "give --gpu G" in shown(capsys, config, *SMALL, "--device", "cuda")


def test_a_product_is_measured():
    assert 1e7 < product_flops(torch.float32) < 1e15


def test_paths_on_one_file_system_share_its_space_and_speed(capsys, config, monkeypatch):
    monkeypatch.setattr("memascend.cli.storage._TRIAL_SECONDS", 0.05)
    one, two = config.parent / "one", config.parent / "two"
    one.mkdir()
    two.mkdir()
    alone, both = (
        told(capsys, config, "--tokens", 256, "--gpu", "4090", *words)
        for words in (("--storage", one), ("--storage", one, "--storage", two))
    )
    assert both["disk"]["free_bytes"] == pytest.approx(alone["disk"]["free_bytes"], rel=0.05)
    speeds = {one: 3e9, two: 2e9}
    measured = []

    def speeds_at(path):
        measured.append(path)
        return {
            pattern: Speed(nbytes=speeds[path], seconds=1.0, cpu_seconds=0.1) for pattern in ("read", "write", "mixed")
        }

    monkeypatch.setattr("memascend.cli.plan.machine.speeds_at", speeds_at)
    assert drive_at([one, two])[0].read == pytest.approx(2e9)
    assert len(measured) == 1
    monkeypatch.setattr("memascend.cli.plan.machine._system", lambda path: path == one)
    assert drive_at([one, two])[0].read == pytest.approx(2 * 2e9)
    lines = main(
        ["plan", str(config), "--storage", str(one), "--storage", str(two), "--tokens", "256", "--gpu", "4090"]
    )
    assert lines == 0
    assert f'storage=["{one}", "{two}"]' in capsys.readouterr().out


def test_checkpointed_activations_in_files(capsys, config):
    words = config, "--drive", "5,4", "--tokens", 65_536, "--length", 256, "--accumulation-steps", 8
    here = told(capsys, *words, "--gpu", "165,24,25")
    kept = here["torch"]["kept_bytes"]
    card = "--gpu", f"165,{(here['device_bytes'] - 3 * kept + (1 << 30)) / 1e9},25"
    problem = told(capsys, *words, *card, status=1)["problems"][0]
    assert f"--activations ssd or host moves {bytes_shown(7 * kept)} that the other 7 micro-batches keep" in problem
    away = told(capsys, *words, *card, "--activations", "ssd")
    files = 8 * kept - away["plan"]["host"]["activations"]
    assert away["device_bytes"] == here["device_bytes"] - 7 * kept
    assert away["disk"]["bytes"] == here["disk"]["bytes"] + files
    assert away["written_bytes_per_step"] == here["written_bytes_per_step"] + files
    assert away["read_bytes_per_step"] == here["read_bytes_per_step"] + files
    out = shown(capsys, *words, *card, "--activations", "ssd")
    assert f"{bytes_shown(files)} of it checkpointed activations" in out
    assert "activations='ssd')" in out or 'activations="ssd")' in out
    # Host memory takes all of them, within a budget that has room.
    inside = told(capsys, *words, *card, "--activations", "host", "--host-memory", "4GiB")
    assert inside["disk"]["bytes"] == here["disk"]["bytes"]
