"""Tests checkpoints in MXFP4 and FP8: streamed into a store, they have the bits of transformers' own dequantisation."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.bits import same_bits
from support.quantized import in_mxfp4, quantize

import memascend
import memascend.trainer
from memascend.checkpoint.weights import WeightFiles

SMALL = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def mxfp4(name, tensor):
    """With the least and the greatest exponent, too."""
    stored = in_mxfp4(name, tensor, (100, 130))
    for part, values in stored.items():
        if part.endswith("_scales"):
            values[0, 0, 0], values[0, 1, 0] = 0, 254
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
    "MXFP4": (transformers.GptOssConfig(**SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}), mxfp4, MXFP4),
    "FP8": (transformers.Qwen3Config(**SMALL), fp8(wide_scales), FP8),
    "FP8, scales that are exponents": (transformers.Qwen3Config(**SMALL), fp8(exponents), FP8),
    # As Mistral stores it, with what its kernels need for activations.
    "FP8, a scale for a matrix": (
        transformers.MistralConfig(**SMALL),
        lambda name, tensor: {
            **fp8(lambda _: torch.tensor(0.03, dtype=torch.bfloat16))(name, tensor),
            **({name.replace(".weight", ".activation_scale"): torch.tensor(0.5)} if "proj" in name else {}),
        },
        {**FP8, "activation_scheme": "static", "weight_block_size": None},
    ),
    # As the hub has them, a matrix for each expert.
    "FP8, a mixture of experts": (transformers.Qwen3MoeConfig(**SMALL | EXPERTS), fp8(wide_scales), FP8),
}  # fmt: skip


@pytest.fixture
def quantized(tmp_path):
    """Writes a checkpoint of a case, and returns its folder."""

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
    """Offloaded to the CPU by an optimizer without state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return memascend.offload(model, optimizer, storage=storage, device="cpu", **options)


def same_values(one, other):
    assert one.keys() == other.keys()
    assert [name for name, values in one.items() if not same_bits(values, other[name])] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_a_quantized_checkpoint_is_read_as_transformers_dequantizes_it(tmp_path, quantized, case, dtype):
    folder = quantized(case)
    # What is not quantized in an FP8 checkpoint, transformers leaves in the files' dtype.
    wanted = {name: values.to(dtype, copy=True) for name, values in by_transformers(folder, dtype).state_dict().items()}
    with memascend.trainer.loading():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert all(parameter.is_meta for parameter in model.parameters())
    model, optimizer = streamed(model, tmp_path / "a.store")
    with optimizer:
        same_values(model.state_dict(), wanted)
        optimizer.save(tmp_path / "saved")
    # What is saved is a model that never was quantized.
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    same_values(again.state_dict(), wanted)
    if dtype != torch.bfloat16:
        return
    # Without loading(), for a model that somebody else made on meta.
    with torch.device("meta"):
        bare = transformers.AutoModelForCausalLM.from_config(CASES[case][0], dtype=dtype)
    bare, optimizer = streamed(bare, tmp_path / "b.store", weights=folder)
    with optimizer:
        same_values(bare.state_dict(), wanted)


def test_blocks_that_end_in_the_midst_are_those_of_the_config(tmp_path, monkeypatch):
    """DeepSeek's matrices of 576 rows, here read in several parts: transformers divides no such matrix."""
    monkeypatch.setattr("memascend.checkpoint.quantized._PART", 320 * 50)
    codes = torch.randn(192, 320).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3)
    save_file({"a.weight": codes, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    wide = scales.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)[:, :320]
    assert same_bits(WeightFiles(tmp_path).at("a.weight", torch.float32), codes.float() * wide)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "compressed-tensors"])
def test_other_quantisations_are_refused_with_what_to_download(tmp_path, quantized, method):
    folder = quantized("FP8").rename(tmp_path / "Qwen3-8B-AWQ-4bit")
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps(described))
    says = rf"is quantized \(.*{method}.*\).*download the model without quantization \(.*Qwen3-8B\)"
    with pytest.raises(memascend.ConfigError, match=says), memascend.trainer.loading():
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CASES["FP8"][0], dtype=torch.bfloat16)
    with pytest.raises(memascend.ConfigError, match=says):
        streamed(model, tmp_path / "a.store", weights=folder)
    assert not (tmp_path / "a.store").exists()


def test_a_model_is_not_quantized_while_it_is_loaded(tmp_path):
    transformers.AutoModelForCausalLM.from_config(CASES["FP8"][0]).save_pretrained(tmp_path)
    how = transformers.BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(memascend.ConfigError, match="leave it out"), memascend.trainer.loading():
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how)


def test_the_config_may_be_elsewhere_and_nested(tmp_path, quantized):
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
    with pytest.raises(memascend.ConfigError, match=r"_scale_inv, and no config\.json there says"):
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
