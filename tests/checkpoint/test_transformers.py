"""Tests checkpoints of transformers' models: names of the hub, models on meta, and quantized files in MXFP4 and FP8."""

import json

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.bits import same_bits, same_states
from support.chains import offloaded as begun
from support.chains import train, values
from support.quantized import in_mxfp4, quantize
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, Qwen2Config, Qwen2MoeConfig, T5Config

import memascend
import memascend.trainer
from memascend.checkpoint import files as tensorfile
from memascend.checkpoint import writer as saving
from memascend.checkpoint.weights import WeightFiles
from memascend.errors import ConfigError

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 97}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SMALL, num_key_value_heads=2, intermediate_size=48, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=97, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    # With more than ten experts, the alphabetical order of their names is not their numerical order.
    "mixtral": lambda: MixtralConfig(**SMALL, num_key_value_heads=2, intermediate_size=48, num_local_experts=12),
    "experts of qwen2": lambda: Qwen2MoeConfig(
        **SMALL,
        num_key_value_heads=2,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=12,
    ),
}
TOKENS = torch.arange(24).view(2, 12) * 5 % 97


pytestmark = pytest.mark.usefixtures("quiet")


def trained(model, optimizer, steps=2):
    torch.manual_seed(4)  # dropout draws random numbers
    return train(model, optimizer, range(steps), lambda model, _: model(input_ids=TOKENS, labels=TOKENS).loss)


def bodiless(config, dtype=torch.bfloat16):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def logits(model):
    model.eval()
    with torch.no_grad():
        found = model(input_ids=TOKENS).logits
    model.train()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_hub_files_load_into_a_meta_model_and_save_for_from_pretrained(tmp_path, monkeypatch, name):
    """The model starts on meta and reads its weights from several files with the hub's names, as large models do."""
    monkeypatch.setattr(tensorfile, "FILE_BYTES_MAX", 20_000)
    config = CONFIGS[name]()
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    before = values(plain)
    plain.save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    files = sorted((tmp_path / "hub").glob("*.safetensors"))
    assert len(files) > 1
    keys = [key for file in files for key in safe_open(file, "pt").keys()]  # noqa: SIM118
    has_experts = any("experts" in key for key in before)
    assert has_experts == any(".experts.11." in key for key in keys), (
        "the hub's names equal the model's, so nothing is tested"
    )
    model, optimizer = begun(tmp_path / "one", bodiless(config), gradients="ssd", weights=tmp_path / "hub")
    with optimizer:
        assert same_states(values(model), before)
        assert torch.equal(logits(model), logits(plain))
        trained(model, optimizer)
        optimizer.save(tmp_path / "saved")
        model.save_pretrained(tmp_path / "theirs")
        here = logits(model)
        losses = trained(model, optimizer)
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 1
    for saved in ("saved", "theirs"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / saved)
        assert (type(again), again.dtype) == (type(model), torch.bfloat16)
        assert torch.equal(logits(again), here)
    other, optimizer = begun(tmp_path / "two", bodiless(config), gradients="ssd", checkpoint=tmp_path / "saved")
    with optimizer:
        assert trained(other, optimizer) == losses


def test_missing_or_mistyped_expert_is_rejected_by_name(tmp_path):
    config = CONFIGS["mixtral"]()
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    tensors = load_file(file)
    one = "model.layers.1.block_sparse_moe.experts.7.w1.weight"

    def refused(match):
        save_file(tensors, file)
        with pytest.raises(ConfigError, match=match):
            begun(tmp_path / "run", bodiless(config), weights=tmp_path / "hub")
        assert not (tmp_path / "run").exists()

    tensors[one] = tensors[one].float()
    refused(r"layers.1.mlp.experts.gate_up_proj is float32 of shape \[12, 96, 32\], not bfloat16")
    del tensors[one]
    refused("cannot make model.layers.1.mlp.experts.gate_up_proj from")


