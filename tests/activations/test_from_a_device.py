"""Tests checkpointed activations of a device: in pinned host memory or on storage, bit for bit."""

import dataclasses
import gc
from functools import partial

import pytest
import torch
from parity.harness import Mode, check, reference
from parity.zoo_transformers import TRANSFORMERS
from support import checkpointed
from support.bits import same_states
from support.chains import smallest
from support.checkpointed import WIDTH, keeper, require_two_backwards

import memascend
from memascend.activations import activations
from memascend.activations import chunks as activation_memory
from memascend.plan import decision

ROWS, BLOCKS = 64, 6
NBYTES = ROWS * WIDTH * 4
# Room for all blocks' inputs, what they share, and what is kept spare.
GROUPS = BLOCKS + 2
STEPS = 2
# A tensor is four pieces of a page.
CHUNK = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(decision, "ACTIVATION_CHUNKS", {CHUNK: 3})
    # One tensor's.
    monkeypatch.setattr(decision, "ACTIVATION_GROUP", NBYTES // CHUNK)
    monkeypatch.setattr(decision, "ACTIVATION_GROUPS", GROUPS)


offloaded = partial(checkpointed.offloaded, blocks=BLOCKS, activations="host", gradients="ssd")
rows = partial(checkpointed.rows, ROWS)


def comfortable(tmp_path):
    """The budget with all groups, and what one of them takes."""
    _, optimizer = offloaded(tmp_path, existing="replace")
    with optimizer:
        plan = optimizer.plan
    _, optimizer = offloaded(tmp_path, existing="replace", activations="ssd")
    with optimizer:
        return plan.comfortable, (plan.host["activations"] - optimizer.plan.host["activations"]) // GROUPS


def trained(tmp_path, **options):
    shared = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(9))
    model, optimizer = offloaded(tmp_path, existing="replace", **options)
    model.others = (shared,)
    losses, weights = checkpointed.trained(model, optimizer, map(rows, range(STEPS)))
    report = optimizer.report().to_dict()
    # Only beside what it holds while it lives.
    owners = report["host"]["owners"]
    assert owners.get("activations", {"bytes": 0})["bytes"] <= optimizer.plan.host["activations"]
    assert report["host"]["peak"] <= report["host"]["budget"]
    return losses, weights, report["written"].get("activations", 0)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_same_bits(tmp_path, reentrant):
    losses, weights, _ = trained(tmp_path, reentrant=reentrant, activations="device")
    most, group = comfortable(tmp_path)
    kept = (BLOCKS + 1) * NBYTES * STEPS
    # The last ones may be used before they were written.
    last = 3 * CHUNK * STEPS
    budgets = {
        None: (0, 0),
        smallest(offloaded, tmp_path, existing="replace"): (kept - last, kept),
        most - (GROUPS - 4) * group: (1, kept - last - 1),
        most + 99: (0, 0),
    }
    for budget, (at_least, at_most) in budgets.items():
        found, others, went = trained(tmp_path, reentrant=reentrant, host_memory=budget)
        assert found == losses
        assert same_states(weights, others)
        assert at_least <= went <= at_most, budget
    found, others, went = trained(tmp_path, reentrant=reentrant, activations="ssd")
    assert found == losses
    assert kept - last <= went <= kept
    assert same_states(weights, others)


@pytest.mark.usefixtures("fake")
def test_the_plan_has_what_the_budget_leaves(tmp_path):
    most, group = comfortable(tmp_path)
    _, optimizer = offloaded(tmp_path, existing="replace")
    with optimizer:
        plan = optimizer.plan
        assert plan.activation_groups == GROUPS
        assert most == plan.budget == plan.comfortable == plan.host_peak
        assert "pinned, taken as they are needed; activations beyond them go to storage" in str(plan)
    _, optimizer = offloaded(tmp_path, existing="replace", host_memory=plan.comfortable + 3 * group + 1)
    with optimizer:
        assert optimizer.plan.activation_groups == GROUPS + 3
        assert optimizer.plan.host_peak == plan.comfortable + 3 * group
        # Nothing of it is taken before it is needed.
        held = optimizer.report().to_dict()["host"]["owners"]["activations"]["bytes"]
        assert held == optimizer.plan.host["activations"] - (GROUPS + 3) * group


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["host", "ssd"])
def test_what_is_kept_is_gone_from_the_device(tmp_path, fake, where, reentrant):
    model, optimizer = offloaded(tmp_path, reentrant=reentrant, activations=where)
    with optimizer:
        x = rows()
        taken = fake.taken
        loss = model(x).square().mean()
        gc.collect()
        # The user's own, and the last ones, whose copies may be under way.
        lives = [ref() is not None for ref in model.inputs]
        assert lives[1 : BLOCKS - activations._COMING] == [False] * (BLOCKS - activations._COMING - 1)
        assert fake.taken - taken == BLOCKS * x.nbytes
        loss.backward()


