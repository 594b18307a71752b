"""Tests `optimizer.schedule()`: step() advances and commits the schedulers, and a resume restores or rejects them."""

import functools
from unittest import mock

import numpy as np
import pytest
import torch
from support import chains
from support.bits import same_states
from torch.optim import lr_scheduler as torchs
from torch.optim import swa_utils

import memascend
from memascend import ConfigError, UsageError

STEPS = 6


class Warmup:
    """A callable object with attributes. LambdaLR stores these attributes in its state dict."""

    def __init__(self, steps):
        self.steps = steps
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return min(1.0, (step + 1) / self.steps)


def linear(step, *, warmup, steps):
    return min((step + 1) / warmup, (steps - step) / steps)


SCHEDULERS = {
    "partial": lambda o: torchs.LambdaLR(o, functools.partial(linear, warmup=2, steps=STEPS)),
    "object": lambda o: torchs.LambdaLR(o, [Warmup(3), lambda _: 1.0]),
    "step": lambda o: torchs.StepLR(o, 2, 0.5),
    "milestones": lambda o: torchs.MultiStepLR(o, [2, 4, 4], 0.5),
    "cosine": lambda o: torchs.CosineAnnealingLR(o, 5),
    "restarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 2, 2),
    "cyclic": lambda o: torchs.CyclicLR(o, 1e-4, 1e-3, 2, mode="exp_range", gamma=0.9),
    "one cycle": lambda o: torchs.OneCycleLR(o, 1e-2, total_steps=STEPS, three_phase=True),
    "chained": lambda o: torchs.ChainedScheduler([torchs.ConstantLR(o, 0.1, 3), torchs.ExponentialLR(o, 0.9)]),
    "sequential": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o, 0.1, total_iters=2), torchs.CosineAnnealingWarmRestarts(o, 2, 2)], [2]
    ),
    "one cycle in sequence": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o), torchs.OneCycleLR(o, 4e-3, total_steps=20)], [2]
    ),
    "numpy": lambda o: torchs.StepLR(o, np.int64(2)),
    "swa": lambda o: swa_utils.SWALR(o, 5e-3, 4),
}


def made(rate=1e-3):
    model = chains.chain(bias=True, width=16)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "lr": 3e-3}]
    return model, torch.optim.AdamW(groups, lr=rate, fused=True)


def turn(model, optimizer, step):
    """Trains one step. Returns the learning rate and the betas that each group had in this step."""
    had = [(float(group["lr"]), group["betas"]) for group in optimizer.param_groups]
    chains.step(model, optimizer, step)
    return had


def opened(path, **options):
    return memascend.offload(*made(), storage=path, **{"existing": "resume", **options})


def scheduled(path, kind="cosine", *, before=False, existing="resume", rate=1e-3, **options):
    model, optimizer = made(rate)
    scheduler = SCHEDULERS[kind](optimizer) if before else None
    model, optimizer = memascend.offload(model, optimizer, storage=path, existing=existing, **options)
    scheduler = scheduler or SCHEDULERS[kind](optimizer)
    optimizer.schedule(scheduler)
    return model, optimizer, scheduler


def lived(path, kind="cosine", until=1, **options):
    """Starts or resumes a run and trains to step `until`. Returns a list with the result of `turn` for each step."""
    model, optimizer, _ = scheduled(path, kind, **options)
    with optimizer:
        return [turn(model, optimizer, step) for step in range(optimizer.steps, until)]


def in_memory(kind, steps=STEPS):
    model, optimizer = made()
    scheduler = SCHEDULERS[kind](optimizer)
    had = []
    for step in range(steps):
        had.append(turn(model, optimizer, step))
        scheduler.step()
    return model, had, [group["lr"] for group in optimizer.param_groups]


def stored(path):
    with memascend.engine.Store.open(path) as store:
        return store.hyperparameters


WAYS = {
    "fused": {"gradients": "fused"},
    "kept": {"gradients": "ssd", "max_grad_norm": 1e9},
    "in RAM": {"gradients": "ram", "host_memory": "64MiB"},
    "at the end": {"durability": "none", "loss_scale": 1.0},
}