def test_model_on_meta_is_initialised_from_the_torch_seed(tmp_path):
    def initialised(seed, folder):
        torch.manual_seed(seed)
        model, optimizer = begun(tmp_path / folder, bodiless(CONFIGS["qwen2"](), torch.float32), torch.optim.SGD)
        with optimizer:
            found = values(model)
            assert 1 < trained(model, optimizer, 1)[0] < 20
            return found

    one, same, other = initialised(1, "one"), initialised(1, "same"), initialised(2, "other")
    assert same_states(one, same)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_save_warns_of_names_that_from_pretrained_misreads(tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen2"]())
    model, optimizer = begun(None, model, torch.optim.SGD)
    with optimizer:
        optimizer.save(tmp_path / "saved")
        monkeypatch.setattr(saving, "misread_names", lambda _: ["model.odd"])
        with pytest.warns(UserWarning, match=r"takes model.odd for another"):
            optimizer.save(tmp_path / "saved")


def test_head_untied_in_the_files_is_rejected_with_a_working_remedy(tmp_path):
    # As for Flan-T5, transformers ties the head to the embedding, but the files have different values for the head.
    # from_pretrained() loads the values of the files.
    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    torch.manual_seed(0)
    real = transformers.T5ForConditionalGeneration(config)
    real.lm_head.weight = torch.nn.Parameter(torch.randn_like(real.lm_head.weight))
    real.all_tied_weights_keys.pop("lm_head.weight")
    real.save_pretrained(tmp_path / "hub")
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "hub").train()
    assert loaded.lm_head.weight is not loaded.shared.weight
    loaded, in_hand = begun(tmp_path / "a", loaded)
    with in_hand:
        wanted = trained(loaded, in_hand)

    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    says = r"different values in the files: shared.weight and lm_head.weight"
    with pytest.raises(ConfigError, match=says) as refused:
        begun(None, model, weights=tmp_path / "hub")
    remedy = str(refused.value).partition("`")[2].partition("`")[0]
    exec(remedy, {"model": model, "torch": torch})  # noqa: S102
    model, offloaded = begun(tmp_path / "b", model, weights=tmp_path / "hub")
    with offloaded:
        assert trained(model, offloaded) == wanted
        offloaded.save(tmp_path / "out")
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is not again.shared.weight


# --- MXFP4 and FP8 -------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def mxfp4(name, tensor):
    """Does what `in_mxfp4` does, and sets two scales to the smallest and the largest exponent of MXFP4."""
    stored = in_mxfp4(name, tensor, (100, 130))
    for part, scales in stored.items():
        if part.endswith("_scales"):
            scales[0, 0, 0], scales[0, 1, 0] = 0, 254
    return stored


