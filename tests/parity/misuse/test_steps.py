"""Tests steps that cannot be exact, calls after close(), and stored options: errors and warnings say what to do."""

import copy
import math
import re

import pytest
import torch
from parity.harness import adamw
from parity.zoo_plain import Stack
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import memascend
from memascend import ConfigError, MemascendError, UsageError


@pytest.fixture
def fused(offloaded):
    training = offloaded(gradients="fused", steps=1)
    yield training
    if training.optimizer.steps:  # zero_grad() recovers from every rejected call
        training.optimizer.zero_grad()
        steps = training.optimizer.steps
        training.step(2)
        assert training.optimizer.steps == steps + 1


GONE = "gradients='ssd'"
LATE = rf"max_grad_norm= to offload\(\) \(and set max_grad_norm of a Trainer to 0\).*{GONE}"
ZEROED = f"set_to_none=False.*{GONE}"
# Operations that a gradient handle rejects after an update has used the gradient, and a regular expression for each
# error.
TOO_LATE = [
    (lambda g: g.mul_(0.5), LATE),
    (lambda g: g.mul_(torch.tensor(0.5)), LATE),
    (lambda g: torch._foreach_mul_([g], 0.5), LATE),
    (lambda g: g.clamp_(-1, 1), LATE),
    (lambda g: g.copy_(torch.ones(g.shape)), GONE),
    (lambda g: g.mul_(torch.ones(g.shape)), GONE),
    (lambda g: g.add_(torch.ones(g.shape)), f"accumulation_steps=.*{GONE}"),
    (lambda g: g.zero_(), ZEROED),
    (lambda g: torch._foreach_zero_([g]), ZEROED),
    (lambda g: g.clone(), GONE),
    (lambda g: g.tolist(), GONE),
    (copy.deepcopy, GONE),
    (lambda g: g.norm(1), GONE),
    (lambda g: torch.linalg.vector_norm(g, 2, dim=0), GONE),
    (lambda g: g.numpy(), "gradients='ram'"),
    (
        lambda g: torch._amp_foreach_non_finite_check_and_unscale_([g], torch.zeros(1), torch.ones(1)),
        f"loss_scale=.*{GONE}",
    ),
]


def test_gradient_handle_rejects_operations_after_its_update(fused):
    fused.loss(0).backward()
    gradient = fused.model.head.weight.grad
    assert (gradient.shape, gradient.dtype) == (fused.model.head.weight.shape, torch.float32)
    for call, words in TOO_LATE:
        with pytest.raises(UsageError, match=words):
            call(gradient)
    parameters = list(fused.model.parameters())
    for foreach in (True, False):
        for clip in (clip_grad_norm_, clip_grad_value_):
            clip(parameters, math.inf, foreach=foreach)
            with pytest.raises(UsageError, match=LATE):
                clip(parameters, 1e-3, foreach=foreach)
        with pytest.raises(UsageError, match=GONE):
            clip_grad_norm_(parameters, math.inf, 1.0, foreach=foreach)
    with pytest.raises(UsageError, match=LATE):
        fused.optimizer.clip_grad_norm_(1e-3)
    assert gradient.mul_(1.0) is gradient
    assert "already used" in repr(gradient)
    assert torch.linalg.vector_norm(gradient, 2, dtype=torch.float64).dtype == torch.float64
    assert torch._foreach_norm([gradient], 2, torch.float64)[0].dtype == torch.float64
    assert not torch.zeros_like(gradient).any()


def test_model_cpu_keeps_used_gradients(fused):
    """Lightning calls model.cpu() after training. For each gradient, model.cpu() sets `p.grad.data = p.grad.cpu()`."""
    fused.loss(0).backward()
    kept = fused.model.head.weight.grad
    assert fused.model.cpu() is fused.model
    assert fused.model.head.weight.grad is kept


def test_gradients_in_memory_are_plain_tensors(offloaded):
    training = offloaded(gradients="ram")
    training.loss().backward()
    gradient = training.model.head.weight.grad
    assert type(gradient) is torch.Tensor
    gradient.view(-1)[0] = 1.0
    assert gradient[0, 0] == gradient.t()[0, 0] == 1.0
    training.optimizer.step()


def test_step_rejects_an_option_changed_after_the_update_ran(fused):
    group = fused.optimizer.param_groups[0]
    for option, other in {"lr": 0.5, "betas": (0.5, 0.5), "maximize": True}.items():
        before = group[option]
        fused.loss(0).backward()
        group[option] = other
        with pytest.raises(UsageError, match=option):
            fused.optimizer.step()
        fused.optimizer.zero_grad()
        group[option] = before


def test_loss_backward_of_an_fp16_model_is_rejected(offloaded):
    for gradients in ("fused", "ssd"):
        training = offloaded(Stack().half(), gradients=gradients, existing="replace")
        with training.keeps_weights():
            with pytest.raises(UsageError, match=r"optimizer\.backward"):
                training.loss().backward()
            training.optimizer.zero_grad()
        training.optimizer.backward(training.loss())
        training.optimizer.step()
        training.optimizer.close()


