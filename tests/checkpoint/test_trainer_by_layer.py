"""Tests a Trainer whose micro-batches go by layer where that was tested: losses, logs, weights of the plain Trainer."""

import functools
import logging

import pytest
import torch
import transformers
from support.bits import same_bits
from support.trained_program import made
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

import memascend.trainer
from memascend.params.settling import Settling
from memascend.trainer import Callback, by_layer

STEPS, COUNT = 4, 3
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quiet")]


def qwen2(**options):
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=48, num_hidden_layers=4, **SHAPE, **options))


def mixtral(**options):
    config = MixtralConfig(vocab_size=48, num_hidden_layers=3, num_local_experts=4, **SHAPE, **options)
    return MixtralForCausalLM(config)


def gpt_oss(**options):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return GptOssForCausalLM(GptOssConfig(vocab_size=48, num_hidden_layers=3, **experts, **SHAPE, **options))


class OwnLoss(Trainer):
    """A loss that keeps something from one micro-batch to the next."""

    last = 0.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss, self.last = loss * (1 + self.last), 0.1 * loss.detach()
        return (loss, None) if return_outputs else loss


class OwnInputs(Trainer):
    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


class OwnLog(Trainer):
    """What runs between steps may be anything."""

    def log(self, logs, *given, **options):
        logs["seen"] = self.state.global_step
        super().log(logs, *given, **options)


class OwnBlock(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Halves(TrainerCallback):
    """Changes gradients between micro-batches."""

    def on_substep_end(self, *_, **others):
        for parameter in others["model"].parameters():
            parameter.grad.mul_(0.5)


def plain(trainer):
    """Nothing of one's own."""


def block(trainer):
    return trainer.model.model.layers[1].mlp


def with_hook(trainer):
    block(trainer).register_forward_hook(lambda *_: None)


def with_hook_of_a_gradient(trainer):
    block(trainer).up_proj.weight.register_hook(lambda gradient: 2 * gradient)


def with_hook_of_all(trainer):
    handle, until = register_module_forward_hook(lambda *_: None), TrainerCallback()
    until.on_train_end = lambda *_, **__: handle.remove()
    trainer.add_callback(until)


def with_method(trainer):
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *given, **options: 2 * compute(*given, **options)


def with_wrapped_forward(trainer):
    """What functools.wraps() makes has the names of transformers' own code."""
    forward = block(trainer).forward
    block(trainer).forward = functools.wraps(forward)(lambda x: 2 * forward(x))


def with_scaler(trainer):
    """As accelerate has one for fp16; disabled, it leaves losses as they are."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)


def with_callback(trainer):
    trainer.add_callback(Halves())


def with_loss(trainer):
    trainer.compute_loss_func = lambda out, labels, **_: out.logits.square().mean() + 0 * labels.sum()


def with_attention(trainer):
    trainer.model.config._attn_implementation = "own"


def own_attention(*given, **options):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*given, **options)


def own_block():
    model = qwen2()
    model.model.layers[1].mlp = OwnBlock(model.model.layers[1].mlp)
    return model


# The kind of Trainer, the model, what is done to the Trainer, and the words of the log; None: by layer.
CASES = {
    "plain": (Trainer, qwen2, plain, None),
    "checkpointed": (Trainer, qwen2, lambda trainer: trainer.model.gradient_checkpointing_enable(), None),
    "log": (OwnLog, qwen2, plain, None),
    "experts with router logits": (Trainer, lambda: mixtral(output_router_logits=True), plain, None),
    "experts of gpt-oss": (Trainer, lambda: gpt_oss(output_router_logits=True), plain, None),
    "dropout": (Trainer, lambda: qwen2(attention_dropout=0.2), plain, "random numbers are drawn"),
    "loss": (OwnLoss, qwen2, plain, "compute_loss() of OwnLoss was not tested"),
    "inputs": (OwnInputs, qwen2, plain, "OwnInputs has a _prepare_inputs of its own"),
    "block": (Trainer, own_block, plain, "code of yours (OwnBlock)"),
    "hook": (Trainer, qwen2, with_hook, "module 'model.layers.1.mlp' has a hook of yours"),
    "hook of all": (Trainer, qwen2, with_hook_of_all, "a hook of yours is called for all modules"),
    "gradient": (Trainer, qwen2, with_hook_of_a_gradient, "called for the gradient of"),
    "method": (Trainer, qwen2, with_method, "given a compute_loss() of its own"),
    "wrapped": (Trainer, qwen2, with_wrapped_forward, "module 'model.layers.1.mlp' has code of yours"),
    "scaler": (Trainer, qwen2, with_scaler, "losses are scaled for fp16"),
    "callback": (Trainer, qwen2, with_callback, "Halves has an on_substep_end()"),
    "function": (Trainer, qwen2, with_loss, "compute_loss_func is a function of yours"),
    "attention": (Trainer, qwen2, with_attention, "an attention or a loss of yours"),
}


# Of the others the Trainer itself computes each micro-batch: what they are is what `trained` looks at.
COMPARED = [*(name for name in CASES if CASES[name][3] is None), "dropout", "loss"]


def trained(folder, case, *, layers):
    transformers.AttentionInterface.register("own", own_attention)
    kind, make, change, _ = case
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"storage": folder / f"{layers}.store", "gradients": "ssd"}
    if not layers:
        model, optimizer = memascend.offload(model, optimizer, **options)
    tokens = torch.randint(0, 48, (2 * COUNT * STEPS, 8), generator=torch.Generator().manual_seed(1)).tolist()
    settings = {"gradient_accumulation_steps": COUNT, "max_steps": STEPS, "max_grad_norm": 0, "logging_steps": 1}
    trainer = made(
        folder / f"{layers}",
        *([] if layers else [Callback()]),
        data=[{"input_ids": one, "labels": one} for one in tokens],
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        kind=kind,
        own=model,
        save_strategy="no",
        eval_strategy="no",
        **settings,
    )
    change(trainer)
    if layers:
        optimizer = memascend.trainer.offload(trainer, **options)
    trainer.train()
    with optimizer:
        assert optimizer.steps == STEPS
        accumulation = optimizer._session.accumulation
        went_by_layer = accumulation._course is not None and accumulation.never is None
        logs = [log for log in trainer.state.log_history if "loss" in log]
        weights = [value.clone() for value in model.state_dict().values()]
        figures = [{name: log.get(name) for name in ("loss", "grad_norm", "learning_rate", "seen")} for log in logs]
        return (figures, weights), logs[-1]["read_bytes"], went_by_layer


def assert_same(results, others):
    assert results[0] == others[0]
    assert all(same_bits(one, other) for one, other in zip(results[1], others[1], strict=True))


def said(caplog):
    return [record.getMessage() for record in caplog.records if "one after the other" in record.getMessage()]


@pytest.fixture
def heard(caplog, monkeypatch):
    """The log; and as bytes are compared, no time decides where updates are written that a step leaves."""
    monkeypatch.setattr(Settling, "settles", lambda *_: True)
    caplog.set_level(logging.INFO, "memascend")
    return caplog


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A micro-batch takes 100 bytes there at most, and keeps 30; all in all, there are as many as it is called with."""

    def have(allocatable):
        allocated = iter([10, 40])
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: next(allocated))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 100)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
        monkeypatch.setattr(by_layer, "_allocatable", lambda _: allocatable)

    return have


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_plain_trainer(tmp_path, heard, name):
    results, read, went = trained(tmp_path, CASES[name], layers=True)
    why = CASES[name][3]
    assert went == (why is None)
    assert (said(heard) == []) if why is None else (len(said(heard)) == 1 and why in said(heard)[0])
    if name in COMPARED:
        others, more, _ = trained(tmp_path, CASES[name], layers=False)
        assert_same(results, others)
        # Otherwise they differ by what was read ahead of the next step already.
        assert read < more or not went


