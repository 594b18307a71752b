"""Defines training loops as users write them. The same loop trains a model in RAM and an offloaded model."""

from __future__ import annotations

import contextlib
import warnings

import torch
from torch.nn.utils import clip_grad_norm_

CLIPPED = 0.05  # lower than the gradient norms of these small models, so that clipping changes the gradients


def finish(run):
    run.optimizer.step()
    run.optimizer.zero_grad()


# --- clipping, accumulation, scales -------------------------------------------


def clips(run):
    for index in range(4):
        run.loss(index).backward()
        run.record(clip_grad_norm_(run.model.parameters(), CLIPPED))
        finish(run)


def clips_in_step(run):
    """Trains with `max_grad_norm=` and records the norms.

    The library computes the norms exactly, so the norms must be equal on all devices.
    """
    for index in range(4):
        run.loss(index).backward()
        run.optimizer.step()
        run.record(run.optimizer.grad_norm)
        run.optimizer.zero_grad()


def accumulates(run, counts=(3, 3, 2)):
    index = 0
    for count in counts:
        for _ in range(count):
            (run.loss(index) / 3).backward()
            index += 1
        finish(run)


def scales(run):
    """Trains with a scaled loss. The third backward overflows, so the optimizer skips the third step."""
    half = any(p.dtype == torch.float16 for p in run.model.parameters())
    for index in range(5):
        loss = run.loss(index)
        run.optimizer.backward(loss * (3e4 if half else 1e36) if index == 2 else loss)
        run.optimizer.step()
        run.record(run.optimizer.loss_scale, run.optimizer.overflowed)
        run.optimizer.zero_grad()


def grad_scaler(run, *, clip=None):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for index in range(5):
        loss = run.loss(index)
        scaler.scale(loss * float("inf") if index == 2 else loss).backward()
        if clip:
            scaler.unscale_(run.optimizer)
            run.record(clip_grad_norm_(run.model.parameters(), clip))
        scaler.step(run.optimizer)
        scaler.update()
        run.record(scaler.get_scale())
        run.optimizer.zero_grad()


# --- when and how step() is called --------------------------------------------


def schedules(run):
    """Trains with `run.original.scheduler`, or with a new scheduler if the original optimizer has no scheduler."""
    scheduler = getattr(run.original, "scheduler", None)
    scheduler = scheduler or torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=2e-2, total_steps=6)
    for index in range(5):
        run.loss(index).backward()
        run.optimizer.step()
        scheduler.step()
        run.optimizer.zero_grad()
        run.record(*scheduler.get_last_lr())


def changes_options(run):
    """Changes the learning rate and the momentum. The step with momentum 0 must not change the momentum buffers."""
    for index in range(4):
        for group in run.optimizer.param_groups:
            group["lr"], group["momentum"] = (0.05, 0.0) if index == 2 else (0.1, 0.9)
        run.loss(index).backward()
        finish(run)


def closures(run):
    for index in range(4):

        def closure(index=index):
            run.optimizer.zero_grad()
            loss = run.loss(index)
            loss.backward()
            return loss

        run.record(run.optimizer.step(closure))


def drops_some(run):
    for index in range(4):
        run.loss(index).backward()
        for number, p in enumerate(run.model.parameters()):
            if (number + index) % 3 == 0:
                p.grad = None
        finish(run)


def disjoint(run):
    """Runs one backward for each of two towers in each step. The graphs of the two towers exist at the same time."""
    for index in range(4):
        losses = [run.model(run.batches[index][0], tower).square().mean() for tower in ("left", "right")]
        run.record(*losses)
        for loss in losses:
            loss.backward()
        finish(run)


# --- what forward and backward do ---------------------------------------------


def reads_the_head(run):
    for index in range(4):
        loss = run.loss(index) + 0.1 * run.model.head.weight.square().float().mean()
        run.record(loss)
        loss.backward()
        finish(run)


def penalizes_gradients(run):
    """Adds a penalty on the input's gradient to the loss, so that the backward also differentiates a backward."""
    for index in range(4):
        x = run.batches[index][0].clone().requires_grad_()
        y = run.model(x)
        (slope,) = torch.autograd.grad(y.tanh().sum(), x, create_graph=True)
        loss = y.square().mean() + slope.square().mean()
        run.record(loss)
        loss.backward()
        finish(run)


def asks_for_gradients(run):
    """Calls torch.autograd.grad() for a weight before each backward. The call must not become a part of the step."""
    for index in range(4):
        loss = run.loss(index)
        run.record(torch.autograd.grad(loss, run.model.head.weight, retain_graph=True)[0])
        loss.backward()
        finish(run)


def generates(run):
    for index in range(3):
        run.loss(index).backward()
        run.model.eval()
        prompt = run.batches[index]["input_ids"][:, :4]
        run.record(
            run.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
        )
        run.model.train()
        finish(run)


def casts_automatically(run):
    for index in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # memascend warns that autocast copies weights
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = run.loss(index)
        loss.backward()
        finish(run)


class Interruption(Exception):
    pass


@contextlib.contextmanager
def failing(module, where):
    def fail(*_):
        raise Interruption

    register = {
        "before": module.register_forward_pre_hook,
        "after": module.register_forward_hook,
        "backward": module.register_full_backward_hook,
    }[where]
    handle = register(fail)
    try:
        yield
    except Interruption:
        pass
    else:
        raise AssertionError("the exception that the hook raised did not reach the caller")
    finally:
        handle.remove()


def retains(run):
    """Runs two forwards, and then one backward of the sum of the two losses. This backward retains the graphs."""
    for index in range(3):
        first, second = run.loss(index), run.loss(index + 1)
        (first + second).backward(retain_graph=True)
        finish(run)
