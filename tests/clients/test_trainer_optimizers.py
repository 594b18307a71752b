"""Tests `optim` of Trainers: offloaded runs equal runs in memory, or an error lists the values that memascend takes."""

import logging

import bitsandbytes
import pytest
import torch
import transformers
from clients.beside import results, same_results
from clients.test_trl import SETTINGS, language_model

import memascend
import memascend.trainer

ROWS = [{"input_ids": torch.arange(4, 20) + row, "labels": torch.arange(4, 20) + row} for row in range(16)]


def made(folder, optim, **more):
    settings = {**SETTINGS, "max_steps": 4, "max_grad_norm": 0.0, "learning_rate": 1e-3, "weight_decay": 0.1, **more}
    arguments = transformers.TrainingArguments(str(folder / "output"), optim=optim, **settings)
    return transformers.Trainer(language_model(), arguments, train_dataset=ROWS, eval_dataset=ROWS)


CONSTANT = {"lr_scheduler_type": "constant"}
STREAMED = {
    "adamw_torch": {},
    "adamw_torch_fused": {},
    "adamw_torch_8bit": {},
    "adamw_torch_4bit": {},
    "adafactor": {},
    "sgd": {"optim_args": "momentum=0.9"},
    "adagrad": {},
    "rmsprop": {},
    "schedule_free_adamw": CONSTANT,
    "schedule_free_radam": CONSTANT,
    "schedule_free_sgd": CONSTANT,
}


@pytest.mark.parametrize("optim", STREAMED)
def test_each_streamed_optim_has_the_same_results_as_in_memory(tmp_path, optim):
    # The engine computes "adamw_torch" with the bits of "adamw_torch_fused".
    same_bits_as = "adamw_torch_fused" if optim == "adamw_torch" else optim
    in_memory = results(made(tmp_path, same_bits_as, **STREAMED[optim]))
    offloaded = results(made(tmp_path, optim, **STREAMED[optim]), tmp_path / "run.store")
    assert same_results(in_memory, offloaded)


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
def test_bitsandbytes_adamw_optim_runs_as_torch_adamw_in_its_format(tmp_path, caplog, optim):
    bits = {"state": "8bit"} if "8bit" in optim else {}
    expected = results(made(tmp_path, "adamw_torch"), tmp_path / "plain.store", **bits)
    with caplog.at_level(logging.INFO, "memascend"):
        found = results(made(tmp_path, optim), tmp_path / "run.store")
    assert f"optim='{optim}': memascend uses torch's AdamW" in caplog.text
    assert same_results(expected, found)
    # The store records `optim`, so offload() rejects a Trainer with a different `optim`.
    with pytest.raises(memascend.ConfigError, match=f"optim {optim} -> adamw_torch"):
        memascend.trainer.offload(made(tmp_path, "adamw_torch"), storage=tmp_path / "run.store")


def test_bitsandbytes_own_optimizers_are_refused(tmp_path):
    model = torch.nn.Linear(64, 64)
    with pytest.raises(memascend.ConfigError, match=r"AdamW8bit of bitsandbytes is rejected.*state=.8bit"):
        memascend.offload(model, bitsandbytes.optim.AdamW8bit(model.parameters()), storage=tmp_path / "store")


@pytest.mark.parametrize("optim", ["paged_lion_8bit", "rmsprop_bnb", "lomo", "galore_adamw_layerwise"])
def test_error_for_an_unsupported_optim_lists_the_supported_optims(tmp_path, optim):
    trainer = made(tmp_path, optim)
    with pytest.raises(memascend.ConfigError, match=rf"cannot stream optim='{optim}'.*: adamw_torch, .*sgd"):
        memascend.trainer.offload(trainer, storage=tmp_path / "run.store")
    assert trainer.optimizer is None
    assert not (tmp_path / "run.store").exists()


def test_offload_accepts_a_model_after_training_in_memory(tmp_path):
    """After a training in memory, only the model and the optimizer refer to weights, so the model can be offloaded."""
    trainer = made(tmp_path, "adamw_torch")
    trainer.train()
    trainer.model.zero_grad()
    model, optimizer = memascend.offload(trainer.model, trainer.optimizer, storage=tmp_path / "run.store")
    with optimizer:
        tokens = ROWS[0]["input_ids"][None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        assert optimizer.steps == 1


BEST = {
    "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 6, **CONSTANT,
    # The largest loss counts as the best loss, so that the best model is not the last model.
    "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
}  # fmt: skip


def figures(trainer):
    """Returns the logged losses and steps, without times and speeds."""
    names = ("loss", "eval_loss", "train_loss", "step")
    return [{name: line[name] for name in names if name in line} for line in trainer.state.log_history]


def test_the_best_model_is_loaded_and_a_longer_run_is_refused(tmp_path):
    in_memory = made(tmp_path / "memory", "adamw_torch_fused", **BEST)
    expected = results(in_memory)
    history = figures(in_memory)
    for begun in (0, 6):
        trainer = made(tmp_path, "adamw_torch_fused", **BEST)
        saved = tmp_path / "output" / "checkpoint-6" / "model.safetensors"
        before = saved.read_bytes() if begun else None
        with memascend.trainer.offload(trainer, storage=tmp_path / "run.store") as optimizer:
            assert optimizer.steps == begun
            assert same_results(expected, results(trainer))
        assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
        assert figures(trainer) == history
        # The resumed run must not save checkpoint-6 again, because checkpoint-6 would then have the weights of
        # checkpoint-2.
        assert before in (None, saved.read_bytes())
    longer = made(tmp_path, "adamw_torch_fused", **BEST | {"max_steps": 8})
    with pytest.raises(memascend.ConfigError, match=r"max_steps 6 -> 8.*the store has the best weights, from .*-2,"):
        memascend.trainer.offload(longer, storage=tmp_path / "run.store")
