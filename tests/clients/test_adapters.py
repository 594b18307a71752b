"""Tests adapters by peft on offloaded models: trained and merged as in memory, added later by offloading anew."""

import contextlib

import peft
import pytest
import torch
import transformers
from support.bits import same_bits, same_states

import memascend

WIDTH, STEPS = 64, 4
CONFIG = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def language_model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=WIDTH,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )


def adapted(model):
    torch.manual_seed(1)
    return peft.get_peft_model(model, CONFIG)


def tokens(step):
    return torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps=range(STEPS)):
    losses = []
    for step in steps:
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def adamw(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, fused=True)


def values(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def written(model, offloaded):
    """The door for code that writes to weights."""
    return memascend.materialized(model, modify=True) if offloaded else contextlib.nullcontext()


@pytest.mark.parametrize("gradients", ["fused", "ssd"])
@pytest.mark.parametrize("over", ["adapters", "all"])
def test_adapters_train_and_merge_as_in_memory(tmp_path, gradients, over):
    found = []
    for offloaded in (False, True):
        model = adapted(language_model())
        if over == "all":
            model.requires_grad_(True)
        optimizer = adamw(model)
        if offloaded:
            model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "run.store", gradients=gradients)
        losses = train(model, optimizer)
        with model.disable_adapter(), torch.no_grad():
            losses.append(model(input_ids=tokens(9)).logits)
        saved = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
        with written(model, offloaded):
            merged = model.merge_and_unload()
        with torch.no_grad():
            losses.append(merged(input_ids=tokens(9)).logits)
        found.append((losses, saved, values(merged)))
        if offloaded:
            optimizer.close()
    (losses, saved, merged), (their_losses, their_saved, their_merged) = found
    assert all(map(same_bits, losses, their_losses))
    assert saved
    assert same_states(saved, their_saved)
    assert same_states(merged, their_merged)


def test_adapters_merged_and_taken_back_leave_training_as_it_was(tmp_path):
    found = []
    for offloaded in (False, True):
        model = adapted(language_model())
        optimizer = adamw(model)
        if offloaded:
            model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "run.store")
        losses = train(model, optimizer, range(2))
        with written(model, offloaded):
            model.merge_adapter()
        with torch.no_grad():
            losses.append(model(input_ids=tokens(9)).logits)
        with written(model, offloaded):
            model.unmerge_adapter()
        found.append((losses + train(model, optimizer, range(2, 5)), values(model)))
        if offloaded:
            optimizer.close()
    assert all(map(same_bits, found[0][0], found[1][0]))
    assert same_states(found[0][1], found[1][1])


def test_adapters_added_later_are_refused_until_the_model_is_offloaded_anew(tmp_path):
    plain = language_model()
    losses = train(plain, adamw(plain))
    model = language_model()
    model, optimizer = memascend.offload(model, adamw(model), storage=tmp_path / "run.store")
    same = losses[:2] == train(model, optimizer, range(2))
    with_adapters = adapted(model)
    with pytest.raises(memascend.ConfigError, match=r"lora_A.*save\(\).*offload\(\) anew"):
        train(model, optimizer, range(2, 4))
    # Nothing was changed by it, and without them training goes on.
    with_adapters.unload()
    model.requires_grad_(True)
    assert same
    assert losses[2:] == train(model, optimizer, range(2, 4))
    assert same_states(values(plain), values(model))
    optimizer.save(tmp_path / "saved")
    optimizer.close()
    found = []
    for folder in (None, tmp_path / "adapters.store"):
        model = adapted(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved"))
        optimizer = adamw(model)
        if folder is not None:
            model, optimizer = memascend.offload(model, optimizer, storage=folder)
        found.append(train(model, optimizer))
    assert all(map(same_bits, *found))
    optimizer.close()
