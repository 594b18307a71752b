"""Tests that computing by layer gives the same losses, logs and weights as computing one micro-batch after the other.

By layer, each unit computes all micro-batches before the next unit begins. If a Trainer has code that was not tested by
layer, memascend computes the Trainer's micro-batches one after the other.
"""

import functools
import logging

import pytest
import torch
import transformers
from support.bits import same_states
from support.chains import values
from support.trained_program import compared, made
from torch.nn.modules.module import register_module_forward_hook
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainerCallback,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import memascend.trainer
from memascend.params.settling import Settling
from memascend.plan.options import Options
from memascend.session.decide import planned
from memascend.trainer import Callback, by_layer

STEPS, COUNT = 4, 3
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quiet")]


def qwen2(**options):
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=48, num_hidden_layers=4, **SHAPE, **options))


def mixtral():
    options = {"num_local_experts": 4, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(vocab_size=48, num_hidden_layers=3, **options, **SHAPE))


def gpt_oss():
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "output_router_logits": True}
    return GptOssForCausalLM(GptOssConfig(vocab_size=48, num_hidden_layers=3, **options, **SHAPE))


class OwnLoss(Trainer):
    """A Trainer whose loss depends on the loss of the previous micro-batch."""

    last = 0.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss, self.last = loss * (1 + self.last), 0.1 * loss.detach()
        return (loss, None) if return_outputs else loss


class OwnInputs(Trainer):
    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


class OwnLog(Trainer):
    """A Trainer with its own log(). Trainers call log() between steps, so log() does not prevent computing by layer."""

    def log(self, logs, *given, **options):
        logs["seen"] = self.state.global_step
        super().log(logs, *given, **options)


class OwnBlock(torch.nn.Sequential):
    """A block whose class is not from transformers."""


class Halves(TrainerCallback):
    """Halves all gradients between micro-batches."""

    def on_substep_end(self, *_, **others):
        for parameter in others["model"].parameters():
            parameter.grad.mul_(0.5)


def own_block():
    model = qwen2()
    model.model.layers[1].mlp = OwnBlock(model.model.layers[1].mlp)
    return model


def block(trainer):
    return trainer.model.model.layers[1].mlp


def with_hook_of_all(trainer):
    handle, until = register_module_forward_hook(lambda *_: None), TrainerCallback()
    until.on_train_end = lambda *_, **__: handle.remove()
    trainer.add_callback(until)


def with_wrapped_forward(trainer):
    """Wraps the forward of a block. functools.wraps() gives the wrapper the name of transformers' function."""
    forward = block(trainer).forward
    block(trainer).forward = functools.wraps(forward)(lambda x: 2 * forward(x))


