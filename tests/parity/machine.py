"""Defines a state machine that trains an offloaded model and a model in memory, the twin, and requires equal bits.

Each rule does the same to both models. If the offloaded model cannot have the bits of the twin, the offloaded call must
raise the error that the rule predicts. After most errors, the rule calls zero_grad() for both models.

[Note: kills] A kill simulates the death of the run's process. A kill happens between two rules, or at a call of the
engine within a rule. The kill copies the store's file to `corpse`: the file of a killed process would have the same
bytes. `remains` is the twin's commit that the copy must equal. If the kill follows directly after a commit of the run,
the twin has not made this commit yet, so `remains` is None until the twin has made this commit. Unless the copy is
unclosed, `_die` closes the run, resumes the copy and restores the twin to `remains`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar

import pytest
import torch
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from parity.harness import same
from parity.loops import failing
from parity.machine_calls import CHANGES, EDITS, FUSE, KEPT, READS, WRITES
from parity.machine_twins import Plain, lives, one_or_list, opened, setups
from torch.nn.utils import clip_grad_norm_, get_total_norm

import memascend
from memascend import StorageError, UsageError

SEEDS = st.integers(0, 5)
# Rules multiply losses by these factors, so that norms lie below and above the limits, and float16 overflows.
FACTORS = st.sampled_from((1.0, 1.0, 1e-3, 30.0))
LIMITS = st.sampled_from((1e-3, 1.0, 1e6, float("inf")))
NAMES = st.sampled_from(sorted(CHANGES))
KEEPS = st.none() | st.sampled_from(sorted(KEPT))


class Machine(RuleBasedStateMachine):
    """The offloaded run, its twin, and a record of the calls since the last step.

    The rules predict errors from the record.

    Attributes:
        waits: the option `gradients` of all processes of a run. None: each process draws a mode other than "fused".
        seen: for the name of each event, the number of times that the event happened in all examples.
    """

    waits = None
    seen: ClassVar[Counter] = Counter()

    def __init__(self):
        super().__init__()
        self.folder = Path(mkdtemp(prefix="machine-"))
        self.stores = self.processes = 0
        self.corpse = None
        self.optimizer = None
        self.staged = False
        # Maps names of parameters to the views of these parameters that user code keeps.
        self.kept = {}
        self.checks = self.unseen = 0
        FUSE.left = 0
        FUSE.kill = self._be_killed

    @initialize(data=st.data())
    def begin(self, data):
        setup = data.draw(setups(self.waits), "setup")
        self.plain = Plain(setup)
        self._open(data.draw(lives(self.waits), "life"), self._file())

    def teardown(self):
        FUSE.kill = None
        if self.optimizer is not None:
            self._close()
        shutil.rmtree(self.folder)

    def _close(self):
        FUSE.left = 0
        report = self.optimizer.report()
        self.seen["early"] += report.early
        self.seen["anew"] += report.anew
        self.seen[f"deferred, {self.life.settles}"] += report.deferred
        self.optimizer.close()

    # --- processes -----------------------------------------------------------------------

    def _file(self):
        self.stores += 1
        return self.folder / f"{self.stores}.store"

    def _open(self, life, file, **options):
        """Offloads a new model, as a new process does; a resumed store replaces the model's initial values."""
        self.file, self.life = file, life
        self.processes += 1
        self.kept.clear()
        setup = self.plain.setup
        self.model, self.optimizer = opened(setup, life, file, self.processes, **options)
        self.plain.restore()
        self.plain.computed = False
        self._forget_gradients()
        # `habit` is a word for how the loop uses gradients up to the first step. From this word, `_stepped` predicts
        # the mode that gradients="auto" chooses: "" predicts "fused", "either" predicts "fused" or "ssd", and
        # "declared" and "keeps" predict "ssd".
        self.habit = "declared" if self._declared > 1 or setup.options.get("max_grad_norm") is not None else ""
        self.mode = "ssd" if life.gradients == "auto" else life.gradients
        self.steps_of_life = FUSE.commits = 0
        FUSE.learned.mode = None
        self.seen[f"in RAM {bool(self.optimizer.plan.ram_tier)}"] += 1
        assert self.optimizer.user_state == self.plain.user_state
        self._require_options()

    def _require_options(self):
        assert self.optimizer.loss_scale == self.plain.scale
        for ours, theirs in zip(self.optimizer.param_groups, self.plain.groups, strict=True):
            names = theirs.keys() - {"params"}
            assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}

    def _be_killed(self, when):
        self.corpse = self._file()
        shutil.copyfile(self.file, self.corpse)
        self.died = when
        # With durability="none", the first commit of a process marks the store as unclosed.
        self.is_unclosed = self.life.durability == "none" and FUSE.commits > 0
        # If the kill follows a commit, the twin has not made this commit yet. `_note_commit` sets `remains` later, see
        # [Note: kills].
        self.remains = None if when == "after" else self.plain.committed

    def _note_commit(self):
        """If the run was killed right after a commit, sets `remains` to the twin's equal commit."""
        if self.corpse is not None and self.remains is None:
            self.remains = self.plain.committed

    def _die(self, life):
        """Resumes the killed run's copy.

        If the copy is unclosed, offload() must reject it and name `durability`. The run then continues.
        """
        corpse, self.corpse = self.corpse, None
        if self.is_unclosed:
            model, members = self.plain.setup.made(0)
            options = {"storage": corpse, "existing": "resume", **self.plain.setup.options}
            with pytest.raises(StorageError, match=r"not closed, .*durability"):
                memascend.offload(model, one_or_list(members), **options)
            self.seen["refused as unclosed"] += 1
            return
        self.seen[f"killed {self.died}"] += 1
        self.plain.committed = self.remains
        self._close()
        self._open(life, corpse, existing="resume")

    # --- predictions of errors ---------------------------------------------------------------

    @property
    def _declared(self):
        return self.plain.setup.options["accumulation_steps"]

    @property
    def _present(self):
        return any(p.grad is not None for p in self.plain.model.parameters())

    @property
    def _taken(self):
        """True if updates have used up the gradients. Only "fused" uses up gradients before step()."""
        return self.mode == "fused" and self._handles and (self.spent or self.backwards >= self._declared)

    @property
    def _is_partial(self):
        """True if "fused" updates wait for more backwards.

        A change of p.grad would delay these updates until step().
        """
        return self.mode == "fused" and self._declared > 1 and not self._taken

    @property
    def _handles(self):
        """The parameters whose p.grad is a gradient handle of the library."""
        return [p for p in self.model.parameters() if p.grad is not None and type(p.grad) is not torch.Tensor]

    def _forget_gradients(self, *, noticed=True):
        """Records that all gradients were removed.

        `noticed`: the library knows of the removal without reading p.grad.
        """
        self.backwards = 0
        # `fresh`: there are gradients that no step() has used. `staged`: the library has taken gradients, so a step is
        # staged. A tensor that the user puts into p.grad stages no step.
        self.fresh = False
        self.staged = self.staged and not noticed
        self.unnoticed = not noticed
        self.spent = self.changed = False
        self.rates = self._rates()

    def _rates(self):
        return [group["lr"] for group in self.plain.groups]

    @property
    def _late_rates(self):
        """True if the learning rate of a group has changed since the updates of this group ran."""
        changed = [one != other for one, other in zip(self.rates, self._rates(), strict=True)]
        handles = {id(p) for p in self._handles}
        groups = zip(changed, self.optimizer.param_groups, strict=True)
        return any(late and handles & {id(p) for p in group["params"]} for late, group in groups)

    @contextlib.contextmanager
    def _refused(self, words):
        """Requires that the block raises a UsageError that matches `words`; then drops all gradients by zero_grad()."""
        with pytest.raises(UsageError, match=words):
            yield
        self.seen[f"refused: {words}"] += 1
        self._discard()

    def _discard(self):
        self.optimizer.zero_grad()
        self.plain.zero_grad()
        self._forget_gradients()

    def _mixes(self):
        """True if a step is staged, so that save() and edits must raise.

        If all gradients were removed, no step is staged.
        """
        if self.staged and not self._present:
            self._forget_gradients()
        return self.staged

    def _noticed(self):
        """Records in `habit` that the loop has changed gradients, or has added to them.

        Without a gradient handle, gradients="auto" may fail to detect this, so an empty `habit` becomes "either".
        """
        self.habit = "keeps" if self._handles else self.habit or "either"

    # --- gradients -----------------------------------------------------------------------------

    def _loss(self, seed):
        self.plain.computed = self.plain.computed or torch.is_grad_enabled()
        ours, theirs = (self.plain.setup.loss(model, seed) for model in (self.model, self.plain.model))
        assert same(theirs, ours), f"the loss is {theirs.item()} in memory and {ours.item()} offloaded"
        return ours, theirs

    @rule(seed=SEEDS, factor=FACTORS)
    def backward(self, seed, factor):
        ours, theirs = self._loss(seed)
        if self._taken:
            with self._refused("accumulation_steps|already used"):
                self.optimizer.backward(ours * factor)
            return
        if self._handles:
            self._noticed()
        self.plain.backward(theirs * factor)
        self.optimizer.backward(ours * factor)
        self._arrived(1)

    def _arrived(self, backwards):
        """Records that the gradients of `backwards` backwards have arrived in both models."""
        self.backwards += backwards
        self.fresh = self.staged = True
        self.rates = self._rates()

    @precondition(lambda self: not self._present)
    @rule(first=SEEDS, count=st.integers(1, 3), by_layer=st.booleans())
    def accumulate(self, first, count, by_layer):
        if self.unnoticed:
            # The library has not detected yet that the gradients were removed, so accumulate() would count one backward
            # too many.
            self._discard()
        count = self._declared if self._declared > 1 else count
        seeds = [first + index for index in range(count)]
        self.plain.computed = True
        ours = self.optimizer.accumulate(lambda seed: self.plain.setup.loss(self.model, seed), seeds, by_layer=by_layer)
        for seed, found in zip(seeds, ours, strict=True):
            loss = self.plain.setup.loss(self.plain.model, seed)
            assert same(loss.detach(), found)
            self.plain.backward(loss)
        if count > 1 and not self.habit:
            self.habit = "either"
        # In accumulate(), the library knows how many backwards the step has.
        self._arrived(max(self._declared, count))

    @precondition(lambda self: self._present)
    @rule(limit=LIMITS)
    def clip(self, limit):
        if self._is_partial:
            return
        norm = get_total_norm([p.grad for p in self.plain.model.parameters() if p.grad is not None])
        if not norm.isfinite():
            return
        if self._taken and limit / (norm + 1e-6) < 1:
            with self._refused("max_grad_norm"):
                clip_grad_norm_(self.model.parameters(), limit)
            return
        ours = clip_grad_norm_(self.model.parameters(), limit)
        theirs = clip_grad_norm_(self.plain.model.parameters(), limit)
        if self.mode == "fused":
            torch.testing.assert_close(ours, theirs)
        else:
            assert same(theirs, ours)
        # Without handles, the library sees that torch wrote to the gradients, so another step() uses them.
        self.fresh = self.fresh or not self._handles
        self._noticed()
        self.changed = True

    @precondition(lambda self: self.fresh)
    @rule(how=NAMES, every=st.integers(1, 3))
    def change_gradients(self, how, every):
        if self._is_partial:
            return
        change = CHANGES[how]
        pairs = list(zip(self.model.parameters(), self.plain.model.parameters(), strict=True))[::every]
        pairs = [pair for pair in pairs if pair[1].grad is not None and pair[1].dim()]
        if self._taken:
            with self._refused("gradients="):
                change(self._handles[-1])
            return
        handles = {id(p) for p in self._handles}
        for ours, theirs in pairs:
            change(ours)
            change(theirs)
            assert same(theirs.grad, ours.grad.clone())
        if any(id(ours) in handles for ours, _ in pairs):
            self._noticed()
        self.changed = True

    @precondition(lambda self: self._present)
    @rule(every=st.integers(1, 3))
    def drop_gradients(self, every):
        self._put(every, lambda _: None)
        if not self._present:
            self._forget_gradients(noticed=False)

    @precondition(lambda self: self._declared == 1 and (self.fresh or not self._present))
    @rule(every=st.integers(1, 3), value=st.sampled_from((0.0, 1e-2, -0.5)))
    def assign_gradients(self, every, value):
        # If updates have already used the gradients, replaces at most every other gradient, so that some used gradients
        # remain.
        every = max(every, 2) if self._taken else every
        self._put(every, lambda p: torch.full(p.shape, value, dtype=p.dtype))
        self.habit = self.habit or "either"
        self.fresh = True

    def _put(self, every, gradient):
        """Sets p.grad to `gradient(p)` for every `every`-th parameter of both models."""
        for model in (self.model, self.plain.model):
            for p in list(model.parameters())[::every]:
                p.grad = gradient(p)

    @rule(to_none=st.booleans(), of_model=st.booleans())
    def zero_grad(self, to_none, of_model):
        if not to_none and self._taken:
            # After one backward, zeroing used gradients must raise. After several backwards, storage may still have the
            # sum of the gradients, so zeroing may work.
            with self._refused("set_to_none=False") if self.backwards == 1 else contextlib.suppress(UsageError):
                self.optimizer.zero_grad(set_to_none=False)
            self._discard()
            return
        (self.model if of_model and to_none else self.optimizer).zero_grad(set_to_none=to_none)
        self.plain.zero_grad(to_none)
        if to_none:
            self._forget_gradients(noticed=not of_model)
        else:
            self.habit = "keeps"
            self.changed = True
            self.fresh = self._present
            self.staged = self.staged or self.fresh

    # --- steps -----------------------------------------------------------------------------------

    @rule(zeroes=st.sampled_from((True, True, True, False)), fails=st.sampled_from((False, False, False, True)))
    def step(self, zeroes, fails):
        if not self._present:
            self.optimizer.step()
            assert self.optimizer.steps == self.plain.steps
            return
        if not self.fresh:
            with self._refused("called again"):
                self.optimizer.step()
            return
        self._refuse_kept()
        if self._taken and self._late_rates:
            with self._refused("options of .* changed"):
                self.optimizer.step()
            return
        if self.plain.nonfinite == "raise":
            if self.mode == "fused":
                # step() may commit this step, with a warning.
                self._discard()
                return
            with self._refused("was not committed"):
                self.optimizer.step()
            return
        if fails and not self.plain.nonfinite:
            FUSE.fails = True
            with pytest.raises(StorageError, match="no room"):
                self.optimizer.step()
            self.seen["a commit failed"] += 1
            if not zeroes or self.changed:
                # The failed step has used up changes of gradients, so step() could not repeat them. If `zeroes` is
                # false, the rule never repeats the step.
                self._discard()
                return
        self.optimizer.step()
        self._stepped()
        self.fresh = self.staged = False
        self.spent = True
        if zeroes or self._declared > 1:
            self._discard()

    def _refuse_kept(self):
        """Requires that step() raises if user code holds a view of a weight that the step changes."""
        changes = [name for name in self.kept if self.plain.model.get_parameter(name).grad is not None]
        if changes:
            with pytest.raises(UsageError, match=f"{min(changes)}.* holds a view"):
                self.optimizer.step()
            self.seen["a view was kept"] += 1
        self.kept.clear()

    def _stepped(self):
        """Makes the twin's step, and requires that the twin's step and the run's step have equal results."""
        committed = self.plain.step()
        self._note_commit()
        assert self.optimizer.overflowed == self.plain.overflowed
        assert self.optimizer.steps == self.plain.steps
        self._require_options()
        if not committed:
            self.seen["overflows"] += 1
            return
        # If the loop changed the gradients, the two norms may differ. The twin multiplies each gradient by a factor and
        # rounds the product; the error is largest in 16 bits. The offloaded run does not round gradients on storage.
        rounds = 1e-6 if self.plain.setup.dtype == torch.float32 else 0.05
        near = {"rel": rounds if self.changed else 1e-12}
        assert self.optimizer.grad_norm == pytest.approx(self.plain.grad_norm, nan_ok=True, **near)
        self.seen[f"steps {self.mode}"] += 1
        self.steps_of_life += 1
        if self.steps_of_life == 1 and self.life.gradients == "auto":
            self.mode = FUSE.learned.mode
            expected = {"": ("fused",), "either": ("fused", "ssd")}.get(self.habit, ("ssd",))
            assert self.mode in expected, f"auto chose {self.mode}; the loop's habit is {self.habit!r}"

    @rule(first=SEEDS, factors=st.lists(FACTORS, min_size=1, max_size=3), count=st.sampled_from((1, 1, 1, 2)))
    def train(self, first, factors, count):
        """Trains whole steps, from the forward to zero_grad(), as most loops do."""
        for factor in factors:
            self._train(first, factor, count)

    @rule(first=SEEDS, factor=FACTORS, count=st.sampled_from((1, 1, 2)), how=LIMITS | NAMES)
    def train_by_changed_gradients(self, first, factor, count, how):
        self._train(first, factor, count, how)

    @rule(seed=SEEDS)
    def train_by_an_infinite_loss(self, seed):
        self._train(seed, float("inf"), 1)

    def _train(self, first, factor, count, how=None):
        if self._taken:
            self._discard()
        for index in range(count):
            if not self._taken:
                self.backward(first + index, factor)
        if isinstance(how, float):
            self.clip(how)
        elif how is not None:
            self.change_gradients(how, 1)
        self.step(zeroes=True, fails=False)

    @precondition(lambda self: self.plain.setup.scheduler is None)
    @rule(rate=st.sampled_from((1e-3, 2e-2)), group=st.integers(0, 2))
    def set_rate(self, rate, group):
        group %= len(self.plain.groups)
        for groups in (self.plain.groups, self.optimizer.param_groups):
            groups[group]["lr"] = rate

    @rule(value=st.integers(0, 9))
    def set_user_state(self, value):
        self.plain.user_state = self.optimizer.user_state = {"next": value}

    @precondition(lambda self: self.plain.setup.model != "norms" and not self._taken)
    @rule(where=st.sampled_from(("before", "after", "backward")), seed=SEEDS)
    def fail(self, where, seed):
        """Raises an exception of user code in a forward or a backward, and then drops all gradients."""
        self.plain.computed = True
        for model, backward in ((self.model, self.optimizer.backward), (self.plain.model, self.plain.backward)):
            with failing(model.blocks[1], where):
                backward(self.plain.setup.loss(model, seed))
        self.habit = self.habit or "either"
        self._discard()

    # --- values ----------------------------------------------------------------------------------

    @rule(seed=SEEDS, inference=st.booleans())
    def evaluate(self, seed, inference):
        with torch.inference_mode() if inference else torch.no_grad():
            self._loss(seed)

    @rule(how=st.sampled_from(sorted(READS)))
    def read_weights(self, how):
        for ours, theirs in zip(READS[how](self.model), READS[how](self.plain.model), strict=True):
            assert same(theirs.detach(), ours.detach())

    @rule(number=st.integers(0, 30), how=st.sampled_from(sorted(KEPT)))
    def keep_a_view(self, number, how):
        named = list(self.model.named_parameters())
        name, p = named[number % len(named)]
        self.kept[name] = KEPT[how](p)

    @rule(
        number=st.integers(0, 30),
        how=st.sampled_from(sorted(WRITES)),
        then=st.sampled_from(("forward", "read", "save")),
        seed=SEEDS,
    )
    def write_in_a_forbidden_way(self, number, how, then, seed):
        """Writes to a weight in a forbidden way: the write or the next use must raise.

        The weight must keep its values.
        """
        parameters = dict(self.model.named_parameters())
        name = list(parameters)[number % len(parameters)]
        if then == "save" and self._mixes():
            then = "read"
        if name in self.kept:
            # A read of another weight does not compare copies that user code still holds. A forward compares all
            # copies.
            then = "forward"
        with pytest.raises(UsageError, match=r"optimizer\.edit\("):  # noqa: PT012 - any of these may raise
            WRITES[how](parameters[name])
            if then == "forward":
                self.plain.computed = True
                self.plain.setup.loss(self.model, seed)
            elif then == "read":
                next(iter(parameters.values())).detach()
            else:
                self.optimizer.save(self.folder / "refused")

    @rule(how=st.sampled_from(sorted(EDITS)), every=st.integers(1, 4), factor=st.sampled_from((0.5, 1.0)), keeps=KEEPS)
    def edit(self, how, every, factor, keeps):
        """Edits weights by one of the ways in `EDITS`; first keeps a view of one of them, unless `keeps` is None.

        The factor 1 changes no bit, so master weights must not change.
        """
        named = list(self.plain.model.named_parameters())[::every]
        if keeps is not None:
            self.kept[named[0][0]] = KEPT[keeps](self.model.get_parameter(named[0][0]))
        values = {name: p.detach() * factor for name, p in named}
        mixes = self._mixes()
        changes = [name for name, p in named if name in self.kept and not same(p.detach(), values[name])]
        if changes and not mixes:
            with pytest.raises(UsageError, match=f"{min(changes)}.* holds a view"):
                EDITS[how](self.model, self.optimizer, values)
            self.seen["a view was kept before an edit"] += 1
        self.kept.clear()
        with pytest.raises(UsageError, match="a step is staged") if mixes else contextlib.nullcontext():
            EDITS[how](self.model, self.optimizer, values)
        if not mixes:
            self.plain.write({p: values[name] for name, p in named})
            self._note_commit()

    # --- ends and resumes ------------------------------------------------------------------------

    @rule(data=st.data(), how=st.sampled_from(("close", "kill", "checkpoint")))
    def end(self, data, how):
        """Ends the simulated process in the way that `how` names, and resumes the run in a new process.

        The process continues if `_save` writes no checkpoint, or if a kill leaves an unclosed store.
        """
        if how == "checkpoint" and not self._save():
            return
        life = data.draw(lives(self.waits), "life")
        if how == "kill":
            self._be_killed("between")
            self._die(life)
        elif how == "close":
            self.plain.commit_buffers()
            if self.steps_of_life:
                self.plain.commit_options()
            self._close()
            self._open(life, self.file, existing="resume")
        else:
            self.plain.committed = self.plain.checkpoint()
            self._close()
            self._open(life, self._file(), checkpoint=self.folder / "saved")
        self.seen[f"ended by {how}"] += 1

    @rule(calls=st.integers(1, 40), at_commits=st.booleans(), data=st.data())
    def kill_later(self, calls, at_commits, data):
        """Arms the fuse.

        The fuse kills the run at one of the engine's next calls, or before or after one of the next commits.
        """
        self.next_life = data.draw(lives(self.waits), "life")
        FUSE.left, FUSE.at_commits = (1 + calls % 4 if at_commits else calls), at_commits

    @rule()
    def save(self):
        self._save()

    def _save(self):
        """Calls save(), which must raise while a step is staged. Returns True if save() wrote a checkpoint."""
        mixes = self._mixes()
        with pytest.raises(UsageError, match="a step is staged") if mixes else contextlib.nullcontext():
            self.optimizer.save(self.folder / "saved")
        return not mixes

    # --- always ----------------------------------------------------------------------------------

    @rule(rules=st.integers(1, 5))
    def look_away(self, rules):
        """Skips the comparison of values for `rules` rules, because reading values would write the deferred updates."""
        self.unseen = rules + 1

    @invariant()
    def values_are_equal(self):
        if self.optimizer is None:
            return
        if self.corpse is not None:
            note(f"killed {self.died} a call of the engine")
            self._die(self.next_life)
        self.unseen = max(0, self.unseen - 1)
        if not self.unseen:
            self._require_all()

    def _require_all(self):
        self.checks += 1
        if self.checks % 2:
            with memascend.materialized(self.model):
                self._require_values()
        else:
            self._require_values()
        for (name, theirs), ours in zip(self.plain.model.named_buffers(), self.model.buffers(), strict=True):
            assert same(theirs, ours), f"buffer {name}"
        parameters = list(zip(self.model.named_parameters(), self.plain.model.parameters(), strict=True))
        (name, ours), theirs = parameters[self.checks % len(parameters)]
        self.require_state(name, self.optimizer.state_of(ours), self.plain.state_of(theirs))

    def _require_values(self):
        for (name, theirs), ours in zip(self.plain.model.named_parameters(), self.model.parameters(), strict=True):
            assert same(theirs.detach(), ours.detach().clone()), f"parameter {name}"

    @staticmethod
    def require_state(name, ours, theirs):
        assert ours.keys() - {"master"} == theirs.keys() - {"master"}, name
        for key, value in theirs.items():
            wanted, found = torch.as_tensor(value), ours[key]
            if key == "step":
                wanted, found = wanted.float(), found.float()
            assert same(wanted, found), f"{key} of {name}"