def fp8(scales_of):
    def stored(name, tensor):
        if tensor.dim() != 2 or not name.endswith("proj.weight"):
            return {name: tensor}
        codes = tensor.mul(100).to(torch.float8_e4m3fn)
        grid = [-(-size // 128) for size in tensor.shape]
        return {name: codes, f"{name}_scale_inv": scales_of(grid)}

    return stored


def wide_scales(grid):
    return torch.rand(grid, generator=torch.Generator().manual_seed(7)) / 100


def exponents(grid):
    return torch.randint(118, 124, grid, dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
CASES = {
    "MXFP4": (transformers.GptOssConfig(**SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}), mxfp4, MXFP4),
    "FP8": (transformers.Qwen3Config(**SIZES), fp8(wide_scales), FP8),
    "FP8, scales that are exponents": (transformers.Qwen3Config(**SIZES), fp8(exponents), FP8),
    # Mistral's files have one scale for each matrix. They also have a scale for the activations of each projection.
    "FP8, a scale for a matrix": (
        transformers.MistralConfig(**SIZES),
        lambda name, tensor: {
            **fp8(lambda _: torch.tensor(0.03, dtype=torch.bfloat16))(name, tensor),
            **({name.replace(".weight", ".activation_scale"): torch.tensor(0.5)} if "proj" in name else {}),
        },
        {**FP8, "activation_scheme": "static", "weight_block_size": None},
    ),
    # The hub's files have separate matrices for each expert.
    "FP8, a mixture of experts": (transformers.Qwen3MoeConfig(**SIZES | EXPERTS), fp8(wide_scales), FP8),
}  # fmt: skip


@pytest.fixture
def quantized(tmp_path):
    """Returns `made`, which writes the checkpoint of a case and returns the checkpoint's folder."""

    def made(case):
        config, stored, method = CASES[case]
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        folder = tmp_path / "model"
        model.save_pretrained(folder)
        quantize(folder, stored, method)
        return folder

    return made


def by_transformers(folder, dtype):
    kinds = {"mxfp4": transformers.Mxfp4Config, "fp8": transformers.FineGrainedFP8Config}
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    how = kinds[method](dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=how)


def streamed(model, storage, **options):
    """Offloads a model that computes on the CPU. The optimizer is SGD without momentum, which has no state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return memascend.offload(model, optimizer, storage=storage, device="cpu", **options)


def same_values(one, other):
    assert one.keys() == other.keys()
    assert [name for name, values in one.items() if not same_bits(values, other[name])] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_a_quantized_checkpoint_is_read_as_transformers_dequantizes_it(tmp_path, quantized, case, dtype):
    folder = quantized(case)
    # Some tensors of an FP8 checkpoint are not quantized. transformers loads these tensors in the dtype of the files.
    wanted = {name: values.to(dtype, copy=True) for name, values in by_transformers(folder, dtype).state_dict().items()}
    with memascend.trainer.loading():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert all(parameter.is_meta for parameter in model.parameters())
    model, optimizer = streamed(model, tmp_path / "a.store")
    with optimizer:
        same_values(model.state_dict(), wanted)
        optimizer.save(tmp_path / "saved")
    # save() writes weights without quantization, so the saved config has no `quantization_config`.
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    same_values(again.state_dict(), wanted)
    if dtype != torch.bfloat16:
        return
    # Without loading(), offload() reads the same values into a model that other code made on meta.
    with torch.device("meta"):
        bare = transformers.AutoModelForCausalLM.from_config(CASES[case][0], dtype=dtype)
    bare, optimizer = streamed(bare, tmp_path / "b.store", weights=folder)
    with optimizer:
        same_values(bare.state_dict(), wanted)


def test_incomplete_last_fp8_block_uses_the_block_size_of_the_config(tmp_path, monkeypatch):
    """Tests a matrix whose last block of 128 rows is incomplete. DeepSeek has such matrices, with 576 rows.

    transformers cannot dequantise such a matrix. The test reads the matrix in several parts.
    """
    monkeypatch.setattr("memascend.checkpoint.quantized._PART", 320 * 50)
    codes = torch.randn(192, 320).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3)
    save_file({"a.weight": codes, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    wide = scales.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)[:, :320]
    assert same_bits(WeightFiles(tmp_path).at("a.weight", torch.float32), codes.float() * wide)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "compressed-tensors"])
def test_other_quantizations_are_rejected_with_the_model_to_download(tmp_path, quantized, method):
    folder = quantized("FP8").rename(tmp_path / "Qwen3-8B-AWQ-4bit")
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps(described))
    says = rf"is quantized \(.*{method}.*\).*Download the model without quantization \(.*Qwen3-8B\)"
    with pytest.raises(memascend.ConfigError, match=says), memascend.trainer.loading():
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CASES["FP8"][0], dtype=torch.bfloat16)
    with pytest.raises(memascend.ConfigError, match=says):
        streamed(model, tmp_path / "a.store", weights=folder)
    assert not (tmp_path / "a.store").exists()


def test_loading_rejects_a_quantization_config(tmp_path):
    transformers.AutoModelForCausalLM.from_config(CASES["FP8"][0]).save_pretrained(tmp_path)
    how = transformers.BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(memascend.ConfigError, match="Remove quantization_config="), memascend.trainer.loading():
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how)


def test_quantization_config_may_be_passed_or_nested_in_text_config(tmp_path, quantized):
    folder = quantized("FP8")
    wanted = by_transformers(folder, torch.bfloat16).state_dict()
    config = transformers.AutoConfig.from_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    described["text_config"] = {"quantization_config": described.pop("quantization_config")}
    (folder / "config.json").write_text(json.dumps(described))
    nested = WeightFiles(folder)
    (folder / "config.json").unlink()
    with memascend.trainer.loading():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config)
    model, optimizer = streamed(model, tmp_path / "a.store")
    with optimizer:
        same_values(model.state_dict(), wanted)
    assert all(same_bits(nested.at(name), values) for name, values in wanted.items())
    with pytest.raises(memascend.ConfigError, match=r"_scale_inv\), but no config\.json there"):
        WeightFiles(folder)


@pytest.mark.parametrize(
    ("case", "lose"), [("MXFP4", "_scales"), ("MXFP4", "_blocks"), ("FP8", "_scale_inv"), ("FP8", "q_proj.weight")]
)
def test_codes_without_scales_and_scales_without_codes_are_refused_by_name(quantized, case, lose):
    folder = quantized(case)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    lost = next(name for name in tensors if name.endswith(lose))
    del tensors[lost]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(memascend.CorruptionError, match=lost.rpartition(".")[0]), memascend.trainer.loading():
        transformers.AutoModelForCausalLM.from_pretrained(folder)