@pytest.mark.parametrize(("allocatable", "fits"), [(178, True), (177, False)])
def test_micro_batches_that_do_not_fit_together_go_in_turn(tmp_path, heard, on_a_gpu, monkeypatch, allocatable, fits):
    """On a GPU the first step shows what one needs: 100 bytes, and each further one keeps 30 of them."""
    room = by_layer.Room
    monkeypatch.setattr(by_layer, "Room", lambda *_: room(torch.device("cuda"), 0))
    on_a_gpu(allocatable)
    results, read, _ = trained(tmp_path, CASES["plain"], layers=True)
    assert (said(heard) == []) if fits else (len(said(heard)) == 1 and "no room for the activations" in said(heard)[0])
    others, more, _ = trained(tmp_path, CASES["plain"], layers=False)
    assert_same(results, others)
    # In turn they differ by what was read ahead of the next step already.
    assert read < more or not fits


def test_longer_micro_batches_need_more_room(on_a_gpu):
    on_a_gpu(1100)
    room, batch = by_layer.Room(torch.device("cuda"), 0), torch.zeros(2, 3)
    assert not room.lacks([{"input_ids": batch}] * 100)
    step = room.measured(lambda inputs: model(inputs["input_ids"]), model := torch.nn.Linear(3, 3))
    step({"input_ids": batch})
    # The next one begins: the peak of the first is known.
    step({"input_ids": batch})
    # 100 for one, 30 for each of 29 more; nine tenths of what there is.
    assert not room.lacks([{"input_ids": batch}] * 30)
    assert room.lacks([{"input_ids": batch}] * 31)
    # Ten times as long: 10 and ten times 90, and then there is room for one short one.
    longer = transformers.BatchEncoding({"input_ids": batch.repeat(10, 1)})
    assert not room.lacks([longer, {"input_ids": batch}])
    assert room.lacks([longer, longer])
    # By layer each has a gradient of its own of a tied parameter.
    room._tied = 60
    assert not room.lacks([longer])
    assert room.lacks([longer, {"input_ids": batch}])
