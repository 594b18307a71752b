"""Tests TRL's preference training with a reference model beside the same Trainer in memory, bit for bit."""

import datasets
import tokenizers
import transformers
import trl
from clients.beside import both, results, same_results
from clients.test_adapters import adamw, language_model
from support.bits import same_states
from support.chains import values

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


def test_preferences_are_learned_as_in_memory_with_a_reference_that_follows(tmp_path):
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
