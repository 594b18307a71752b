"""Tests TRL's preference training with a reference model beside the same Trainer in memory, bit for bit."""

import datasets
import peft
import pytest
import tokenizers
import torch
import transformers
import trl
from clients.test_adapters import adamw, language_model
from support.bits import same_bits

import memascend

# Of all Trainers here.
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


def trained(folder, offloaded, adapters=None, **options):
    """The losses of the log, and the weights after training."""
    model = language_model()
    if adapters is not None:
        torch.manual_seed(1)
        model = peft.get_peft_model(model, adapters)
    reference = language_model() if adapters is None else None
    optimizer = adamw(model)
    if offloaded:
        model, optimizer = memascend.offload(model, optimizer, storage=folder / "run.store", gradients="ssd")
    settings = trl.DPOConfig(
        str(folder / "output"), bf16=False, max_steps=4, **{**SETTINGS, "gradient_checkpointing": False, **options}
    )
    trainer = trl.DPOTrainer(
        model,
        reference,
        args=settings,
        train_dataset=pairs(),
        processing_class=tokenizer(),
        optimizers=(optimizer, None),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = [value.detach().clone() for value in model.state_dict().values()]
    if reference is not None:
        weights += [value.detach().clone() for value in reference.state_dict().values()]
    if offloaded:
        optimizer.close()
    return losses, weights


CONFIG = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
MODES = {
    "reference": {},
    "synced": {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6},
    "adapters": {"adapters": CONFIG},
    # As TRL has it unless it is told otherwise.
    "checkpointed": {"gradient_checkpointing": True},
    "checkpointed adapters": {"adapters": CONFIG, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_preferences_are_learned_as_in_memory(tmp_path, mode):
    losses, weights = trained(tmp_path, False, **MODES[mode])
    their_losses, their_weights = trained(tmp_path, True, **MODES[mode])
    assert len(losses) == 4
    assert losses == their_losses
    assert all(map(same_bits, weights, their_weights))
