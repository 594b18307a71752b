"""Tests that `memascend plan` predicts the memory and bytes of a run from the model's config alone."""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import save_file
from support.chains import train
from support.planned import answer, shown

import memascend
from memascend.cli import main
from memascend.cli.plan.model import describe
from memascend.cli.storage import mount_point
from memascend.plan.options import parse_bytes

TEXT = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "Qwen2": ("Qwen2ForCausalLM", {**TEXT, "model_type": "qwen2", "tie_word_embeddings": False}),
    "GPT-2, tied": (
        "GPT2LMHeadModel",
        {"model_type": "gpt2", "vocab_size": 2048, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 64},
    ),
    "Mixtral": ("MixtralForCausalLM", {**TEXT, "model_type": "mixtral", "num_local_experts": 4}),
    "T5": (
        "T5ForConditionalGeneration",
        {"model_type": "t5", "vocab_size": 2048, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2,
         "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "ViT": (
        "ViTForImageClassification",
        {"model_type": "vit", "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 256, "image_size": 32, "patch_size": 8},
    ),
}  # fmt: skip


def written(folder, name):
    architecture, values = CONFIGS[name]
    path = folder / "config.json"
    path.write_text(json.dumps({"architectures": [architecture], "dtype": "float32", **values}))
    return path


def batch(name):
    generator = torch.Generator().manual_seed(0)
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 2048, (2, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_plan_from_config_equals_the_run_and_bounds_its_host_memory(capsys, tmp_path, name):
    import transformers

    config = written(tmp_path, name)
    smallest = answer(capsys, config, "--gradients", "fused")["plan"]["smallest"]
    plans = {budget: answer(capsys, config, "--gradients", "fused", *given)["plan"] for budget, given in (
        (smallest, ("--host-memory", smallest)), (None, ("--host-memory", "default")),
    )}  # fmt: skip
    for budget, plan in plans.items():
        torch.manual_seed(0)
        architecture, _ = CONFIGS[name]
        model = getattr(transformers, architecture)(transformers.AutoConfig.from_pretrained(tmp_path))
        model, optimizer = memascend.offload(
            model, torch.optim.AdamW(model.parameters()), storage=tmp_path, existing="replace", gradients="fused",
            host_memory=budget,
        )  # fmt: skip
        with optimizer:
            train(model, optimizer, range(2), lambda model, _: model(**batch(name)).loss)
            assert json.loads(json.dumps(optimizer.plan.to_dict())) == plan
            held = optimizer.report().to_dict()["host"]["peak"]
            assert held <= plan["host_peak"]
            # The queue of the smallest plan has room for the largest gradient. `spare` is the additional room in the
            # queue of `plan`. Timing decides how many gradients wait in the queue, so the run may not need `spare`.
            spare = plan["host"]["gradients"] - plans[smallest]["host"]["gradients"]
            assert held >= 0.94 * plan["host_peak"] - spare
            if budget == smallest:
                assert held >= 0.94 * plan["host_peak"]


def test_plan_options_change_written_bytes_memory_and_step_time(capsys, tmp_path):
    config = written(tmp_path, "Qwen2")
    default = ("--host-memory", "default")
    plain = answer(capsys, config, *default)
    clipped = answer(capsys, config, "--max-grad-norm", "1.0", *default)
    assert "gradients" in clipped["plan"]["written_bytes"]
    assert "gradients" not in plain["plan"]["written_bytes"]
    assert clipped["steps_per_100_tb_written"] < plain["steps_per_100_tb_written"]
    at_speed = ("--gpu", "4090", "--drive", "gen4", *default, "--max-grad-norm", "1.0")
    step, plain_step = (answer(capsys, config, *words)["step"] for words in (at_speed, at_speed[:6]))
    assert plain_step["seconds_per_step"] < step["seconds_per_step"]
    assert plain["steps_per_100_tb_written"] == 10**14 // plain["written_bytes_per_step"]
    half = answer(capsys, config, "--dtype", "bf16", *default)
    assert half["plan"]["host_peak"] < plain["plan"]["host_peak"]
    # For each element, the value and the gradient have 2 bytes each. The master weight and the two moments have 4 bytes
    # each.
    assert half["in_memory_bytes"] == 16 * half["model"]["parameters"]
    plainest = answer(capsys, config, "--optimizer", "sgd")
    assert plainest["plan"]["disk_bytes"] < plain["plan"]["disk_bytes"]
    kept = answer(capsys, config, "--gradients", "ram")
    assert kept["plan"]["host"]["gradients"] == 4 * kept["model"]["parameters"]


def test_plan_measures_the_disk_only_with_the_storage_option(capsys, tmp_path, monkeypatch):
    config = written(tmp_path, "ViT")
    monkeypatch.setattr("memascend.cli.storage._TRIAL_SECONDS", 0.05)
    measured = answer(capsys, config, "--storage", tmp_path)
    assert measured["gb_per_second"].keys() == {"read", "write", "mixed"}
    assert measured["disk"]["free_bytes"] > measured["disk"]["bytes"]
    assert measured["disk_seconds_per_step"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert answer(capsys, config)["gb_per_second"] is None
    out = shown(capsys, config)
    for words in ("assumed; --storage P", "steps write 100 TB", "Host memory", "update staging", "disk space"):
        assert words in out
    for words in ((), ("--drive", "5,4")):
        assert "does not exist" in shown(capsys, config, "--storage", tmp_path / "no" / "such", *words, status=1)


def test_a_path_that_does_not_exist_is_shown_with_its_drive(capsys, tmp_path):
    config = written(tmp_path, "ViT")
    for path, named in ((tmp_path, False), (tmp_path / "typo", True)):
        assert main(["plan", str(config), "--storage", str(path), "--drive", "5,4"]) == 0
        drive = f"free on the drive of {mount_point(tmp_path)} ({path} does not exist yet)"
        assert (drive in capsys.readouterr().out) == named


def test_plan_fails_if_free_ram_is_below_the_needed_host_memory(capsys, tmp_path, monkeypatch):
    config = written(tmp_path, "ViT")
    needed = answer(capsys, config, "--device", "cpu", "--host-memory", "default")["host_bytes"]
    for free, status in ((needed, 0), (needed - 1, 1)):
        limits = {"available": free, "cgroup_limit": None}
        monkeypatch.setattr("memascend.memory.limits", lambda limits=limits: limits)
        found = answer(capsys, config, "--device", "cpu", status=status)
        assert (found["fits"], found["host_free_bytes"]) == (not status, free)
        assert answer(capsys, config, "--gpu", "4090")["fits"]
    assert main(["plan", str(config), "--device", "cpu"]) == 1
    assert "of free RAM, but the run needs" in capsys.readouterr().out


def test_plan_fails_if_free_disk_space_is_below_the_store_size(capsys, tmp_path, monkeypatch):
    config = written(tmp_path, "ViT")
    monkeypatch.setattr("memascend.cli.storage._TRIAL_SECONDS", 0.05)
    needed = answer(capsys, config)["plan"]["disk_bytes"]
    for free, status in ((needed, 0), (needed - 1, 1)):
        monkeypatch.setattr("memascend.plan.decision.free_space_beside", lambda *_, free=free: free)
        assert ("free another" in shown(capsys, config, "--storage", tmp_path, status=status)) == bool(status)
        assert answer(capsys, config, "--storage", tmp_path, status=status)["disk"]["fits"] == (not status)


def parameters_of(path):
    return sum(parameter.numel() for parameter in describe(path, None)[0].parameters())


def test_a_head_that_from_pretrained_unties_is_counted(tmp_path):
    path = written(tmp_path, "T5")
    tied = parameters_of(path)
    head = 2048 * 128
    # In Flan-T5's config, `tie_word_embeddings` is false. `from_pretrained` unties the head, but `from_config` ties the
    # head anyway.
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "tie_word_embeddings": False}))
    assert parameters_of(path) == tied + head


