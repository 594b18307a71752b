"""What transformers reads of a checkpoint, and what it leaves on meta."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, Qwen2Config

import memascend

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 97}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SMALL, num_key_value_heads=2, intermediate_size=48, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=97, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "mixtral": lambda: MixtralConfig(
        **SMALL, num_key_value_heads=2, intermediate_size=48, num_local_experts=4, tie_word_embeddings=False
    ),
}
TOKENS = torch.arange(24).view(2, 12) * 5 % 97


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def trained(model, optimizer, steps=2):
    torch.manual_seed(4)  # for dropout
    losses = []
    for _ in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model):
    model.eval()
    with torch.no_grad():
        found = model(input_ids=TOKENS).logits
    model.train()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_from_meta_to_from_pretrained(tmp_path, name):
    config = CONFIGS[name]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "one", gradients="ssd")
    with optimizer:
        losses = trained(model, optimizer)
        assert all(1 < loss < 20 for loss in losses), losses
        optimizer.save(tmp_path / "saved")
        here = logits(model)
        losses = trained(model, optimizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(plain) is type(model)
    assert plain.dtype == torch.bfloat16
    assert torch.equal(logits(plain), here)
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    other, optimizer = memascend.offload(
        other, optimizer, storage=tmp_path / "two", gradients="ssd", checkpoint=tmp_path / "saved"
    )
    with optimizer:
        assert trained(other, optimizer) == losses