# In "one cycle in sequence", the constructor of OneCycleLR sets betas, and no step has changed them before the first
# resume. The commit then does not record that a scheduler sets betas, so offload() warns that the stored betas differ.
@pytest.mark.filterwarnings("ignore:the stored options are used:UserWarning")
@pytest.mark.parametrize("number", range(len(SCHEDULERS)), ids=SCHEDULERS)
def test_scheduled_rates_and_weights_equal_torch_over_two_resumes(tmp_path, number):
    """The three runs alternate between creating the scheduler before offload() and creating it after offload()."""
    kind = list(SCHEDULERS)[number]
    way = WAYS[list(WAYS)[number % len(WAYS)]]
    memory, rates, last = in_memory(kind)
    had = []
    for life, until in enumerate((2, 3, STEPS)):
        before = (life + number // len(WAYS)) % 2 == 0
        model, optimizer, scheduler = scheduled(tmp_path / "s", kind, before=before, **way)
        with optimizer:
            had += [turn(model, optimizer, step) for step in range(optimizer.steps, until)]
            assert [group["lr"] for group in optimizer.param_groups] == scheduler.get_last_lr()
            if until == STEPS:
                chains.require_same(memory, model)
    assert had == rates
    assert [group["lr"] for group in stored(tmp_path / "s")["groups"]] == last


def test_schedulers_advance_in_order_and_step_calls_its_closure(tmp_path):
    memory, _, last = in_memory("chained", 3)
    model, optimizer = opened(tmp_path / "s")
    optimizer.schedule(torchs.ConstantLR(optimizer, 0.1, 3), torchs.ExponentialLR(optimizer, 0.9))
    with optimizer:
        for step in range(3):
            optimizer.step(lambda step=step: chains.loss_of(model, step).backward())
            optimizer.zero_grad()
        assert [group["lr"] for group in optimizer.param_groups] == last
        chains.require_same(memory, model)


# --- steps that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one cycle", "sequential", "object"])
def test_failed_commit_leaves_scheduler_and_groups_unchanged(tmp_path, kind):
    model, optimizer, scheduler = scheduled(tmp_path / "s", kind)

    def seen():
        groups = [{**group, "params": None} for group in optimizer.param_groups]
        return groups, {**scheduler.state_dict(), "lr_lambdas": None, "_schedulers": None}, scheduler.get_last_lr()

    error = memascend.StorageError("no space")
    fails = mock.patch.object(memascend.engine.Engine, "commit", side_effect=error)
    with optimizer:
        turn(model, optimizer, 0)
        before = seen()
        with fails, pytest.raises(memascend.StorageError, match="no space"):
            turn(model, optimizer, 1)
        assert seen() == before
        optimizer.zero_grad()
        turn(model, optimizer, 1)
        assert scheduler.get_last_lr() == in_memory(kind, 2)[2]
    model, optimizer = opened(tmp_path / "s")
    with optimizer:
        warns = pytest.warns(UserWarning, match=r"run used .* did not call optimizer.schedule")
        with fails, warns, pytest.raises(memascend.StorageError):
            turn(model, optimizer, 2)
        optimizer.zero_grad()
        # This run has committed no step yet, so the new scheduler resumes where the scheduler of the previous run
        # stopped.
        scheduler = SCHEDULERS[kind](optimizer)
        optimizer.schedule(scheduler)
        assert scheduler.get_last_lr() == in_memory(kind, 2)[2]


def test_step_commits_nothing_if_the_scheduler_raises(tmp_path):
    model, optimizer, scheduler = scheduled(tmp_path / "s", "one cycle")
    with optimizer:
        for step in range(STEPS):
            turn(model, optimizer, step)
        with pytest.raises(ValueError, match="Tried to step 7 times") as raised:
            turn(model, optimizer, STEPS)
        assert "nothing was committed" in raised.value.__notes__[0]
        assert (optimizer.steps, scheduler.last_epoch) == (STEPS, STEPS)


# --- schedulers that are rejected ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cosine", "chained"])
@pytest.mark.parametrize("gradients", ["fused", "ssd"])
def test_step_rejects_a_scheduler_that_the_loop_also_advances(tmp_path, gradients, kind):
    model, optimizer, scheduler = scheduled(tmp_path / "s", kind, gradients=gradients)
    with optimizer:
        turn(model, optimizer, 0)
        scheduler.step()
        with pytest.raises(
            UsageError, match=r"was changed since the last step .*delete your calls of scheduler.step\(\)"
        ):
            turn(model, optimizer, 1)
        assert optimizer.steps == 1
    # close() must not commit the learning rate that the loop set by calling scheduler.step().
    assert stored(tmp_path / "s")["groups"][0]["lr"] == in_memory(kind, 1)[2][0]


class OfFunctions(torchs.LambdaLR):
    def state_dict(self):
        return {**super().state_dict(), "rule": {"of": max}}


REFUSED = {
    "none": (lambda _: (), "was given no scheduler"),
    "a metric": (
        lambda o: [torchs.ReduceLROnPlateau(o)],
        r"ReduceLROnPlateau needs an argument \(a metric.*docs/resume\.md",
    ),
    "no scheduler": (lambda o: [o], "argument 0 is of type OffloadedOptimizer"),
    "another optimizer": (lambda _: [torchs.StepLR(made()[1], 2)], "StepLR sets the options of another optimizer"),
    "twice": (lambda o: [torchs.StepLR(o, 2)] * 2, "twice"),
    "functions": (lambda o: [OfFunctions(o, lambda _: 1.0)], r"'rule\.of' in the state of OfFunctions is <built-in f"),
    "size": (
        lambda o: [torchs.MultiStepLR(o, range(10_000))],
        r"the state of MultiStepLR has \d+ bytes as JSON, but may have at most 32768",
    ),
}


@pytest.mark.parametrize("given", REFUSED)
def test_schedule_rejects_arguments_that_it_cannot_advance_or_store(tmp_path, given):
    schedulers_of, words = REFUSED[given]
    model, optimizer = opened(tmp_path / "s")
    with optimizer:
        with pytest.raises(ConfigError, match=words):
            optimizer.schedule(*schedulers_of(optimizer))
        turn(model, optimizer, 0)
    assert "schedule" not in stored(tmp_path / "s")


OTHERS = {
    "class": ("cosine", lambda o: torchs.StepLR(o, 5), r"used CosineAnnealingLR, not StepLR"),
    "T_max": (
        "cosine",
        lambda o: torchs.CosineAnnealingLR(o, 9),
        r"different arguments or learning rates than in the stored run: T_max 5 -> 9\.",
    ),
    "milestones": (
        "milestones",
        lambda o: torchs.MultiStepLR(o, [2, 4], 0.5),
        r"milestones \[\[2, 1\], \[4, 2\]\] -> ",
    ),
    "object": ("object", lambda o: torchs.LambdaLR(o, [Warmup(4), lambda _: 1.0]), r"lr_lambdas\.0\.steps 3 -> 4"),
    "partial": (
        "partial",
        lambda o: torchs.LambdaLR(o, functools.partial(linear, warmup=2, steps=9)),
        r"lr_lambdas\.0\(steps\) 6 -> 9",
    ),
    "maximum": ("one cycle", lambda o: torchs.OneCycleLR(o, 2e-2, total_steps=STEPS, three_phase=True), "base_lrs"),
    "minimum": (
        "one cycle",
        lambda o: torchs.OneCycleLR(o, 1e-2, total_steps=STEPS, three_phase=True, final_div_factor=1e3),
        "min_lr of group 0",
    ),
    "parts": (
        "chained",
        lambda o: torchs.ChainedScheduler([torchs.ConstantLR(o, 0.1, 3), torchs.StepLR(o, 2)]),
        r"ChainedScheduler\(ConstantLR, ExponentialLR\), not ChainedScheduler\(ConstantLR, StepLR\)",
    ),
    "argument of a part": (
        "chained",
        lambda o: torchs.ChainedScheduler([torchs.ConstantLR(o, 0.1, 4), torchs.ExponentialLR(o, 0.9)]),
        r"_schedulers\.0\.total_iters 3 -> 4",
    ),
    "option of groups": ("swa", lambda o: swa_utils.SWALR(o, 2e-3, 4), r"swa_lr of group 0 0\.005 -> 0\.002"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_resume_rejects_a_different_scheduler_and_names_the_difference(tmp_path, other):
    kind, scheduler_of, words = OTHERS[other]
    lived(tmp_path / "s", kind)
    model, optimizer = opened(tmp_path / "s")
    with optimizer:
        given = scheduler_of(optimizer)
        before = given.get_last_lr()
        with pytest.raises(ConfigError, match=words):
            optimizer.schedule(given)
        assert given.get_last_lr() == before == [group["lr"] for group in optimizer.param_groups]
        # The error advises `restore=False`, so the test passes this option. The next resume does not need the option.
        optimizer.schedule(given, restore=False)
        turn(model, optimizer, 1)
    _, optimizer = opened(tmp_path / "s")
    with optimizer:
        optimizer.schedule(scheduler_of(optimizer))
        assert optimizer.steps == 2


@pytest.mark.filterwarnings("ignore:the stored options are used:UserWarning")
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", ["chained", "swa", "one cycle", "cyclic"])
def test_schedule_rejects_another_base_rate_unless_scheduler_sets_its_own(tmp_path, kind, before):
    lived(tmp_path / "s", kind)
    model, optimizer = made(2e-3)
    scheduler = SCHEDULERS[kind](optimizer) if before else None
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "s", existing="resume")
    with optimizer:
        scheduler = scheduler or SCHEDULERS[kind](optimizer)
        if kind in ("one cycle", "cyclic"):
            optimizer.schedule(scheduler)
            assert turn(model, optimizer, 1) == in_memory(kind)[1][1]
        else:
            with pytest.raises(ConfigError, match=r"initial_lr of group 0 0\.001 -> 0\.002"):
                optimizer.schedule(scheduler)


@pytest.mark.filterwarnings("ignore:the stored options are used:UserWarning")
def test_rate_set_after_offload_becomes_the_base_rate_of_the_scheduler(tmp_path):
    rates = []
    for until in (1, 2, 4):
        model, optimizer = opened(tmp_path / "s")
        optimizer.param_groups[0]["lr"] = 5e-3
        optimizer.schedule(SCHEDULERS["step"](optimizer))
        with optimizer:
            rates += [turn(model, optimizer, step)[0][0] for step in range(optimizer.steps, until)]
    assert rates == [5e-3, 5e-3, 2.5e-3, 2.5e-3]


def rewritten(path, change):
    """Applies the function `change` to the schedule in the store's last commit, and commits the result at step 1."""
    with memascend.engine.Store.open(path) as store:
        hyperparameters = store.hyperparameters
        change(hyperparameters["schedule"])
        store.commit(1, hyperparameters=hyperparameters)


def as_earlier(schedule):
    """Converts a stored schedule to an earlier format, which had a list `moved` instead of `fresh`, and no `rates`."""
    del schedule["rates"]
    for one in schedule["schedulers"]:
        one["moved"] = [*one.pop("fresh")]


def test_schedule_in_earlier_format_resumes_and_rejects_differences(tmp_path):
    lived(tmp_path / "s", "object")
    rewritten(tmp_path / "s", as_earlier)
    with pytest.raises(ConfigError, match=OTHERS["object"][2]), opened(tmp_path / "s")[1] as optimizer:
        optimizer.schedule(OTHERS["object"][1](optimizer))
    assert [lived(tmp_path / "s", "object", until)[0] for until in (2, 3)] == in_memory("object")[1][1:3]


@pytest.mark.parametrize("way", ["refused", "saved"])
def test_run_without_a_step_does_not_change_the_stored_scheduler(tmp_path, way):
    rates = lived(tmp_path / "s", "one cycle", 2)
    before = stored(tmp_path / "s")
    _, optimizer = opened(tmp_path / "s")
    with optimizer:
        if way == "saved":
            optimizer.save(tmp_path / "saved")
        else:
            # The constructor of OneCycleLR sets the learning rates of the groups. close() must not commit these
            # learning rates.
            with pytest.raises(ConfigError, match="base_lrs"):
                optimizer.schedule(OTHERS["maximum"][1](optimizer))
    assert stored(tmp_path / "s") == before
    options = {"path": tmp_path / "t", "checkpoint": tmp_path / "saved"} if way == "saved" else {"path": tmp_path / "s"}
    assert rates + lived(kind="one cycle", until=4, **options) == in_memory("one cycle", 4)[1]


class Rate(float):
    """A subclass of float, like numpy.float64."""


class Adaptive(torchs.LRScheduler):
    """A scheduler that changes its own attribute `halved` at step 2."""

    def __init__(self, optimizer):
        self.halved = 0
        super().__init__(optimizer)

    def get_lr(self):
        self.halved += self.last_epoch == 2
        return [Rate(base * 0.5**self.halved) for base in self.base_lrs]


def test_scheduler_passed_again_mid_run_is_restored_at_resume(tmp_path):
    rates = []
    for until in (4, 5, 5):
        model, optimizer = opened(tmp_path / "s")
        scheduler = Adaptive(optimizer)
        optimizer.schedule(scheduler)
        optimizer.schedule(scheduler)
        with optimizer:
            for step in range(optimizer.steps, until):
                if step == 3:
                    # A Trainer makes this call at the beginning of each train().
                    optimizer.schedule(scheduler, restore=False)
                rates.append(turn(model, optimizer, step)[0][0])
            assert scheduler.halved == 1
    assert rates == [1e-3, 1e-3, 5e-4, 5e-4, 5e-4]


def test_invalid_stored_schedule_raises_corruption_error(tmp_path):
    lived(tmp_path / "s")
    rewritten(tmp_path / "s", lambda schedule: schedule["schedulers"][0].update(fresh=[1]))
    with pytest.raises(memascend.CorruptionError, match="the schedulers of step 1"), opened(tmp_path / "s")[1] as given:
        given.schedule(SCHEDULERS["cosine"](given))


def test_scheduler_that_fails_to_load_leaves_itself_and_groups_unchanged(tmp_path):
    class Fails(torchs.StepLR):
        def load_state_dict(self, state_dict):
            if state_dict["last_epoch"] == 1:
                raise ValueError("no")
            super().load_state_dict(state_dict)

    model, optimizer = opened(tmp_path / "s")
    with optimizer:
        optimizer.schedule(Fails(optimizer, 1))
        turn(model, optimizer, 0)
    model, optimizer = opened(tmp_path / "s")
    with optimizer:
        given = Fails(optimizer, 1)
        before = [group["lr"] for group in optimizer.param_groups]
        with pytest.raises(ValueError, match="no"):
            optimizer.schedule(given)
        assert (given.last_epoch, [group["lr"] for group in optimizer.param_groups]) == (0, before)


# --- schedulers that were not given to schedule() -----------------------------------------------


@pytest.mark.parametrize("of", ["original", "returned"])
def test_resume_warns_once_about_scheduler_not_passed_to_schedule(tmp_path, of):
    model, optimizer = opened(tmp_path / "s")
    with optimizer:
        scheduler = SCHEDULERS["cosine"](optimizer)
        turn(model, optimizer, 0)
        scheduler.step()
    model, original = made()
    model, optimizer = memascend.offload(model, original, storage=tmp_path / "s", existing="resume")
    with optimizer:
        scheduler = SCHEDULERS["cosine"](original if of == "original" else optimizer)
        with pytest.warns(UserWarning, match=r"not passed to optimizer\.schedule\(\).*docs/resume\.md") as warned:
            turn(model, optimizer, 1)
        assert [warning.filename for warning in warned] == [chains.__file__], "the warning must name the line of step()"
        turn(model, optimizer, 2)


def test_first_scheduler_of_a_store_with_steps_causes_a_warning(tmp_path):
    model, optimizer = opened(tmp_path / "s")
    with optimizer:
        turn(model, optimizer, 0)
    with pytest.warns(UserWarning, match=r"has 1 step but no stored scheduler, so CosineAnnealingLR keeps"):
        lived(tmp_path / "s", until=2)
    _, optimizer, scheduler = scheduled(tmp_path / "s")
    with optimizer:
        assert scheduler.last_epoch == 1


# --- options that change after the last step ----------------------------------------------------


@pytest.mark.parametrize("durability", ["step", "none"])
def test_close_commits_options_that_changed_since_the_last_step(tmp_path, durability):
    options = {"path": tmp_path / "s", "durability": durability, "gradients": "fused"}
    model, optimizer = opened(**options)
    with optimizer:
        turn(model, optimizer, 0)
        values = chains.values(model)
        optimizer.user_state = "of the next step"
        optimizer.param_groups[1]["lr"] = 0.5
        # close() drops this staged step.
        chains.loss_of(model, 1).backward()
    found = stored(tmp_path / "s")
    assert [group["lr"] for group in found["groups"]] == [1e-3, 0.5]
    with pytest.warns(UserWarning, match=r"group 1: lr 0\.003 -> 0\.5"):
        model, optimizer = opened(**options)
    with optimizer:
        # close() did not commit the `user_state` of the dropped step.
        assert (optimizer.steps, optimizer.user_state) == (1, None)
        assert same_states(chains.values(model), values)


def test_second_schedule_call_with_another_scheduler_warns(tmp_path):
    _, optimizer = opened(tmp_path / "s")
    with optimizer:
        optimizer.schedule(torchs.StepLR(optimizer, 2))
        with pytest.warns(UserWarning, match=r"StepLR was passed to an earlier schedule\(\).*in one call"):
            optimizer.schedule(torchs.ExponentialLR(optimizer, 0.9))


def test_tensor_learning_rate_has_the_same_schedule_over_resumes(tmp_path):
    def rates(path, lives):
        return [had for until in lives for had in lived(path, "restarts", until, rate=torch.tensor(1e-3))]

    assert rates(tmp_path / "once", [5]) == rates(tmp_path / "often", [1, 3, 5])


def test_functions_that_a_resume_cannot_compare_are_logged(tmp_path, caplog):
    caplog.set_level("INFO", "memascend")
    _, optimizer, _ = scheduled(tmp_path / "s", "object")
    with optimizer:
        assert "functions of LambdaLR are the same: keep lr_lambdas.1 unchanged" in caplog.text
