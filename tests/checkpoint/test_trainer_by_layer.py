"""Tests a Trainer whose micro-batches are computed by layer: the same losses, weights and state, and fewer bytes."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.bits import same_bits
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

import memascend
from memascend.errors import ConfigError
from memascend.trainer import Callback, by_layer

STEPS, COUNT = 4, 3
pytestmark = pytest.mark.filterwarnings("default")


class Own(Trainer):
    """As TRL's have it: a loss of its own, and a training_step that calls the Trainer's."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.seen = []

    def training_step(self, *given, **options):
        loss = super().training_step(*given, **options)
        self.seen.append(loss.detach().clone())
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return (2 * loss, None) if return_outputs else 2 * loss


def trained(folder, kind, *, layers, **options):
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=48, num_hidden_layers=4, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = memascend.offload(model, optimizer, storage=folder / f"{layers}.store", **options)
    tokens = torch.randint(0, 48, (2 * COUNT * STEPS, 8), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(folder / f"{layers}"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=COUNT,
        max_steps=STEPS,
        max_grad_norm=0,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
    )
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    data = [{"input_ids": one, "labels": one} for one in tokens]
    trainer = kind(model, arguments, train_dataset=data, optimizers=(optimizer, schedule), callbacks=[Callback()])
    if layers:
        by_layer(trainer)
    trainer.train()
    with optimizer:
        assert optimizer.steps == STEPS
        assert layers == (optimizer._session.accumulation._course is not None)
        assert optimizer._session.accumulation.never is None
        logs = [log for log in trainer.state.log_history if "loss" in log]
        weights = [value.clone() for value in model.state_dict().values()]
        return [log["loss"] for log in logs], weights, logs[-1]["read_bytes"], getattr(trainer, "seen", [])


@pytest.mark.parametrize("kind", [Trainer, Own])
def test_the_bits_are_the_same_and_fewer_bytes_are_read(tmp_path, kind):
    losses, weights, read, seen = trained(tmp_path, kind, layers=True, gradients="ssd")
    want, others, more, also = trained(tmp_path, kind, layers=False, gradients="ssd")
    assert losses == want
    assert all(same_bits(one, other) for one, other in zip(weights, others, strict=True))
    assert len(seen) == len(also)
    assert all(same_bits(one, other) for one, other in zip(seen, also, strict=True))
    assert read < more


def test_a_trainer_that_is_not_offloaded_is_refused():
    class Plain:
        optimizer = None

    with pytest.raises(ConfigError, match="not offloaded"):
        by_layer(Plain())
