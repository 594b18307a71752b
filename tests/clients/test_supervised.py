"""Tests TRL's Trainers with micro-batches by layer: the logs, metrics and weights of the same Trainers without."""

import datasets
import pytest
import torch
import trl
from clients.test_adapters import adamw, language_model
from clients.test_preferences import SETTINGS, pairs, tokenizer
from support.bits import same_states
from support.chains import values
from transformers import Qwen2Config, Qwen2ForSequenceClassification

import memascend.trainer
from memascend.trainer import Callback

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
    """The logs, each micro-batch's metrics in order, the weights, the bytes that the last step read."""
    base, config, make, data, more = KINDS[kind]
    noted = []

    class Recording(base):
        """Notes the metrics before they are averaged."""

        def log(self, logs, *given, **named):
            noted.append({name: list(values) for name, values in self._metrics["train"].items()})
            super().log(logs, *given, **named)

    model = make()
    optimizer = adamw(model)
    given = {"storage": folder / f"{layers}.store", "gradients": "ssd", "host_memory": "1MiB"}
    if not layers:
        model, optimizer = memascend.offload(model, optimizer, **given)
    settings = config(
        str(folder / "output"),
        bf16=False,
        gradient_accumulation_steps=COUNT,
        max_steps=STEPS,
        max_grad_norm=0,
        **SETTINGS,
        **more,
    )
    trainer = Recording(
        model,
        args=settings,
        train_dataset=data(),
        processing_class=tokenizer(),
        optimizers=(optimizer, None),
        callbacks=[] if layers else [Callback()],
    )
    if layers:
        optimizer = memascend.trainer.offload(trainer, **given)
    trainer.train()
    with optimizer:
        accumulation = optimizer._session.accumulation
        assert layers == (accumulation._course is not None)
        assert accumulation.never is None
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        weights = values(model)
    read = logs[-1]["read_bytes"]
    for log in logs:
        for name in ("read_bytes", "written_bytes", "host_memory_bytes", "waiting_seconds"):
            del log[name]
    return logs, noted, weights, read


@pytest.mark.parametrize("kind", KINDS)
def test_one_line_makes_training_go_by_layer(tmp_path, kind):
    logs, metrics, weights, read = trained(tmp_path, kind, layers=True)
    want, in_order, others, more = trained(tmp_path, kind, layers=False)
    assert len(logs) == STEPS
    assert logs == want
    assert metrics == in_order
    assert any(len(values) == COUNT for noted in metrics for values in noted.values())
    assert same_states(weights, others)
    assert read <= more
