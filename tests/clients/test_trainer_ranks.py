"""Tests that killed and resumed Trainers on several ranks have the results of a Trainer in one process.

torchrun or `accelerate launch` starts the ranks.

usage: [TRAINED_OPTIONS=JSON] test_trainer_ranks.py plain|supervised STORE FOLDER [RANKS STEP]

At the end of step STEP, the program kills the ranks RANKS, such as "1" or "0,1".
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.bits import same_states
from support.lives import life
from support.torchrun import CONFIG, as_if_on_gpus, command
from support.trained_program import made, model, rows

import memascend.trainer

FSDP = {"fsdp": True, "fsdp_config": {"version": 2}}
TORCHRUN = command()[1:]
LAUNCH = ("-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2", "--config_file")

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


class Killed(transformers.TrainerCallback):
    """Kills the given ranks at the end of a step."""

    def __init__(self, ranks="", step=0):
        self.ranks, self.step = ranks.split(","), int(step)

    def on_step_end(self, args, state, *_, **__):
        if state.global_step == self.step and str(args.process_index) in self.ranks:
            os.kill(os.getpid(), signal.SIGKILL)


def trained(kind, folder, killed, options):
    """Returns a Trainer of transformers if `kind` is "plain", and TRL's SFTTrainer if `kind` is "supervised"."""
    if kind == "plain":
        # The model has no dropout, because each rank would draw different random numbers for dropout.
        return made(folder / "out", killed, data=rows(48), own=model(attention_dropout=0.0), **options)
    from clients.test_train_killed import SHARED, supervised, texts

    SHARED.update(options)
    # With 48 examples, each step has the same number of examples.
    return supervised(str(folder / "out"), killed, lambda count=48: texts(count))


def main(kind, store, folder, *kill):
    torch.set_num_threads(1)
    folder = Path(folder)
    options = json.loads(os.environ.get("TRAINED_OPTIONS", "{}"))
    trainer = trained(kind, folder, Killed(*kill), options)
    # With several ranks, clipping is "exact" by default, since the bits of torch's norm depend on the number of ranks.
    # The run in one process must clip in the same way.
    memascend.trainer.offload(trainer, storage=store, **({} if trainer.is_fsdp_enabled else {"clipping": "exact"}))
    trainer.train()
    trainer.save_model(str(folder / "model"))
    if trainer.is_world_process_zero():
        Path(folder, "log.json").write_text(json.dumps(trainer.state.log_history))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def run(folder, kind, *kill, start=TORCHRUN, fails=False, **options):
    """Trains on two ranks, or in one process if `start` is empty; returns the output."""
    folder.mkdir(exist_ok=True)
    status, output = life(
        [sys.executable, *start, __file__, kind, folder / "run", folder, *kill],
        ends=(0, 1),
        TRAINED_OPTIONS=json.dumps(options),
        HF_HOME=str(folder),
        PYTHONWARNINGS="ignore",
    )
    assert status == fails, output[-6000:]
    return output


def results(folder):
    """Returns the weights, the optimizer state in the last checkpoint, and the log."""
    last = max((folder / "out").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    figures = [load_file(folder / "model/model.safetensors"), load_file(last / "memascend/state.safetensors")]
    # Omits the values of the log that depend on the number of ranks: token counts, times, and means over the batches of
    # an evaluation.
    compared = ("loss", "grad_norm", "learning_rate", "epoch", "train_loss")
    log = json.loads((folder / "log.json").read_text())
    return figures, [{name: line[name] for name in compared if name in line} for line in log]


def assert_same(folder, other):
    (tensors, log), (others, its_log) = results(folder), results(other)
    assert len(log) == len(its_log)
    for line, its_line in zip(log, its_log, strict=True):
        assert line.keys() == its_line.keys()
        for name, value in line.items():
            # The Trainer averages the losses of the ranks. After rounding, this average may differ a little from the
            # loss of one process.
            assert value == (pytest.approx(its_line[name], rel=1e-6) if "loss" in name else its_line[name]), name
    for one, another in zip(tensors, others, strict=True):
        assert same_states(one, another)


@pytest.mark.parametrize("kind", ["plain", "supervised"])
def test_killed_and_resumed_ranks_have_the_results_of_one_process(tmp_path, kind):
    """Logged norms, weights and the checkpoints' optimizer state must be equal. Losses may differ by rounding."""
    run(tmp_path / "one", kind, start=(), gradient_accumulation_steps=4)
    options = {"gradient_accumulation_steps": 2, **FSDP}
    run(tmp_path / "two", kind, "1", "6", fails=True, **options)
    run(tmp_path / "two", kind, "0,1", "8", fails=True, **options)
    run(tmp_path / "two", kind, **options)
    # If a finished training starts again, it computes no further step.
    run(tmp_path / "two", kind, **options)
    assert_same(tmp_path / "two", tmp_path / "one")


def test_trainer_checkpoint_resumes_on_another_number_of_ranks(tmp_path):
    run(tmp_path / "one", "plain", start=(), gradient_accumulation_steps=4)
    run(tmp_path / "ranks", "plain", "1", "6", fails=True, gradient_accumulation_steps=2, **FSDP)
    words = run(tmp_path / "ranks", "plain", start=(), fails=True, gradient_accumulation_steps=2)
    assert "ranks 2 -> 1, so that a step has other examples" in words
    assert "1 with 4, 2 with 2, 4 with 1" in words
    run(tmp_path / "ranks", "plain", start=(), gradient_accumulation_steps=4)
    assert same_states(*(load_file(tmp_path / name / "model/model.safetensors") for name in ("ranks", "one")))


def test_accelerate_launch_needs_no_arguments_of_the_script(tmp_path):
    (tmp_path / "fsdp.yaml").write_text(CONFIG)
    run(tmp_path / "one", "plain", start=(), gradient_accumulation_steps=2)
    run(tmp_path / "two", "plain", start=(*LAUNCH, str(tmp_path / "fsdp.yaml")), gradient_accumulation_steps=1)
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "several processes without FSDP2 use DDP"),
        ({"fsdp": True, "fsdp_config": {"version": 2, "cpu_offload": True}}, "cpu_offload in the FSDP settings"),
        (
            {"fsdp": True, "fsdp_config": {"version": 2, "activation_checkpointing": True}},
            "gradient_checkpointing=True",
        ),
    ],
    ids=["ddp", "cpu_offload", "checkpointing"],
)
def test_ddp_and_unsupported_fsdp_settings_are_rejected(tmp_path, options, message):
    assert message in run(tmp_path / "run", "plain", fails=True, **options)
    assert not os.path.lexists(tmp_path / "run/run")


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        as_if_on_gpus()
    main(*sys.argv[1:])