def test_error_for_a_too_small_budget_names_the_smallest_working_budget(capsys, tmp_path):
    config = written(tmp_path, "GPT-2, tied")
    smallest = answer(capsys, config)["plan"]["smallest"]
    assert main(["plan", str(config), "--host-memory", str(smallest - 1)]) == 1
    output = re.search(
        r"--host-memory (\S+) is too small: the smallest budget that works is (\S+), of", capsys.readouterr().err
    )
    # The error prints the given budget and the smallest budget with enough digits that the two texts differ. The
    # printed smallest budget works as an option.
    assert output[1] != output[2]
    assert smallest <= parse_bytes(output[2]) < 1.01 * smallest
    assert answer(capsys, config, "--host-memory", output[2])["plan"]["host_peak"] <= parse_bytes(output[2])
    assert answer(capsys, config, "--host-memory", smallest)["plan"]["host_peak"] <= smallest


def test_plan_rejects_a_path_or_config_that_describes_no_model(capsys, tmp_path, monkeypatch):
    def refused(*words):
        return shown(capsys, *words, status=1)

    assert "does not exist" in refused(tmp_path / "nothing.json")
    assert "is not a model's config" in refused(tmp_path)
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert "is not a model's config" in refused(tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.write_text("no")
    assert "is not valid JSON" in refused(config)
    config.write_text("{}")
    assert "no model_type" in refused(config)
    for depth in ("num_hidden_layers", "n_layer", "encoder_layers"):
        config.write_text(json.dumps({"model_type": "llama", "text_config": {depth: 10**9}}))
        assert f"has {depth} = 1000000000, but memascend plans models of at most 10000 layers" in refused(config)
    config.write_text('{"model_type": "no such"}')
    assert "no such" in refused(config)
    written(tmp_path, "Qwen2")
    assert "--optimizer" in refused(config, "--optimizer", "Optimizer")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in refused(config)
    with pytest.raises(SystemExit) as ended:
        main(["plan"])
    assert ended.value.code == 2


def test_plan_for_an_absent_gpu_respects_the_device_memory_budget(tmp_path, capsys):
    """`memascend plan` plans for a GPU that this machine does not have.

    In the plan, only the index and the catalog of the host memory grow with the depth of the model, and device memory
    stays within the budget. If the device budget is too small, the error names a budget that works.
    """
    path = written(tmp_path, "Qwen2")
    deep = {**json.loads(path.read_text()), "num_hidden_layers": 24}
    (tmp_path / "deep.json").write_text(json.dumps(deep))
    hosts = []
    for name in ("config.json", "deep.json"):
        plan = answer(capsys, tmp_path / name, "--device", "cuda:1", "--host-memory", "default")["plan"]
        assert plan["device_peak"] == sum(plan["device"].values()) <= plan["device_budget"]
        assert {"unit staging", "gradient windows"} <= plan["host"].keys()
        hosts.append({owner: nbytes for owner, nbytes in plan["host"].items() if owner not in ("index", "catalog")})
    assert hosts[0] == hosts[1]
    assert main(["plan", str(path), "--device", "cuda", "--device-memory", "1KiB"]) == 1
    too_small = "--device-memory 1KiB is too small: the smallest budget that works is"
    works = re.search(rf"{too_small} (\S+), of", capsys.readouterr().err)[1]
    smallest = answer(capsys, path, "--device", "cuda", "--device-memory", works)["plan"]["device_smallest"]
    assert "Device memory:" in shown(capsys, path, "--device", "cuda", "--device-memory", smallest)
    assert main(["plan", str(path), "--device", "cuda", "--device-memory", str(smallest - 1)]) == 1
    assert main(["plan", str(path), "--device", "cpu", "--device-memory", "1GiB"]) == 1