def test_step_within_a_forward_is_rejected(offloaded):
    training = offloaded(steps=1)
    training.loss(0).backward()
    steps = training.model.blocks[1].register_forward_hook(lambda *_: training.optimizer.step())
    with steps, pytest.raises(UsageError, match="forward"):
        training.loss(1)
    training.optimizer.zero_grad()
    training.step(1)


def test_grad_assignment_of_wrong_shape_or_type_raises_as_in_torch(offloaded):
    training = offloaded()
    weight = training.model.head.weight
    with pytest.raises(RuntimeError):
        weight.grad = torch.zeros(3)
    with pytest.raises((RuntimeError, TypeError)):
        weight.grad = "none"


# --- close(), user state, stored options -----------------------------------------------


def test_calls_after_close_raise_usage_error(offloaded):
    training = offloaded(steps=1)
    training.optimizer.close()
    training.optimizer.close()
    weight = training.model.head.weight
    for use in (
        training.loss,
        training.optimizer.step,
        lambda: weight + 1,
        weight.norm,
        lambda: training.optimizer.state_of(weight),
        training.model.state_dict,
        training.weights,
    ):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_exception_in_a_with_block_drops_the_uncommitted_step(offloaded):
    training = offloaded()
    with pytest.raises(KeyError), training.optimizer as optimizer:  # noqa: PT012 - the test is about the block
        optimizer.user_state = {"position": 1}
        training.step()
        optimizer.user_state = {"position": 2}
        optimizer.param_groups[0]["lr"] = 0.5
        training.loss().backward()
        raise KeyError("the user's own")
    with pytest.raises(UsageError, match="closed"):
        training.loss()
    again = offloaded(existing="resume").optimizer
    assert (again.steps, again.user_state) == (1, {"position": 1})
    assert again.param_groups[0]["lr"] == 1e-2


def test_close_of_a_temporary_store_with_unread_weights_warns():
    model = torch.nn.Linear(64, 64)
    model, optimizer = memascend.offload(model, adamw(model))
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="storage"):
        optimizer.close()


def test_user_state_rejects_tensors_objects_sets_and_long_text(offloaded):
    training = offloaded()
    training.optimizer.user_state = {"epoch": 3, "seen": [1, 2.5, None, "text"]}
    training.step()
    assert training.optimizer.user_state == {"epoch": 3, "seen": [1, 2.5, None, "text"]}
    for wrong in ({"rng": torch.zeros(3)}, object(), "x" * (64 << 10), {1, 2}):
        with pytest.raises(MemascendError):  # noqa: PT012 - either line may raise
            training.optimizer.user_state = wrong
            training.step()
        training.optimizer.user_state = None
        training.optimizer.zero_grad()


def test_stored_options_warning_shows_code_that_sets_the_option(offloaded, tmp_path):
    """The warning suggests a line of code.

    The line runs unchanged, and the store then has the option that the line sets.
    """
    training = offloaded(steps=1)
    training.optimizer.close()
    model = Stack()
    with pytest.warns(UserWarning, match="stored options") as warned:
        again = offloaded(model, adamw(model, lr=0.5), existing="resume")
    output = str(warned[0].message)
    line = re.search(r"set them after offload\(\): (optimizer\S+ = \S+);", output)[1]
    optimizer = again.optimizer
    assert line == "optimizer.param_groups[0]['lr'] = 0.5"
    exec(line, {"optimizer": optimizer})  # noqa: S102 - the library's own text
    assert "base_lrs" in output
    again.step(1)
    optimizer.close()
    assert memascend.engine.Store.open(tmp_path / "run.store").hyperparameters["groups"][0]["lr"] == 0.5


def scheduled(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)


def test_resume_does_not_warn_about_a_scheduled_learning_rate(offloaded):
    """A restarted script passes the initial learning rate.

    offload() must not warn that a scheduler has changed this rate.
    """
    training = offloaded()
    scheduler = scheduled(training.optimizer)
    training.step()
    scheduler.step()
    rate = training.optimizer.param_groups[0]["lr"]
    training.step(1)
    training.optimizer.close()
    for before in (True, False):
        model = Stack()
        optimizer = adamw(model)
        if before:
            scheduled(optimizer)
        again = offloaded(model, optimizer, existing="resume").optimizer
        assert again.param_groups[0]["lr"] == rate
        assert again.param_groups[0]["initial_lr"] == pytest.approx(1e-2)
        again.close()
    # offload() must warn about a learning rate that differs from the initial learning rate of the stored run.
    with pytest.warns(UserWarning, match=r"lr 0\.5 -> ") as warned:
        offloaded(model := Stack(), adamw(model, lr=0.5), existing="resume")
    assert "initial_lr" not in str(warned[0].message)


def test_failed_resume_leaves_model_and_optimizer_unchanged(offloaded, tmp_path, unchanged):
    training = offloaded(steps=1)
    scheduled(training.optimizer)
    training.step(1)
    training.optimizer.close()
    model = Stack()
    optimizer = adamw(model)
    check = unchanged(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memascend.device.unit_memory.HostArena", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            memascend.offload(model, optimizer, storage=tmp_path / "run.store", existing="resume")
    check()


def test_state_of_rejects_a_parameter_of_another_model(offloaded):
    with pytest.raises((ConfigError, UsageError)):
        offloaded().optimizer.state_of(torch.nn.Parameter(torch.zeros(3)))
