"""Compares offloaded training of peft and TRL with training in memory, also with micro-batches by layer."""

import datasets
import peft
import pytest
import tokenizers
import torch
import transformers
import trl
from checkpoint.test_trainer_by_layer import run
from clients.beside import both, door, results, same_results
from support.bits import same_bits, same_states
from support.chains import train, values
from transformers import Qwen2Config, Qwen2ForSequenceClassification

import memascend

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
    """The loop also merges and unmerges the adapters between steps."""

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
        seen += train(model, optimizer, range(2, 4), loss_of)
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


def test_adapters_added_after_offload_are_rejected_until_a_new_offload(tmp_path):
    plain = language_model()
    losses = train(plain, adamw(plain), range(4), loss_of)
    model = language_model()
    model, optimizer = memascend.offload(model, adamw(model), storage=tmp_path / "plain.store")
    same = losses[:2] == train(model, optimizer, range(2), loss_of)
    with_adapters = adapted(model)
    with pytest.raises(memascend.ConfigError, match=r"lora_A.*save\(folder\).*offload\(\) again"):
        train(model, optimizer, range(2, 4), loss_of)
    # The rejected step changed no value, so training continues once the adapters are removed.
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

    assert all(map(same_bits, *both(tmp_path, make, lambda *given: train(*given, range(4), loss_of))))


# --- TRL ----------------------------------------------------------------------------------------------

# Settings of Trainers of transformers and TRL, also in other tests of tests/clients.
SETTINGS = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def tokenizer():
    words = {"<pad>": 0, "<eos>": 1, **{f"w{word}": 2 + word for word in range(60)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))  # noqa: S106
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")  # noqa: S106


def pairs(count=8):
    rows = range(count)
    return datasets.Dataset.from_dict(
        {
            "prompt": [f"w{row} w{row + 1}" for row in rows],
            "chosen": [f" w{row + 2} w{row + 3}" for row in rows],
            "rejected": [f" w{row + 20} w{row + 31}" for row in rows],
        }
    )


def test_dpo_with_a_synced_reference_model_equals_training_in_memory(tmp_path):
    def make():
        model = language_model()
        return model, adamw(model)

    def loop(model, optimizer):
        reference = language_model()
        settings = {"bf16": False, "max_steps": 4, "gradient_checkpointing": False, "sync_ref_model": True}
        settings |= {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6}
        trainer = trl.DPOTrainer(
            model,
            reference,
            args=trl.DPOConfig(str(tmp_path / "output"), **SETTINGS, **settings),
            train_dataset=pairs(),
            processing_class=tokenizer(),
            optimizers=(optimizer, None),
        )
        return results(trainer), values(reference)

    (wanted, reference), (found, its_reference) = both(tmp_path, make, loop, gradients="ssd")
    assert len(wanted[0]) == 4
    assert same_results(wanted, found)
    assert same_states(reference, its_reference)


# --- micro-batches by layer ----------------------------------------------------------------------------


STEPS, COUNT = 3, 3


def rows():
    return datasets.Dataset.from_dict({"text": [f"w{row} w{row + 1} w{row + 20}" for row in range(STEPS * COUNT * 2)]})


def reward_model():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=62, num_hidden_layers=4, num_labels=1, pad_token_id=0, **shape)
    return Qwen2ForSequenceClassification(config)


PLAIN, CHECKPOINTED = {"gradient_checkpointing": False}, {"gradient_checkpointing": True}
PACKED = {"packing": True, "max_length": 8, **CHECKPOINTED}
KINDS = {
    "supervised": (trl.SFTTrainer, trl.SFTConfig, language_model, rows, PLAIN),
    "packed": (trl.SFTTrainer, trl.SFTConfig, language_model, rows, PACKED),
    "reward": (trl.RewardTrainer, trl.RewardConfig, reward_model, lambda: pairs(24), PLAIN),
    "checkpointed reward": (trl.RewardTrainer, trl.RewardConfig, reward_model, lambda: pairs(24), CHECKPOINTED),
}


def trained(folder, kind, *, layers):
    """Trains a Trainer of this kind; returns the results of `run`, and the metrics of each micro-batch in order."""
    base, config, make, data, more = KINDS[kind]
    noted = []

    class Recording(base):
        """Records the metrics of all micro-batches before `log` averages them."""

        def log(self, logs, *given, **named):
            noted.append({name: list(values) for name, values in self._metrics["train"].items()})
            super().log(logs, *given, **named)

    def trainer_of(model, optimizer, callbacks):
        own = {"gradient_accumulation_steps": COUNT, "max_steps": STEPS, "max_grad_norm": 0, "bf16": False}
        return Recording(
            model,
            args=config(str(folder / "output"), **own, **SETTINGS, **more),
            train_dataset=data(),
            processing_class=tokenizer(),
            optimizers=(optimizer, None),
            callbacks=callbacks,
        )

    return *run(folder, make(), trainer_of, layers=layers, host_memory="1MiB"), noted


@pytest.mark.parametrize("kind", KINDS)
def test_trl_trainer_by_layer_equals_micro_batches_in_order(tmp_path, kind):
    logs, weights, read, went_by_layer, metrics = trained(tmp_path, kind, layers=True)
    want, others, more, _, in_order = trained(tmp_path, kind, layers=False)
    assert went_by_layer
    assert len(logs) == STEPS
    assert logs == want
    assert metrics == in_order
    assert any(len(values) == COUNT for noted in metrics for values in noted.values())
    assert same_states(weights, others)
    assert read <= more
