"""Tests the machines and models that `memascend plan` knows: shapes by name, GPUs, this processor, drives."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.grids import usual
from support.planned import answer, shown

from memascend.cli import main
from memascend.cli.plan import builtin, machine, model
from memascend.cli.plan.machine import drive_at, parse_gpu
from memascend.cli.plan.shapes import SHAPES, shape_named
from memascend.cli.plan.subject import Batch
from memascend.cli.storage import Speed, blocks
from memascend.errors import ConfigError
from memascend.plan.decision import TorchBytes
from memascend.plan.hardware import gpu_here, product_flops
from memascend.plan.options import Options
from memascend.plan.outline import Dtype
from memascend.text import bytes_shown

# The number of parameters of each model. Tied weights count once. Of a multimodal model, only the language model
# counts.
PARAMETERS = {
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "tinyllama-1.1b": 1_100_048_384,
    "qwen-0.5b": 494_032_768,
    "qwen-1.5b": 1_543_714_304,
    "qwen-3b": 3_085_938_688,
    "qwen-7b": 7_615_616_512,
    "qwen-14b": 14_770_033_664,
    "qwen-32b": 32_763_876_352,
    "qwen-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "mistral-7b": 7_248_023_552,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "ministral3-3b": 3_429_006_336,
    "ministral3-8b": 8_489_553_920,
    "ministral3-14b": 13_506_073_600,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "gemma4-e2b": 4_628_569_344,
    "gemma4-e4b": 7_463_013_376,
    "gemma4-31b": 30_697_345_280,
    "gemma4-26b-a4b": 25_233_141_760,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "olmo2-7b": 7_298_617_344,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "glm4-9b": 9_400_279_040,
    "granite-8b": 8_170_864_640,
    "exaone4-32b": 32_003_216_384,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
}
SMALL = ("--tokens", 256, "--drive", "5,4")


def test_a_built_in_shape_needs_no_torch(python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = python("""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from memascend.cli import main
assert main(["plan", "lama-8b", "--gpu", "4090"]) == 1
assert main(["plan", "bert-base", "--gpu", "4090"]) == 1
words = ["plan", "llama-8b", "--gpu", "4090", "--drive", "5,4", "--host-memory", "48GiB"]
for more in ([], ["--verbose"], ["--json"], ["--fit"], ["--state", "8bit", "--activations", "ssd"]):
    assert main([*words, *more]) == 0
