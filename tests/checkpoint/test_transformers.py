"""Tests what transformers reads of a checkpoint, and what it leaves on meta."""

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.bits import same_states
from support.chains import offloaded as begun
from support.chains import train, values
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, Qwen2Config, Qwen2MoeConfig, T5Config

from memascend.checkpoint import files as tensorfile
from memascend.checkpoint import writer as saving
from memascend.errors import ConfigError

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 97}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SMALL, num_key_value_heads=2, intermediate_size=48, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=97, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    # More than ten experts: their names in alphabetical order are in another.
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
    torch.manual_seed(4)  # for dropout
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
def test_from_the_hubs_files_to_from_pretrained(tmp_path, monkeypatch, name):
    """On meta, by the names that the hub has; in parts, with an index, as what is large is saved."""
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
        "the hub's names are the model's: this shows nothing"
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


def test_experts_that_are_not_all_there(tmp_path):
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


def test_initialised_from_the_seed(tmp_path):
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


def test_names_that_from_pretrained_would_take_for_others_are_told(tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen2"]())
    model, optimizer = begun(None, model, torch.optim.SGD)
    with optimizer:
        optimizer.save(tmp_path / "saved")
        monkeypatch.setattr(saving, "misread_names", lambda _: ["model.odd"])
        with pytest.warns(UserWarning, match=r"takes model.odd for another"):
            optimizer.save(tmp_path / "saved")


def test_a_head_that_the_files_untie_is_refused_with_a_remedy_that_works(tmp_path):
    # Flan-T5: its config ties the head, its files do not, and from_pretrained() goes by the files.
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