# Maps a case to a function that changes the Trainer. The case "scaler" sets a disabled scaler, which leaves losses as
# they are. Any scaler, even a disabled one, prevents computing by layer.
CHANGES = {
    "checkpointed": lambda trainer: trainer.model.gradient_checkpointing_enable(),
    "hook": lambda trainer: block(trainer).register_forward_hook(lambda *_: None),
    "hook of all": with_hook_of_all,
    "gradient": lambda trainer: block(trainer).up_proj.weight.register_hook(lambda gradient: 2 * gradient),
    "method": lambda trainer: setattr(trainer, "compute_loss", lambda *_, **__: trainer.model.lm_head.weight.sum()),
    "wrapped": with_wrapped_forward,
    "scaler": lambda trainer: setattr(trainer.accelerator, "scaler", torch.amp.GradScaler("cpu", enabled=False)),
    "callback": lambda trainer: trainer.add_callback(Halves()),
    "function": lambda trainer: setattr(trainer, "compute_loss_func", lambda out, *_, **__: out.logits.mean()),
    "attention": lambda trainer: setattr(trainer.model.config, "_attn_implementation", "own"),
}
transformers.AttentionInterface.register("own", sdpa_attention_forward)
# Maps a case to three items: the Trainer's class; a function that makes the model; the logged reason why micro-batches
# are computed one after the other, or None if micro-batches are computed by layer.
CASES = {
    "plain": (Trainer, qwen2, None),
    "checkpointed": (Trainer, qwen2, None),
    "log": (OwnLog, qwen2, None),
    "experts with router logits": (Trainer, mixtral, None),
    "experts of gpt-oss": (Trainer, gpt_oss, None),
    "dropout": (Trainer, lambda: qwen2(attention_dropout=0.2), "random numbers are drawn"),
    "loss": (OwnLoss, qwen2, "compute_loss() of OwnLoss was not tested"),
    "inputs": (OwnInputs, qwen2, "OwnInputs overrides _prepare_inputs"),
    "block": (Trainer, own_block, "code of yours (OwnBlock)"),
    "hook": (Trainer, qwen2, "module 'model.layers.1.mlp' has a hook of yours"),
    "hook of all": (Trainer, qwen2, "a hook of yours is called for all modules"),
    "gradient": (Trainer, qwen2, "called for the gradient of"),
    "method": (Trainer, qwen2, "has its compute_loss() replaced"),
    "wrapped": (Trainer, qwen2, "module 'model.layers.1.mlp' has code of yours"),
    "scaler": (Trainer, qwen2, "losses are scaled for fp16"),
    "callback": (Trainer, qwen2, "Halves has an on_substep_end()"),
    "function": (Trainer, qwen2, "compute_loss_func is your own function"),
    "attention": (Trainer, qwen2, "an attention or a loss of yours"),
}
# Cases that are compared with a run in which the Trainer itself computes each micro-batch. In all other cases, the
# Trainer itself computes each micro-batch anyway, so a comparison would show nothing.
COMPARED = [*(name for name in CASES if CASES[name][2] is None), "dropout", "loss"]


def run(folder, model, trainer_of, *, layers, **given):
    """Trains; returns the log, the weights, the bytes that the last step read, and whether steps were made by layer.

    `trainer_of(model, optimizer, callbacks)` makes the Trainer.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # With the default budget of a Trainer, all records would be kept in RAM, so steps would read 0 bytes.
    streamed = planned(model, optimizer, Options(gradients="ssd")).plan.budget
    given = {"storage": folder / f"{layers}.store", "gradients": "ssd", "host_memory": streamed, **given}
    if not layers:
        model, optimizer = memascend.offload(model, optimizer, **given)
    trainer = trainer_of(model, optimizer, [] if layers else [Callback()])
    if layers:
        optimizer = memascend.trainer.offload(trainer, **given)
    trainer.train()
    with optimizer:
        accumulation = optimizer._session.accumulation
        went_by_layer = accumulation._course is not None and accumulation.never is None
        logs = [log for log in trainer.state.log_history if "loss" in log]
        return [*map(compared, logs)], values(model), logs[-1]["read_bytes"], went_by_layer


def trained(folder, name, *, layers):
    kind, make, _ = CASES[name]
    torch.manual_seed(0)
    tokens = torch.randint(0, 48, (2 * COUNT * STEPS, 8), generator=torch.Generator().manual_seed(1)).tolist()
    settings = {"gradient_accumulation_steps": COUNT, "max_steps": STEPS, "max_grad_norm": 0, "logging_steps": 1}

    def trainer_of(model, optimizer, callbacks):
        optimizers = optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        data = [{"input_ids": one, "labels": one} for one in tokens]
        settings.update(kind=kind, own=model, save_strategy="no", eval_strategy="no")
        trainer = made(folder / f"{layers}", *callbacks, data=data, optimizers=optimizers, **settings)
        CHANGES.get(name, lambda _: None)(trainer)
        return trainer

    logs, *results = run(folder, make(), trainer_of, layers=layers)
    assert len(logs) == STEPS
    return logs, *results


def require_same(one, other):
    assert one[0] == other[0]
    assert same_states(one[1], other[1])


def messages(caplog):
    return [record.getMessage() for record in caplog.records if "one after the other" in record.getMessage()]


@pytest.fixture
def received(caplog, monkeypatch):
    """Returns the log. The next forward always writes deferred updates, so the bytes read do not depend on timing."""
    monkeypatch.setattr(Settling, "settles", lambda *_: True)
    caplog.set_level(logging.INFO, "memascend")
    return caplog


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Returns `have`, which simulates a GPU with `allocatable` bytes.

    On this GPU, 10 bytes are allocated before the first micro-batch. The micro-batch raises the allocated bytes to 100,
    and its forward keeps 30 bytes for its backward.
    """

    def have(allocatable):
        allocated = iter([10, 40])
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: next(allocated))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 100)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
        monkeypatch.setattr(by_layer, "_allocatable", lambda _: allocatable)

    return have