def test_a_graph_that_is_dropped_leaves_nothing(tmp_path, fake):
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        x = rows()
        model.others = (x,)
        loss = model(x).square().mean()
        fake.inward.delay = 0.02
        # The first of them is asked for, and its copy under way.
        restored = keeper(model)._living[BLOCKS - 1]().tensor()
        del loss
        gc.collect()
        keeper(model)._reap()
        fake.inward.delay = 0
        model(rows(2)).square().mean().backward()
        optimizer.step()
        assert restored.isfinite().all()
        keeper(model)._reap()
        assert not keeper(model)._living
        assert not keeper(model)._chunks._held


def test_closing_waits_for_copies_that_are_on_their_way(tmp_path, fake):
    model, optimizer = offloaded(tmp_path)
    fake.outward.delay = 0.05
    with optimizer:
        _graph = model(rows())
        copies = [chunk.copy for chunk in keeper(model)._chunks._held]
        assert not copies[-1].done()
    assert copies[-1].done()


@pytest.mark.usefixtures("fake")
def test_a_backward_again(tmp_path):
    most, group = comfortable(tmp_path)
    model, optimizer = offloaded(tmp_path, existing="replace", host_memory=most - (GROUPS - 4) * group)
    with optimizer:
        require_two_backwards(model, rows())


def test_what_is_changed_in_place_is_right_or_refused(tmp_path, fake):
    fake.outward.delay = 0.01
    model, optimizer = offloaded(tmp_path)
    with optimizer:

        def gradients(*, at=None, after=False):
            """Change the model's input in place when a block is called, or after the forward."""
            x = rows().detach()

            def change(*_):
                x.zero_()

            hook = None if at is None else model.blocks[at].up.register_forward_pre_hook(change)
            try:
                loss = model(x).square().mean()
            finally:
                if hook is not None:
                    hook.remove()
            if after:
                change()
            loss.backward()
            found = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            return found

        expected = gradients()
        # By then it is in host memory, and is what it was.
        assert all(map(torch.equal, expected, gradients(after=True)))
        with pytest.raises(memascend.UsageError, match="changed in place before it was copied off the device"):
            gradients(at=1)


def test_a_device_that_fails_is_heard_of_and_nothing_is_committed(tmp_path, fake):
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        loss = model(rows()).square().mean()
        fake.fails = RuntimeError("the device is lost")
        with pytest.raises(RuntimeError, match="the device is lost"):
            loss.backward()
        del loss
        fake.fails = None
        optimizer.zero_grad()
        model(rows()).square().mean().backward()
        optimizer.step()
        assert optimizer.steps == 1


@pytest.mark.usefixtures("fake")
def test_memory_that_is_not_to_be_had_is_storage(tmp_path, monkeypatch, caplog):
    """What the machine does not have when it is needed is no error: the plan's chunks are a limit."""
    losses, weights, _ = trained(tmp_path, activations="device")
    real = activation_memory.memory.ChunkRing

    def scarce(chunk_bytes, count, **options):
        if (chunk_bytes, count) == (CHUNK, decision.ACTIVATION_GROUP):
            raise memascend.MemoryLimitError("there is no more", needed=1, available=0)
        return real(chunk_bytes, count, **options)

    monkeypatch.setattr(activation_memory.memory, "ChunkRing", scarce)
    found, others, written = trained(tmp_path)
    assert found == losses
    assert same_states(weights, others)
    assert written > BLOCKS * NBYTES * STEPS // 2
    assert "checkpointed activations go to storage from here on: there is no more" in caplog.text


CASES = {case.name: case for case in TRANSFORMERS if case.name in ("checkpointed", "checkpointed-reentrant")}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("where", "budget"),
    [
        ("host", "large"),
        pytest.param("host", "smallest", marks=pytest.mark.slow),
        ("ssd", "smallest"),
    ],
)
def test_models_of_others(name, where, budget, tmp_path, monkeypatch, fake):
    monkeypatch.setattr(activations, "BYTES_MIN", 1)
    kept = []
    restored = activations.Activations.restore
    monkeypatch.setattr(activations.Activations, "restore", lambda self, one: kept.append(1) or restored(self, one))
    mode = Mode("fused", budget, 1)
    reference(CASES[name], mode.threads)
    case = dataclasses.replace(CASES[name], options={"activations": where, "device_memory": "1GiB"})
    check(case, mode, tmp_path)
    assert kept, "nothing was kept elsewhere: this test could not fail"
    assert fake.taken
