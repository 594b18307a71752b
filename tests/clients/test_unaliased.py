"""Tests that models as transformers, peft and the Trainer hold them are taken: nothing aliases a weight."""

import peft
import pytest
import torch
import transformers

import memascend

CONFIG = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["same dtype", "other dtype"])
def loaded(tmp_path, request):
    """From a folder: mapped where the file has the dtype that is asked for."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(CONFIG).save_pretrained(tmp_path / "saved")
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=request.param)


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def steps(model, optimizer):
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_from_pretrained_gives_is_taken(tmp_path, loaded):
    model, optimizer = memascend.offload(loaded, adamw(loaded), storage=tmp_path / "run.store")
    with optimizer:
        steps(model, optimizer)


def test_a_view_of_it_is_refused(tmp_path, loaded):
    kept = loaded.model.norm.weight.detach()
    with pytest.raises(memascend.ConfigError, match=r"model\.norm\.weight"):
        memascend.offload(loaded, adamw(loaded), storage=tmp_path / "run.store")
    del kept


@pytest.mark.filterwarnings("default")
def test_adapters_on_it_are_taken(tmp_path, loaded):
    model = peft.get_peft_model(loaded, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model, optimizer = memascend.offload(model, adamw(model), storage=tmp_path / "run.store")
    with optimizer:
        steps(model, optimizer)


@pytest.mark.filterwarnings("default")
def test_what_a_trainer_trained_is_taken(tmp_path, loaded):
    tokens = torch.arange(8)
    optimizer = adamw(loaded)
    arguments = transformers.TrainingArguments(
        tmp_path / "out", max_steps=2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
    )
    data = [{"input_ids": tokens, "labels": tokens}] * 4
    trainer = transformers.Trainer(loaded, arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    loaded.zero_grad()
    model, optimizer = memascend.offload(loaded, optimizer, storage=tmp_path / "run.store")
    with optimizer:
        steps(model, optimizer)
