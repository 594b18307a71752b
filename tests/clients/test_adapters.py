"""Tests adapters by peft on offloaded models: trained and merged as in memory, added later by offloading anew."""

import peft
import pytest
import torch
import transformers
from clients.beside import both, door
from support.bits import same_bits, same_states
from support.chains import train, values

import memascend

STEPS = 4
CONFIG = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def language_model():
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, num_hidden_layers=4, **shape))


def adapted(model):
    torch.manual_seed(1)
    return peft.get_peft_model(model, CONFIG)


def tokens(step):
    return torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(step))


def loss_of(model, step):
    return model(input_ids=tokens(step), labels=tokens(step)).loss


def logits(model):
    with torch.no_grad():
        return model(input_ids=tokens(9)).logits


def adamw(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, fused=True)


@pytest.mark.parametrize(("gradients", "over"), [("fused", "adapters"), ("ssd", "all")])
def test_adapters_train_and_merge_as_in_memory(tmp_path, gradients, over):
    """Also merged and taken back between steps."""

    def make():
        model = adapted(language_model())
        if over == "all":
            model.requires_grad_(True)
        return model, adamw(model)

    def loop(model, optimizer):
        seen = train(model, optimizer, range(2), loss_of)
        with door(model, optimizer):
            model.merge_adapter()
        seen.append(logits(model))
        with door(model, optimizer):
            model.unmerge_adapter()
        seen += train(model, optimizer, range(2, STEPS), loss_of)
        with model.disable_adapter():
            seen.append(logits(model))
        saved = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
        with door(model, optimizer):
            merged = model.merge_and_unload()
        return [*seen, logits(merged)], saved, values(merged)

    (seen, saved, merged), (their_seen, their_saved, their_merged) = both(tmp_path, make, loop, gradients=gradients)
    assert all(map(same_bits, seen, their_seen))
    assert saved
    assert same_states(saved, their_saved)
    assert same_states(merged, their_merged)


def test_adapters_added_later_are_refused_until_the_model_is_offloaded_anew(tmp_path):
    plain = language_model()
    losses = train(plain, adamw(plain), range(STEPS), loss_of)
    model = language_model()
    model, optimizer = memascend.offload(model, adamw(model), storage=tmp_path / "plain.store")
    same = losses[:2] == train(model, optimizer, range(2), loss_of)
    with_adapters = adapted(model)
    with pytest.raises(memascend.ConfigError, match=r"lora_A.*save\(\).*offload\(\) anew"):
        train(model, optimizer, range(2, 4), loss_of)
    # Nothing was changed by it, and without them training goes on.
    with_adapters.unload()
    model.requires_grad_(True)
    assert same
    assert losses[2:] == train(model, optimizer, range(2, 4), loss_of)
    assert same_states(values(plain), values(model))
    optimizer.save(tmp_path / "saved")
    optimizer.close()

    def make():
        model = adapted(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved"))
        return model, adamw(model)

    assert all(map(same_bits, *both(tmp_path, make, lambda *given: train(*given, range(STEPS), loss_of))))
