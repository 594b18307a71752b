"""Tests TRL's SFTTrainer with micro-batches by layer: the losses and weights of the same Trainer without."""

import datasets
import pytest
import trl
from clients.test_adapters import adamw, language_model
from clients.test_preferences import tokenizer
from support.bits import same_bits

import memascend
from memascend.trainer import Callback, by_layer

STEPS, COUNT = 3, 3


def rows():
    return datasets.Dataset.from_dict({"text": [f"w{row} w{row + 1} w{row + 20}" for row in range(STEPS * COUNT * 2)]})


def trained(folder, *, layers, **options):
    """The losses of the log, the weights, the bytes that the last step read."""
    model = language_model()
    model, optimizer = memascend.offload(
        model, adamw(model), storage=folder / f"{layers}.store", gradients="ssd", host_memory="1MiB"
    )
    settings = trl.SFTConfig(
        output_dir=str(folder / "output"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=COUNT,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        max_grad_norm=0,
        **options,
    )
    trainer = trl.SFTTrainer(
        model,
        args=settings,
        train_dataset=rows(),
        processing_class=tokenizer(),
        optimizers=(optimizer, None),
        callbacks=[Callback()],
    )
    if layers:
        by_layer(trainer)
    trainer.train()
    with optimizer:
        assert layers == (optimizer._session.accumulation._course is not None)
        assert optimizer._session.accumulation.never is None
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        weights = [value.detach().clone() for value in model.state_dict().values()]
    return [log["loss"] for log in logs], weights, logs[-1]["read_bytes"]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_one_line_makes_supervised_training_go_by_layer(tmp_path, checkpointed):
    losses, weights, read = trained(tmp_path, layers=True, gradient_checkpointing=checkpointed)
    want, others, more = trained(tmp_path, layers=False, gradient_checkpointing=checkpointed)
    assert len(losses) == STEPS
    assert losses == want
    assert all(map(same_bits, weights, others))
    assert read <= more