@pytest.mark.parametrize("name", CASES)
def test_trainer_by_layer_equals_the_plain_trainer_or_logs_why_not(tmp_path, received, name):
    found = trained(tmp_path, name, layers=True)
    why = CASES[name][2]
    assert found[3] == (why is None)
    assert (
        (messages(received) == []) if why is None else (len(messages(received)) == 1 and why in messages(received)[0])
    )
    if name in COMPARED:
        plain = trained(tmp_path, name, layers=False)
        require_same(found, plain)
        # By layer, a step reads fewer bytes than in the plain run. If micro-batches are computed one after the other,
        # prefetching for the next step changes the number of bytes read, so the test does not compare this number.
        assert found[2] < plain[2] or why is not None


@pytest.mark.parametrize(("allocatable", "fits"), [(178, True), (177, False)])
def test_micro_batches_without_room_are_computed_one_after_the_other(
    tmp_path, received, on_a_gpu, monkeypatch, allocatable, fits
):
    """On a GPU, the first step measures 100 bytes for the first micro-batch and 30 bytes for each later micro-batch."""
    room = by_layer.Room
    monkeypatch.setattr(by_layer, "Room", lambda *_: room(torch.device("cuda"), 0))
    on_a_gpu(allocatable)
    found = trained(tmp_path, "plain", layers=True)
    assert (
        (messages(received) == [])
        if fits
        else (len(messages(received)) == 1 and "no room for the activations" in messages(received)[0])
    )
    plain = trained(tmp_path, "plain", layers=False)
    require_same(found, plain)
    # By layer, a step reads fewer bytes than in the plain run. If micro-batches are computed one after the other,
    # prefetching for the next step changes the number of bytes read, so the test does not compare this number.
    assert found[2] < plain[2] or not fits


def test_longer_micro_batches_need_more_room(on_a_gpu):
    on_a_gpu(1100)
    room, batch = by_layer.Room(torch.device("cuda"), 0), torch.zeros(2, 3)
    assert not room.lacks([{"input_ids": batch}] * 100)
    step = room.measured(lambda inputs: model(inputs["input_ids"]), model := torch.nn.Linear(3, 3))
    step({"input_ids": batch})
    # When the second micro-batch begins, `step` reads the peak memory of the first micro-batch.
    step({"input_ids": batch})
    # The first micro-batch needs 100 bytes, and each later micro-batch needs 30 bytes. Nine tenths of the 1,100
    # allocatable bytes have room for 30 micro-batches, which need 970 bytes.
    assert not room.lacks([{"input_ids": batch}] * 30)
    assert room.lacks([{"input_ids": batch}] * 31)
    # A micro-batch that is ten times as long needs 10 + 10 * 90 = 910 of the 990 bytes. The remaining 80 bytes have
    # room for one short micro-batch, but not for a second long micro-batch.
    longer = transformers.BatchEncoding({"input_ids": batch.repeat(10, 1)})
    assert not room.lacks([longer, {"input_ids": batch}])
    assert room.lacks([longer, longer])
    # By layer, each later micro-batch has its own gradient of a tied parameter. This gradient has `_tied` bytes.
    room._tied = 60
    assert not room.lacks([longer])
    assert room.lacks([longer, {"input_ids": batch}])
