"""Tests the gradients that a step uses: non-finite, replaced and zeroed gradients; failed steps and backwards."""

import math

import pytest
import torch
from support.bits import same_states
from support.chains import WIDTH, batch, chain, loss_of, offloaded, require_same, twins, values
from support.checkpointed import OwnCheckpoint

import memascend
from memascend.errors import UsageError

# Optimizers whose updates run in the engine's kernels (adamw, sgd), and in torch's code (rmsprop).
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3),
}


def begun(tmp_path, gradients, **options):
    options = {"gradients": gradients, "host_memory": "64MiB", **options}
    return offloaded(tmp_path / "s", chain(3, True), torch.optim.SGD, 0.1, **options)


@pytest.mark.parametrize("gradients", ["ssd", "ram"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_clipping_of_nonfinite_gradients_equals_torch(tmp_path, kind, value, gradients):
    """A NaN norm makes all gradients NaN. An infinite norm makes infinite elements NaN, and all other elements 0."""
    plain, model = chain(3, True), chain(3, True)
    theirs = OPTIMIZERS[kind](plain.parameters())
    options = {"gradients": gradients, "max_grad_norm": 1.0, "nonfinite": "commit", "storage": tmp_path / "store"}
    model, optimizer = memascend.offload(model, OPTIMIZERS[kind](model.parameters()), **options)

    for of in (plain, model):
        of[2].bias.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor(1), value))
        loss_of(of, 0).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    theirs.step()
    optimizer.step()
    assert not math.isfinite(optimizer.grad_norm)
    optimizer.close()
    again = chain(3, True)
    again, optimizer = memascend.offload(again, OPTIMIZERS[kind](again.parameters()), existing="resume", **options)
    with optimizer:
        for name, expected in plain.state_dict().items():
            assert torch.allclose(again.state_dict()[name], expected, rtol=0, atol=1e-7, equal_nan=True), name


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("gradients", ["ssd", "ram", "auto"])
def test_step_rejects_a_nonfinite_norm_and_names_the_parameter(tmp_path, gradients, value):
    """step() raises an error that names the parameter, and keeps the parameter's gradient."""
    model, optimizer = begun(tmp_path, gradients)
    with optimizer:
        model[1].bias.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor(1), value))
        loss_of(model).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
        with pytest.raises(UsageError, match=r"step 1 was not .*finite: .*1.bias.*skip"):
            optimizer.step()
        assert not math.isfinite(optimizer.grad_norm)
        # The gradient that the error names stays for the user to examine.
        assert not model[1].bias.grad.isfinite().all()


def test_fused_step_with_nonfinite_norm_commits_with_a_warning_or_skips(tmp_path):
    """The norm is known only after the updates.

    step() commits the updates with a warning. With nonfinite="skip", step() discards the updates.
    """
    model, optimizer = begun(tmp_path, "fused")
    with optimizer:
        (loss_of(model) * math.inf).backward()
        with pytest.warns(UserWarning, match=r'step 1 was committed.*back to step 0.*existing="previous".*\. Pass'):
            optimizer.step()
        assert optimizer.steps == 1
    model, optimizer = begun(tmp_path, "fused", existing="replace", nonfinite="skip")
    with optimizer:
        (loss_of(model) * math.inf).backward()
        optimizer.step()
        assert (optimizer.overflowed, optimizer.steps) == (True, 0)
        require_same(chain(3, True), model)


@pytest.mark.parametrize(
    ("gradients", "zero"),
    [
        ("ssd", lambda _, optimizer: optimizer.zero_grad()),
        ("ssd", lambda _, optimizer: optimizer.zero_grad(set_to_none=False)),
        ("ram", lambda model, _: [setattr(one, "grad", torch.zeros_like(one)) for one in model.parameters()]),
    ],
)
def test_failed_step_rejects_a_backward_and_zeroing_discards_its_updates(tmp_path, monkeypatch, gradients, zero):
    plain = chain(3, True)
    model, optimizer = begun(tmp_path, gradients)
    with optimizer:
        loss_of(model, 2).backward()

        def fail(*_, **__):
            raise RuntimeError("not this time")

        with monkeypatch.context() as patched:
            # Every update is staged when step() calls `commit`.
            patched.setattr(memascend.engine.Engine, "commit", fail)
            with pytest.raises(RuntimeError, match="not this time"):
                optimizer.step()
        if gradients == "ssd":
            with pytest.raises(UsageError, match="already used the first"):
                loss_of(model, 3).backward()
        zero(model, optimizer)
        optimizer.step()
        require_same(plain, model)


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram", "auto"])
def test_gradients_of_a_failed_backward_are_never_used(tmp_path, gradients):
    model, optimizer = begun(tmp_path, gradients)
    with optimizer:
        before = values(model)
        # The hook raises after the last layer's gradients have arrived, and before the gradients of any other layer.
        middle = model[1](model[0](batch(1)))
        middle.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[2](middle).square().mean().backward()
        # The last layer's bias still has a gradient of the failed backward.
        model[2].weight.grad = None
        with pytest.raises(UsageError, match=r"last backward failed.*'2\.bias'.*zero_grad"):
            optimizer.step()
        with pytest.raises(UsageError, match=r"last backward failed|already used"):
            loss_of(model, 2).backward()
        optimizer.zero_grad()
        assert same_states(values(model), before)


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram", "auto"])
def test_step_uses_the_callers_gradients_again_only_after_a_change(tmp_path, gradients):
    plain, theirs, model, optimizer = twins(tmp_path, gradients)
    with optimizer:
        for parameter in (*plain.parameters(), *model.parameters()):
            parameter.grad = torch.ones_like(parameter)
        theirs.step()
        optimizer.step()
        with pytest.raises(UsageError, match=r"step\(\) was called again"):
            optimizer.step()
        require_same(plain, model)
        for of in (plain, model):
            torch.nn.utils.clip_grad_norm_(of.parameters(), 1e-3)
        theirs.step()
        optimizer.step()
        require_same(plain, model)


def test_declared_last_backward_rejects_a_second_part_of_a_gradient(tmp_path):
    """With `accumulation_steps`, the run knows which backward of a step is the last one.

    In this backward, a gradient that arrives is used at once, so a second part of the gradient is too late.
    """
    model, optimizer = begun(tmp_path, "fused", accumulation_steps=2)
    with optimizer:
        layer = model[0]
        before = values(model)
        layer(batch(1)).sum().backward()
        # The gradient of the outer call arrives first, because the outer call is nearer to the loss.
        inner = OwnCheckpoint.apply(layer, batch(2).requires_grad_())
        with pytest.raises(UsageError, match=r"already used the first.*ssd"):
            layer(inner).sum().backward()
        optimizer.zero_grad()
        assert same_states(values(model), before)


def test_rejected_zero_grad_zeroes_no_gradient(tmp_path):
    model, optimizer = begun(tmp_path, "fused")
    with optimizer:
        loss_of(model, 1).backward()
        first = next(model.parameters())
        first.grad = torch.ones(WIDTH, WIDTH)
        with pytest.raises(UsageError, match="set_to_none=False"):
            optimizer.zero_grad(set_to_none=False)
        assert bool((first.grad == 1).all())


def test_zero_grad_of_replaced_gradients_discards_staged_updates(tmp_path):
    """The caller replaces gradients that the engine has already used.

    `zero_grad` must discard the updates that the engine has staged.
    """
    model, optimizer = begun(tmp_path, "fused")
    with optimizer:
        before = values(model)
        loss_of(model, 1).backward()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert optimizer.steps == 1
        assert same_states(values(model), before)