""")
    assert "lama-8b does not exist, and is not the name of a built-in model: did you mean llama-8b" in out
    assert "bert-base does not exist, and is not the name of a built-in model: the built-in names are llama-1b" in out
    assert "llama-8b: 8,030,261,248 parameters, described by the shape of llama-8b" in out
    assert re.search(r"a step +28\.\d s +mostly disk", out)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-8b"), ("llama3.2:1b", "llama-1b"),
        ("Qwen/Qwen2.5-32B-Instruct", "qwen-32b"), ("qwen2.5-32b", "qwen-32b"), ("Qwen/Qwen2.5-Coder-7B", "qwen-7b"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b"), ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"), ("google/gemma-3-12b-pt", "gemma3-12b"),
        ("allenai/OLMo-2-1124-7B-SFT", "olmo2-7b"), ("zai-org/GLM-4-9B-0414", "glm4-9b"),
        ("mistralai/Ministral-3-8B-Reasoning-2512", "ministral3-8b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
    ],
)  # fmt: skip
def test_shape_named_finds_the_shape_of_a_hub_name(name, shape):
    assert shape_named(Path(name))[0] == shape


def test_shape_named_finds_each_shape_by_its_name_in_any_case():
    assert [shape_named(Path(name.upper())) for name in SHAPES] == [*SHAPES.items()]


@pytest.mark.parametrize(
    ("name", "longest"),
    [("Qwen/Qwen3-4B-Instruct-2507", 262_144), ("Qwen/Qwen3-4B", 40_960), ("meta-llama/Meta-Llama-3-8B", 8192)],
)
def test_shape_named_sets_the_longest_sequence_of_the_named_version(name, longest):
    assert shape_named(Path(name))[1]["max_position_embeddings"] == longest


# Names that resemble the name of a known shape. In order, they name a different version, a different size, a quantised
# model, and an older generation.
@pytest.mark.parametrize(
    ("name", "near"),
    [("mistralai/Mistral-7B-v0.2", "mistral-7b-v0.1"), ("Qwen/Qwen2.5-33B", "Qwen2.5-32B"),
     ("unsloth/llama-3.1-8b-bnb-4bit", "Llama-3.1-8B"), ("Qwen/Qwen-7B-Chat", "qwen-7b")],
)  # fmt: skip
def test_shape_named_rejects_an_unknown_name_and_suggests_near_names(name, near):
    with pytest.raises(ConfigError, match=f"did you mean .*{near}"):
        shape_named(Path(name))


def test_plan_prefers_a_folder_to_a_built_in_shape_of_the_same_name(capsys, config, monkeypatch):
    monkeypatch.chdir(config.parent)
    (config.parent / "llama-8b").mkdir()
    config.rename(config.parent / "llama-8b" / "config.json")
    assert answer(capsys, "llama-8b", *SMALL)["model"]["parameters"] < 1_000_000


def test_shapes_have_the_parameters_of_their_models():
    found = {
        name: builtin.subject(name, shape, "bfloat16").parameters
        if shape["model_type"] in builtin.KINDS
        else sum(parameter.numel() for parameter in model.describe(Path(name), None)[0].parameters())
        for name, shape in SHAPES.items()
    }
    assert found == PARAMETERS


# Maps each `model_type` that `builtin` plans without transformers to the name of one shape of this type.
KINDS = {shape["model_type"]: name for name, shape in SHAPES.items() if shape["model_type"] in builtin.KINDS}


def reduced(kind):
    """Returns the shape of a kind, with few blocks, few experts and a small vocabulary. All widths stay the same."""
    shape = {**SHAPES[KINDS[kind]], "num_hidden_layers": 3, "vocab_size": 8192, "bos_token_id": 1, "eos_token_id": 2}
    for experts in {"num_experts", "num_local_experts"} & shape.keys():
        shape[experts] = 2 * shape["num_experts_per_tok"]
    return shape


@pytest.fixture
def of_transformers(tmp_path):
    """Returns `made`, which makes a subject of `memascend plan` from the model that transformers makes for a shape."""

    def made(shape, dtype=torch.bfloat16):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(shape))
        return model.subject(path, dtype=dtype, optimizer="AdamW", recomputes=True)

    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_built_in_shape_has_the_parameters_and_plan_of_transformers_model(
    of_transformers, tmp_path, monkeypatch, kind
):
    # Fixes the free disk space, because other tests may write to the disk between the two plans.
    monkeypatch.setattr("memascend.plan.decision.free_space_beside", lambda *_: 60 << 30)
    shape = reduced(kind)
    ours, theirs = builtin.subject(kind, shape, "bfloat16"), of_transformers(shape)
    tree = builtin.outline(shape, Dtype("bfloat16"))
    assert [(name, one.shape) for name, one in tree.named_parameters()] == [
        (name, tuple(one.shape)) for name, one in theirs.module.named_parameters()
    ]
    same = ("parameters", "trained", "tied_bytes", "dtype", "longest")
    assert [getattr(ours, name) for name in same] == [getattr(theirs, name) for name in same]
    for options in (Options(device="cuda", host_memory="8GiB"), Options(device="cpu", storage=str(tmp_path / "run"))):
        mine, other = (one.plan(options, 1) for one in (ours, theirs))
        assert mine.plan.to_dict() == other.plan.to_dict()
        assert TorchBytes.of(mine) == TorchBytes.of(other)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("state", [None, "fp32", "bf16", "8bit"])
def test_built_in_plan_equals_transformers_plan_for_each_state_format(of_transformers, tmp_path, state, dtype):
    shape = reduced("llama")
    ours, theirs = builtin.subject("llama", shape, dtype), of_transformers(shape, getattr(torch, dtype))
    for more in (
        {"host_memory": "6GiB"}, {"max_grad_norm": 1.0, "activations": "ssd"}, {"activations": "host"},
        {"durability": "none", "gradients": "ram", "storage": str(tmp_path / "run")},
    ):  # fmt: skip
        for device in ("cpu", "cuda"):
            options = Options(device=device, state=state, **more)
            mine, other = (one.plan(options, 1).plan for one in (ours, theirs))
            assert mine.to_dict() == other.to_dict(), (device, more)


# Without the slow tests, this test runs for most kinds that have their own factors in `_BLOCK_BYTES`, and for one kind
# with the default factors.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", usual(KINDS, *builtin._BLOCK_BYTES.keys() - {"olmo3"}, "llama"))
def test_built_in_trace_matches_transformers_flops_and_peak_memory(of_transformers, kind):
    # The vocabulary has its full size. So with the full loss, logits cause the peak of memory, as in real models. The
    # chunked loss never has the logits of all tokens in memory. So with 128 sequences, blocks cause the peak.
    shape = {**reduced(kind), "vocab_size": SHAPES[KINDS[kind]]["vocab_size"]}
    subjects = builtin.subject(kind, shape, "bfloat16"), of_transformers(shape)
    batches = [Batch(sequences=2, length=256, loss="full"), Batch(sequences=128, length=256, loss="chunked")]
    if kind == "llama":
        batches += [Batch(sequences=count, length=256, loss="chunked", on_host=count == 4) for count in (4, 16)]
    for batch in batches:
        mine, other = (subject.trace(batch) for subject in subjects)
        assert (mine.tokens, mine.loss) == (other.tokens, other.loss) == (batch.tokens, batch.loss)
        assert (mine.forward, mine.backward) == pytest.approx((other.forward, other.backward), rel=0.01)
        assert (mine.peak, mine.kept) == pytest.approx((other.peak, other.kept), rel=0.1), batch


@pytest.mark.parametrize(
    ("text", "name", "tflops", "gib", "link"),
    [
        ("rtx-4080", "RTX 4080", 97.5, 16, 25e9), ("nvidia h100-pcie", "H100 PCIe", 756, 80, 50e9),
        ("RTX 4060 Ti 16GB", "RTX 4060 Ti 16 GB", 44.1, 16, 12.5e9), ("5060ti", "RTX 5060 Ti 8 GB", 47.4, 8, 25e9),
        ("Tesla V100-32GB", "V100 32 GB", 125, 32, 12e9), ("a100", "A100 80 GB", 312, 80, 25e9),
        ("GeForce RTX 4070 SUPER", "RTX 4070 Super", 71, 12, 25e9), ("a100-40", "A100 40 GB", 312, 40, 25e9),
    ],
)  # fmt: skip
def test_parse_gpu_gives_name_tflops_memory_and_link_of_a_card(text, name, tflops, gib, link):
    card = parse_gpu(text)
    assert (card.name, card.tflops, card.nbytes, card.link) == (name, tflops, gib << 30, link)


def test_plan_advises_fp16_for_a_gpu_without_bf16(capsys, config):
    for kind, says in (("bf16", True), ("fp16", False)):
        assert (
            "it has no units for bfloat16, so use --dtype fp16"
            in shown(capsys, config, "--gpu", "T4", "--dtype", kind, *SMALL)
        ) == says
    with pytest.raises(ConfigError, match="5060ti8, 5060ti16, 5070"):
        parse_gpu("5055")


def test_without_a_gpu_this_processor_is_measured(capsys, config, monkeypatch):
    asked = []
    monkeypatch.setattr("memascend.plan.hardware.product_flops", lambda kind: asked.append(kind) or 2e6)
    found = answer(capsys, config, *SMALL)
    assert asked == ["bfloat16", "float32"]
    assert found["step"]["bound"] == "compute"
    # `plan` assumes that a step computes at half of the speed of a matrix product. The disk adds less than 1% to the
    # time.
    assert found["step"]["seconds_per_step"] == pytest.approx(found["torch"]["flops"] / 1e6, rel=0.01)
    assert found["processor_flops"] == 2e6
    assert main(["plan", str(config), *map(str, SMALL), "--dtype", "fp32"]) == 0
    assert "assumed: 50% of its measured 0 GFLOPS)" in (capsys.readouterr().out)
    # If no GPU is found and `--gpu` is not given, `plan` does not know the speed of the GPU.
    assert "give --gpu G" in shown(capsys, config, *SMALL, "--device", "cuda")


def test_plan_advises_float32_for_a_processor_without_units_for_bfloat16(capsys, config, monkeypatch):
    advice = "; it computes bfloat16 25 times slower than float32, so use --dtype float32"
    for fast, says in ((25, True), (3, False)):
        speeds = {"bfloat16": 2e9, "float32": fast * 2e9}
        monkeypatch.setattr("memascend.plan.hardware.product_flops", lambda kind, speeds=speeds: speeds[kind])
        for words in ([], ["--verbose"], ["--dtype", "fp32"]):
            assert main(["plan", str(config), *map(str, SMALL), *words]) == 0
            assert (advice in capsys.readouterr().out) == (says and "fp32" not in words)


def test_product_flops_measures_a_plausible_speed():
    assert 1e7 < product_flops("float32") < 1e15


def test_paths_on_one_file_system_share_its_space_and_speed(capsys, config, monkeypatch):
    monkeypatch.setattr("memascend.cli.storage._TRIAL_SECONDS", 0.05)
    one, two = config.parent / "one", config.parent / "two"
    one.mkdir()
    two.mkdir()
    alone, both = (
        answer(capsys, config, "--tokens", 256, "--gpu", "4090", *words)
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


def test_activations_ssd_moves_planned_bytes_from_gpu_to_disk(capsys, config, monkeypatch):
    words = config, "--drive", "5,4", "--tokens", 65_536, "--length", 256, "--accumulation-steps", 8
    words = *words, "--host-memory", "default"
    here = answer(capsys, *words, "--gpu", "165,24,25")
    kept = here["torch"]["kept_bytes"]
    card = "--gpu", f"165,{(here['device_bytes'] - 3 * kept + (1 << 30)) / 1e9},25"
    problem = answer(capsys, *words, *card, status=1)["problems"][0]
    assert f"ssd or host, which moves {bytes_shown(7 * kept)} of the other 7 micro-batches off the GPU" in problem
    away = answer(capsys, *words, *card, "--activations", "ssd")
    files = 8 * kept - away["plan"]["host"]["activations"]
    assert away["device_bytes"] == here["device_bytes"] - 7 * kept
    assert away["disk"]["bytes"] == here["disk"]["bytes"] + files
    assert away["written_bytes_per_step"] == here["written_bytes_per_step"] + files
    assert away["read_bytes_per_step"] == here["read_bytes_per_step"] + files
    out = shown(capsys, *words, *card, "--activations", "ssd")
    assert f"{bytes_shown(files)} of it checkpointed activations" in out
    assert "activations='ssd')" in out or 'activations="ssd")' in out
    # With `--activations host` and a budget that has room for all activations, no activation is written to a file.
    inside = answer(capsys, *words, *card, "--activations", "host", "--host-memory", "4GiB")
    assert inside["disk"]["bytes"] == here["disk"]["bytes"]
    monkeypatch.setattr("memascend.plan.decision.free_space_beside", lambda *_: away["disk"]["bytes"] - 1)
    words = *words, *card, "--activations", "ssd", "--storage", config.parent
    assert "of disk space, but only" in answer(capsys, *words, status=1)["problems"][0]


def test_plan_for_another_machine_uses_the_ram_option_or_assumes_64_gb(capsys):
    words = ("llama-8b", "--gpu", "4090", "--drive", "5,4", "--tokens", 2048)
    plain, given = answer(capsys, *words), answer(capsys, *words, "--ram", "128GB")
    assert (plain["ram_bytes"], plain["ram_assumed"]) == (64 * 10**9, True)
    assert (given["ram_bytes"], given["ram_assumed"]) == (128 * 10**9, False)
    assert plain["plan"]["budget"] == 47 << 30
    assert given["plan"]["budget"] == 95 << 30
    assert given["step"]["seconds_per_step"] < plain["step"]["seconds_per_step"]
    # `--ram` is the RAM of the whole machine. The two ranks share this RAM.
    assert answer(capsys, *words, "--ranks", 2)["plan"]["budget"] < 24 << 30
    # If `--host-memory` is given, `plan` compares the budget with the RAM only if `--ram` is given as well.
    assert answer(capsys, *words, "--host-memory", "90GiB")["ram_bytes"] is None
    problem = answer(capsys, *words, "--host-memory", "90GiB", "--ram", "64GB", status=1)["problems"][0]
    assert "the machine has 59.6 GiB of RAM, but the run needs " in problem
    out = shown(capsys, *words)
    assert "GiB of RAM of 59.6 GiB (--ram), " in out
    assert 'host_memory="auto"' in out
    assert "--host_memory" not in out


def test_full_drive_problem_names_large_files_and_smaller_state_formats(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("memascend.cli.plan.answer._LARGE", 1000)
    monkeypatch.setattr("memascend.plan.decision.free_space_beside", lambda *_: 50 << 30)
    monkeypatch.setattr("memascend.cli.plan.machine.drive_at", lambda _: (None, {}))
    (tmp_path / "old.store").write_bytes(bytes(2000))
    (tmp_path / "notes.txt").write_bytes(bytes(10))
    words = ("qwen-3b", "--gpu", "4090", "--drive", "5,4", "--storage", tmp_path / "run.store")
    problem = answer(capsys, *words, status=1)["problems"][0]
    output = re.fullmatch(
        r"the run needs ([\d.]+) GiB of disk space, but only 50 GiB are free: free another ([\d.]+) GiB "
        r"\(for example, (\S+) has 1.95 KiB\), or use a larger drive, or make the store smaller "
        r"\(--state bf16 needs ([\d.]+) GiB; --state 8bit needs ([\d.]+) GiB\)",
        problem,
    )
    needed, missing, file, half, eighth = output.groups()
    assert float(missing) == pytest.approx(float(needed) - 50, abs=0.2)
    assert file == str(tmp_path / "old.store")
    assert float(needed) > float(half) > float(eighth)


def test_gpu_here_maps_driver_names_to_known_cards(monkeypatch):
    monkeypatch.setattr("memascend.plan.hardware.has_device_file", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=25 << 30))
    for name, card in (
        ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super"), ("NVIDIA A100-SXM4-40GB", "A100 80 GB"),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert (gpu_here().name, gpu_here().nbytes) == (card, 25 << 30)
    # The names "RTX A1000" and "T400" begin like the names of known cards. The name of a laptop's GPU contains the name
    # of a faster card.
    for name in ("NVIDIA Something", "NVIDIA RTX A1000", "NVIDIA T400 4GB", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert gpu_here() is None


def test_drive_at_measures_only_reads_if_a_path_is_a_raw_device(monkeypatch):
    """The paths are a file system and a raw device, whose write speed is not measured."""
    mean = Speed(nbytes=4 << 30, seconds=1.0, cpu_seconds=0.1)
    system = {"read": mean, "write": mean, "mixed": mean}
    monkeypatch.setattr(machine, "speeds_at", lambda path: {"read": mean} if path.name == "raw" else system)
    monkeypatch.setattr(machine, "_system", hash)
    for paths in ([Path("folder"), Path("raw")], [Path("raw"), Path("folder")]):
        drive, speeds = machine.drive_at(paths)
        assert drive is None
        assert [*speeds] == ["read"]


def test_the_blocks_that_measure_a_drive_differ():
    with blocks(4096, 8) as tensors:
        assert len({tensor.numpy().tobytes() for tensor in tensors}) == 8
