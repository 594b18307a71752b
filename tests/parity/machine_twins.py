"""Draws models, optimizers and options for the state machine, and trains the twin: the same model in memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from parity.harness import GRADIENTS, same
from parity.reference import Reference
from parity.zoo_plain import WIDTH, Rooted, Stack, next_token, squares, tokens, vectors
from torch import nn
from torch.optim import lr_scheduler

import memascend
from memascend.plan.options import Options
from memascend.session.decide import planned

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def norms():
    """Returns a model whose buffers change in each forward, and whose two largest matrices can have 8-bit state."""
    layers = (nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
    return nn.Sequential(*layers, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))


MODELS = {
    "stack": (lambda: Stack(depth=2), tokens, next_token),
    "tied": (lambda: Stack(depth=2, tied=True), tokens, next_token),
    "rooted": (Rooted, vectors(), squares),
    "norms": (norms, vectors(), squares),
}


def adamw(parameters):
    return torch.optim.AdamW(
        [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 3e-3, "betas": (0.8, 0.95)}], lr=1e-2
    )


def matrices_and_rest(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return matrices, [p for p in model.parameters() if p.dim() != 2]


def muon_and_adamw(model):
    matrices, rest = matrices_and_rest(model)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]


def three(model):
    matrices, rest = matrices_and_rest(model)
    return [torch.optim.SGD(rest, lr=0.05, momentum=0.9), torch.optim.Muon(matrices[1:], nesterov=False),
            torch.optim.Adam(matrices[:1], lr=1e-2)]  # fmt: skip


def alone(kind, **options):
    return lambda model: [kind(model.parameters(), **options)]


O = torch.optim  # noqa: E741
OPTIMIZERS = {
    "adamw": lambda model: [adamw(list(model.parameters()))],
    "adam": alone(O.Adam, lr=1e-2, weight_decay=0.1),
    "sgd": alone(O.SGD, lr=0.1, momentum=0.9),
    "rmsprop": alone(O.RMSprop, lr=1e-3),
    "adafactor": alone(O.Adafactor, lr=1e-2),
    "muon and adamw": muon_and_adamw,
    "three": three,
}
# The optimizers that support both state="bf16" and state="8bit".
FORMATTED = ("adamw", "adam", "sgd")

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "warmup": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2)], [2]
    ),
}


def one_or_list(members):
    """Returns the argument for offload(): the list `members`, or the optimizer itself if `members` has only one."""
    return members if len(members) > 1 else members[0]


@dataclass(frozen=True)
class Setup:
    """The model, optimizers, options and schedulers that all processes of a run share."""

    model: str
    dtype: torch.dtype
    optimizer: str
    options: dict[str, Any]
    """Options of offload() that change the update or the step. `accumulation_steps` and `nonfinite` are always set."""
    scheduler: str | None

    def made(self, seed):
        """Returns a new model and its optimizers."""
        torch.manual_seed(seed)
        model = MODELS[self.model][0]().to(self.dtype)
        return model, OPTIMIZERS[self.optimizer](model)

    def loss(self, model, seed):
        _, batches, loss = MODELS[self.model]
        return loss(model, batches(torch.Generator().manual_seed(seed), 1)[0])

    def schedulers(self, members):
        return [SCHEDULERS[self.scheduler](member) for member in members] if self.scheduler else []


@dataclass(frozen=True)
class Life:
    """The settings that may differ between the processes of a run."""

    gradients: str
    budget: float | None
    """The host budget as a number: 0 is the smallest budget, and 1 keeps all state in RAM.

    None: the library chooses.
    """
    durability: str
    log_steps: int | None
    settles: str | None
    """When the next step writes deferred updates: in its "forward" or its "backward". None: the library chooses."""

    def options(self, setup, storage):
        """Returns the arguments of offload()."""
        options = {"gradients": self.gradients, "durability": self.durability, "storage": storage, **setup.options}
        if self.durability == "step":
            options["log_steps"] = self.log_steps
        if self.budget is not None:
            with torch.random.fork_rng():
                model, members = setup.made(0)
                plan = planned(model, one_or_list(members), Options(host_memory="1GiB", **options)).plan
            options["host_memory"] = round(plan.smallest + self.budget * max(0, plan.all_in_ram - plan.smallest))
        return options


def opened(setup, life, file, seed=1, **options):
    """Offloads a new model, as each process of a run does.

    If the store is resumed, the values of the store replace the initial values.
    """
    model, members = setup.made(seed)
    schedulers = setup.schedulers(members)
    model, optimizer = memascend.offload(model, one_or_list(members), **{**life.options(setup, file), **options})
    if schedulers:
        optimizer.schedule(*schedulers)
    if life.settles is not None:
        settling = optimizer._session.run.residency.units.settling
        settling.way, settling._choose = life.settles, lambda: None
    return model, optimizer


def formats(draw, optimizer, dtype):
    """Draws options for the format of the optimizer state.

    Returns no options for an optimizer outside of `FORMATTED`, and sometimes for the others.
    """
    if optimizer not in FORMATTED or draw(st.booleans()):
        return {}
    state = draw(st.sampled_from(("bf16", "8bit")))
    if dtype != FP32 and draw(st.booleans()):
        return {"state": state, "seed": 5, "rounding": "stochastic", "master_dtype": None}
    return {"state": state, "seed": 5}


@st.composite
def setups(draw, gradients):
    """Draws a `Setup` that fits the option `gradients`. None: the `Setup` fits every mode other than "fused"."""
    model = draw(st.sampled_from(sorted(MODELS)))
    dtype = draw(st.sampled_from((FP32, BF16, BF16, FP16)))
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    options = formats(draw, optimizer, dtype)
    if gradients != "fused":
        options["max_grad_norm"] = draw(st.sampled_from((None, None, 0.05, 0.5, 1e3)))
    options["accumulation_steps"] = draw(st.sampled_from((1, 1, 1, 2)))
    options["nonfinite"] = draw(st.sampled_from(("raise", "skip")))
    if dtype == FP16:
        options["loss_scale"] = draw(st.sampled_from(("dynamic", 256.0)))
    scheduler = draw(st.sampled_from((None, *SCHEDULERS)))
    return Setup(model, dtype, optimizer, options, scheduler)


@st.composite
def lives(draw, gradients, durabilities=("step", "step", "none")):
    """Draws a `Life` with the option `gradients`. If `gradients` is None, draws a mode other than "fused"."""
    return Life(
        gradients or draw(st.sampled_from(GRADIENTS[1:])),
        draw(st.sampled_from((None, 0.0, 0.3, 0.7, 1.0, 1.5))),
        draw(st.sampled_from(durabilities)),
        draw(st.sampled_from((None, 1, 2, 5))),
        draw(st.sampled_from((None, "forward", "backward"))),
    )


class Plain:
    """The twin: the same training in memory with torch's optimizers. `restore` returns to the twin's last commit.

    Attributes:
        committed: the snapshot of the last commit. The run's store must have the same content.
        computed: True if a forward of the next step has run since the last commit.
    """

    def __init__(self, setup):
        self.setup = setup
        self.model, self.members = setup.made(1)
        self.schedulers = setup.schedulers(self.members)
        options = {name: value for name, value in setup.options.items() if name != "nonfinite"}
        self.references = [Reference(one, model=self.model, **options) for one in self.members]
        self.steps = 0
        self.user_state = None
        self.overflowed = False
        self.grad_norm = None
        self.computed = False
        self.committed = self.snapshot()

    @property
    def groups(self):
        return [group for member in self.members for group in member.param_groups]

    @property
    def scale(self):
        return self.references[0].loss_scale or 1.0

    def backward(self, loss):
        self.references[0].backward(loss)

    def zero_grad(self, set_to_none=True):
        self.model.zero_grad(set_to_none)

    @property
    def nonfinite(self):
        """How step() must treat gradients that are not finite: "skip" or "raise". None if all gradients are finite."""
        if all(bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None):
            return None
        return "skip" if self.references[0].loss_scale is not None else self.setup.options["nonfinite"]

    @torch.no_grad()
    def step(self):
        """Updates the model by all optimizers. Returns False if the step committed nothing.

        All optimizers share one gradient norm and one loss scale.
        """
        gradients = {p: p.grad for p in self.model.parameters() if p.grad is not None}
        first = self.references[0]
        if not gradients:
            return False
        self.overflowed = self.nonfinite == "skip"
        if not self.overflowed:
            self.grad_norm = first._squares(gradients) ** 0.5 / self.scale
            factor = first._factor(gradients)
            for one in self.references:
                one._update(gradients, factor)
        for one in self.references:
            one.original._opt_called = True
            one.overflowed = self.overflowed
            one._rescale()
        if self.overflowed:
            return False
        for scheduler in self.schedulers:
            scheduler.step()
        self.steps += 1
        self.computed = False
        self.committed = self.snapshot()
        return True

    @torch.no_grad()
    def write(self, values):
        """Writes `values` to the parameters and to the master weights of changed parameters.

        If a parameter or a buffer has changed, commits the values, master weights and buffers.
        """
        changed = {p: value for p, value in values.items() if not same(p.detach(), value)}
        for p, value in changed.items():
            p.copy_(value)
            for one in self.references:
                if p in one.masters and one.masters[p] is not p:
                    one.masters[p].copy_(one._master(p))
        now = self.snapshot()
        if changed or any(not same(one, now["buffers"][name]) for name, one in self.committed["buffers"].items()):
            self.computed = False
            self.committed = {**self.committed, **{name: now[name] for name in ("values", "masters", "buffers")}}

    def state_of(self, p):
        return next(one.state_of(p) for one in self.references if p in one.masters)

    # --- commits and checkpoints -------------------------------------------------------

    def _of_references(self, get):
        return [[get(one, p) for p in one.masters] for one in self.references]

    def snapshot(self):
        """Returns a deep copy of everything that training changes."""
        return copy.deepcopy({
            "values": {name: p.detach() for name, p in self.model.named_parameters()},
            "buffers": dict(self.model.named_buffers()),
            "masters": self._of_references(lambda one, p: one.masters[p].detach()),
            "state": self._of_references(lambda one, p: dict(one.inner.state.get(one.masters[p], {}))),
            "options": [{name: value for name, value in group.items() if name != "params"} for group in self.groups],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scale": [(one.loss_scale, one.steps_since_overflow) for one in self.references],
            "user_state": self.user_state,
            "steps": self.steps,
        })  # fmt: skip

    @torch.no_grad()
    def restore(self):
        """Returns to the last commit. A new process does the same when the process resumes the store."""
        kept = copy.deepcopy(self.committed)
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            tensor.copy_(kept["values"][name] if name in kept["values"] else kept["buffers"][name])
        for one, masters, states in zip(self.references, kept["masters"], kept["state"], strict=True):
            for p, master, state in zip(one.masters, masters, states, strict=True):
                one.masters[p].copy_(master)
                one.inner.state.pop(one.masters[p], None)
                if state:
                    one.inner.state[one.masters[p]] = state
        for group, options in zip(self.groups, kept["options"], strict=True):
            group.update(options)
        for scheduler, state in zip(self.schedulers, kept["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        for one, (scale, since) in zip(self.references, kept["scale"], strict=True):
            one.loss_scale, one.steps_since_overflow = scale, since
        self.user_state, self.steps = kept["user_state"], kept["steps"]
        self.zero_grad()

    def commit_buffers(self):
        """Commits the buffers, as close() does. If a forward of the next step has run, commits nothing."""
        if not self.computed:
            self.committed = {**self.committed, "buffers": self.snapshot()["buffers"]}

    def commit_options(self):
        """If group options changed since the last commit, commits them and the loss scale, as close() does."""
        now = self.snapshot()
        if now["options"] != self.committed["options"]:
            self.committed = {**self.committed, "options": now["options"], "scale": now["scale"]}

    def checkpoint(self):
        """Returns the content that save() writes.

        It is the last commit, with the current options, schedulers, loss scale, user state and buffers.
        """
        now, names = self.snapshot(), ("options", "schedulers", "scale", "user_state", "buffers")
        return {**self.committed, **{name: now[name] for name in names}}
