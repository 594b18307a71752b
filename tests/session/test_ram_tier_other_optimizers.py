"""Tests optimizers without a kernel where nothing is durable: torch's own are kept in RAM, unknown ones streamed."""

import logging

import pytest
import torch
from optim.test_shared import Counted
from support.bits import same_bits, same_states
from support.chains import chain, everything, loss_of, offloaded, train, twins

import memascend

LAYERS = 3


class Watched(Counted):
    """A class that nothing is known of, which fails where it is told to."""

    # By the norm of a parameter's gradient, which each parameter has another of.
    fails_at = None

    def step(self, closure=None):  # noqa: ARG002
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.fails_at in [gradient.norm().item() for gradient in gradients]:
            raise ArithmeticError("told to")
        super().step()


def made(tmp_path, kind, gradients="fused", **options):
    options = {"durability": "none", **options}
    plain, theirs, model, ours = twins(tmp_path, gradients, three, 1e-2, kind, **options)
    streams = kind is Watched and options["durability"] == "none"
    assert len(ours.plan.ram_tier) == (0 if streams else len(list(plain.parameters())))
    return plain, theirs, model, ours


def three():
    return chain(LAYERS, bias=True)


def stepped(plain, theirs, model, ours, steps):
    train(plain, theirs, steps)
    train(model, ours, steps)


def require_equal(plain, theirs, model, ours):
    assert same_states(dict(plain.named_parameters()), model.state_dict())
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        found = ours.state_of(other)
        for name, value in theirs.state[one].items():
            if value is not None:
                assert same_bits(torch.as_tensor(value), found[name].reshape(torch.as_tensor(value).shape)), name
    for one, other in zip(theirs.param_groups, ours.param_groups, strict=True):
        assert {key: one[key] for key in one if key != "params"} == {key: other[key] for key in one if key != "params"}


def norm_of_one(plain, step, place):
    """The norm of the gradient that one parameter has at a step."""
    loss_of(plain, step).backward()
    norm = list(plain.parameters())[place].grad.norm().item()
    plain.zero_grad()
    return norm


@pytest.mark.parametrize("durability", ["step", "none"])
def test_a_class_that_is_not_torchs_is_streamed_where_nothing_is_durable_and_the_log_says_so(
    tmp_path, caplog, durability
):
    with caplog.at_level(logging.INFO, "memascend"):
        plain, theirs, model, ours = made(tmp_path, Watched, durability=durability)
    said = f"{2 * LAYERS} parameters of Watched are not kept in RAM" in caplog.text
    assert said == (durability == "none")
    with ours:
        stepped(plain, theirs, model, ours, range(3))
        require_equal(plain, theirs, model, ours)
    # Nothing is durable in a temporary store either.
    with offloaded(None, three(), Watched, durability=durability, host_memory="64MiB")[1] as ours:
        assert not ours.plan.ram_tier


@pytest.mark.parametrize("place", [0, 2 * LAYERS - 1])
def test_a_class_that_fails_half_way_loses_no_step(tmp_path, monkeypatch, place):
    plain, theirs, model, ours = made(tmp_path, Watched)
    with ours:
        stepped(plain, theirs, model, ours, range(2))
        before, options = everything(model, ours), dict(ours.param_groups[0])
        monkeypatch.setattr(Watched, "fails_at", norm_of_one(plain, 2, place))
        with pytest.raises(memascend.UsageError) as error:  # noqa: PT012 - a streamed update may fail in either
            loss_of(model, 2).backward()
            ours.step()
        assert isinstance(error.value.__cause__, ArithmeticError)
        assert ours.steps == 2
        ours.zero_grad()
        assert same_states(everything(model, ours), before)
        assert ours.param_groups[0]["k"] == options["k"]
        monkeypatch.setattr(Watched, "fails_at", None)
        stepped(plain, theirs, model, ours, range(2, 4))
        require_equal(plain, theirs, model, ours)


# Whose code updates parts of a parameter, and whose code updates it whole.
@pytest.mark.parametrize(("kind", "gradients"), [(torch.optim.NAdam, "fused"), (torch.optim.Adafactor, "ssd")])
def test_an_option_that_cannot_be_ends_the_step_and_not_the_run(tmp_path, kind, gradients):
    plain, theirs, model, ours = made(tmp_path, kind, gradients)
    with ours:
        # The first commit says in the catalog that the store is not closed.
        stepped(plain, theirs, model, ours, range(2))
        before = ours.report()
        ours.param_groups[0]["lr"] = "fast"
        loss_of(model, 2).backward()
        with pytest.raises(memascend.UsageError):
            ours.step()
        ours.zero_grad()
        ours.param_groups[0]["lr"] = 1e-2
        stepped(plain, theirs, model, ours, range(2, 5))
        report = ours.report()
        assert (report.read, report.written) == (before.read, before.written), "no byte was moved"
        require_equal(plain, theirs, model, ours)
