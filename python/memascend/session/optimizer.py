"""The optimizer that users hold: backward stages a step, `step()` commits it, `zero_grad()` discards it."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memascend.errors import ConfigError, UsageError
from memascend.optim.comparison import MODES
from memascend.optim.members import JoinedHooks, members_of
from memascend.optim.rules import GroupMembers
from memascend.session.value_edits import switch_mode
from memascend.text import Closing

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from memascend.plan.table import Plan
    from memascend.session.report import Report
    from memascend.session.run import Resources
    from memascend.session.session import Session


class StoredState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """`optimizer.state` of the original and of the returned optimizer: it has no items, and an access raises.

    Libraries move a state to a device by its items, and find none to move.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    def __getitem__(self, parameter: object) -> NoReturn:
        self._resources.require_open()
        raise UsageError(
            "the optimizer's state is on storage: state_of(parameter) of the optimizer that offload() returned reads it"
        )

    __delitem__ = __getitem__

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, torch.Tensor) and self[parameter]

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        refuse_other_state()

    def popitem(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """Refuse it; `clear()` calls it, too."""
        return self[None]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(())

    def __len__(self) -> int:
        return 0


def refuse_other_state() -> NoReturn:
    """Raise the error that says where state can be given."""
    raise UsageError(
        "the optimizer's state is on storage and cannot be replaced: give the optimizer that holds the other state "
        "to offload(), or begin from a checkpoint, offload(checkpoint=...)"
    )


def session_of(optimizer: OffloadedOptimizer) -> Session:
    """The session of an optimizer, for the command that trains and the Trainer's callback."""
    return optimizer._session  # noqa: SLF001


class OffloadedOptimizer(Closing, torch.optim.Optimizer):
    """A torch optimizer whose parameters and state are on storage. `memascend.offload()` makes it.

    It shares the original's `param_groups`, so schedulers made for either work: see `schedule`.
    """

    def __init__(self, original: torch.optim.Optimizer, session: Session) -> None:
        """Stand in for `original`; `session` does the work."""
        # With one group only: torch rejects groups with parameter names beside groups without.
        super().__init__(original.param_groups[:1], original.defaults)
        # The groups are dicts of the original, so that an option set on either is set on both.
        self.param_groups = original.param_groups
        self.members: tuple[torch.optim.Optimizer, ...] = members_of(original)
        """The optimizers that were given to offload(), in order: their groups are those of this one."""
        self._session = session
        self._groups = GroupMembers(self.param_groups)
        self._groups_of_members = [GroupMembers(one.param_groups) for one in self.members if one is not original]
        # Hooks run, whether they were registered with an original or with this optimizer.
        before = [member._optimizer_step_pre_hooks for member in self.members]  # noqa: SLF001
        after = [member._optimizer_step_post_hooks for member in self.members]  # noqa: SLF001
        self._optimizer_step_pre_hooks = before[0] if len(before) == 1 else JoinedHooks(before)
        self._optimizer_step_post_hooks = after[0] if len(after) == 1 else JoinedHooks(after)
        self._state = StoredState(session.run.resources)
        # Without a reference to the model or to this object: both would live as long as the interpreter.
        self._finalizer = weakref.finalize(self, session.run.resources.close)

    # --- the loop --------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commit the step that backward staged: all of it becomes visible and durable at once.

        Args:
            closure: computes the loss again; it is called once, before the step.

        Raises:
            UsageError: the step cannot be exact, or the norm of its gradients is not finite (`nonfinite="raise"`); the
                message says what to do instead.
            StorageError: storage failed; the last committed step stands.
        """
        self._groups.require_same(self.param_groups)
        for member, groups in zip(self.members, self._groups_of_members, strict=False):
            groups.require_same(member.param_groups)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A scheduler that was made for an original checks whether it was stepped.
        for member in self.members:
            member._opt_called = True  # type: ignore[attr-defined] # noqa: SLF001
        self._session.step((self, *self.members))
        return loss

    def schedule(self, *schedulers: Any, restore: bool = True) -> None:
        """Let `step()` advance learning rate schedulers: once for each committed step, as a part of its commit.

        A step updates with the present learning rates, and the store holds the next ones and the state of the
        schedulers. So a run that is killed at any moment goes on with the right ones. The loop calls no
        `scheduler.step()`. A step that overflows, has no gradients or fails advances nothing.

        At a resume, and at a start from a checkpoint, the call restores the schedulers and the options that they set.
        Call it once, with all schedulers, before the first step; a later call replaces them.

        Args:
            schedulers: those of torch.optim.lr_scheduler, or others with their methods, made for the original
                optimizer or for this one, before or after offload(). They are advanced in this order.
            restore: False takes them as they are, in place of what the store has.

        Raises:
            ConfigError: a scheduler needs a metric, belongs to another optimizer or has a state that JSON cannot hold;
                or it has another class or other arguments than in the stored run. Nothing was changed.
            UsageError: a step is staged.
        """
        if not schedulers:
            raise ConfigError("schedule() was given no scheduler: pass the schedulers that step() is to advance")
        self._session.schedule(schedulers, restore=restore)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and before `step()` their staged updates.

        Raises:
            UsageError: `set_to_none=False` where updates ran already.
        """
        self._session.zero_grad(set_to_none=set_to_none)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`loss.backward()`, with the loss scale where there is one."""
        self._session.backward(loss, options)

    def accumulate(
        self,
        loss_of: Callable[[Any], Any],
        batches: Iterable[Any],
        *,
        scale: float = 1.0,
        by_layer: bool = False,
    ) -> list[Any]:
        """Compute losses and gradients of all micro-batches of a step; `step()` comes next.

        The result is bit-identical to `for batch in batches: (loss_of(batch) * scale).backward()`. In such a loop, each
        micro-batch reads all weights, and sums of gradients go to storage and back in between. By layer, each unit (a
        block, say) computes all micro-batches before the next unit begins, so that weights are read and sums written
        once. Each micro-batch then has random numbers of its own: the result is bit-identical to that loop with
        `torch.manual_seed(seed)` before each `loss_of`, with seeds drawn from torch's default generator before the
        first.

        The first call by layer computes one micro-batch after the other and records the order of units. All calls do
        so where layers cannot be shared, and the log gives the reason: several ranks, a hook of yours on accumulated
        gradients, gradients that exist already, or an attribute or a buffer of a module that the first call saw
        change from one micro-batch to the next (BatchNorm).

        Args:
            loss_of: called with each micro-batch; returns its loss, or a tuple that begins with it.
            batches: the micro-batches of the step.
            scale: multiplies the losses before their backwards, as 1 / len(batches) does for a mean.
            by_layer: True is a promise about your code, which micro-batches then enter in turns, block by block:
                neither `loss_of` nor the model keeps anything between micro-batches, or anywhere else than in its
                arguments and results. Code that breaks it may compute wrong gradients without an error.

        Returns:
            The results of `loss_of`, detached, in order.

        Raises:
            UsageError: by layer, gradients arrived in another order, or a weight was written to; all of it is dropped.
        """
        return self._session.accumulate(loss_of, batches, scale=scale, by_layer=by_layer)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Torch's clipping of all gradients that are kept; bit for bit torch's."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        sharding = self._session.sharding
        if sharding is not None:
            # The norm is that of all ranks' rows.
            parameters = [sharding.leaf_of(parameter) for parameter in parameters]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def __getattr__(self, name: str) -> Any:
        """`train()` and `eval()`, where an original has them, as schedule-free optimizers do."""
        if name in MODES and any(callable(getattr(type(one), name, None)) for one in vars(self).get("members", ())):
            return functools.partial(switch_mode, self._session.edits, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property  # type: ignore[override]
    def state(self) -> StoredState:
        """Without items: `state_of()` reads the state of a parameter from storage.

        Raises:
            UsageError: torch's own get_optimizer_state_dict() or set_optimizer_state_dict() reads it.
        """
        # Without state these functions make a step to create some, which they then would not keep.
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":  # noqa: SLF001
            raise UsageError(
                "the optimizer's state is on storage, and torch's get_optimizer_state_dict(), get_state_dict() and "
                "set_optimizer_state_dict() move none of it: call optimizer.save(folder), on every rank, which writes "
                "values and state, and begin from it by offload(checkpoint=); get_model_state_dict() has the values"
            )
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        # torch's own `__init__` sets it.
        if "_state" in vars(self) and state is not self._state:
            refuse_other_state()

    # --- what is known -----------------------------------------------------------------

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, unscaled and before clipping; None before the first."""
        return self._session.grad_norm

    @property
    def overflowed(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite: a loss scale or `nonfinite="skip"`.

        Then nothing was committed, and no scheduler of `schedule()` has advanced.
        """
        return self._session.overflowed

    @property
    def loss_scale(self) -> float:
        """The factor by which `backward()` multiplies the loss."""
        return self._session.run.metadata.scale.scale

    @property
    def steps(self) -> int:
        """Committed steps of this store, also those before a resume."""
        return self._session.run.metadata.step

    @property
    def user_state(self) -> Any:
        """A JSON value of at most 64 KiB, committed with the step."""
        return self._session.run.metadata.user_state

    @user_state.setter
    def user_state(self, value: Any) -> None:
        self._session.run.metadata.set_user_state(value)

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._session.measurements.plan

    def report(self) -> Report:
        """Host memory by owner, bytes read and written by kind, seconds by stage."""
        return self._session.report()

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """A copy of a parameter's state, read from storage, by torch's names, and its `master`."""
        return self._session.state_of(parameter)

    @contextlib.contextmanager
    def edit(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> Iterator[torch.Tensor | list[torch.Tensor]]:
        """Give real values of one parameter, or of several, inside a `with` block, and commit what was changed of them.

        The values are on the host, under `fully_shard` those of this rank's rows. A parameter whose bits did not
        change keeps its master weight. Nothing is committed after an exception. All ranks enter and leave it together.

        Args:
            parameters: a parameter of the model, which gives a tensor; or several, which give a list of tensors.

        Raises:
            ConfigError: they are not parameters of the offloaded model.
            UsageError: a step is staged, or the weights were changed otherwise within the block.
            RankError: another rank failed; nothing was committed.
        """
        if isinstance(parameters, torch.Tensor):
            with self._session.edits.values([parameters]) as (values,):
                yield values
        else:
            if not isinstance(parameters, Iterable):
                raise ConfigError(
                    "edit() takes parameters of the offloaded model: pass one of them, or a list, as "
                    "module.parameters() for all of one (within materialized() they are real already)"
                )
            with self._session.edits.values(list(parameters)) as several:
                yield several

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a whole checkpoint: weights for `from_pretrained` and other tools, state and options to resume from.

        Weights and state are those of the last step, options and buffers those of now.

        The checkpoint is streamed, so that memory does not grow with the model. It is written under another name beside
        `folder`, flushed and renamed: after a crash there is either the earlier checkpoint or this one. Files that
        others put into an earlier checkpoint's folder stay. Call it between steps; `offload(checkpoint=folder)` resumes
        from it, bit-identically.

        Several ranks call it together, and write one checkpoint: each its rows, or the first rank all rows if others do
        not see the folder. Any number of ranks can start from it, and so can one process.

        Args:
            folder: of the checkpoint; on the first rank its parent must exist.

        Raises:
            UsageError: a step is staged.
            ConfigError: the folder has other contents.
            StorageError: there is no space, or the device failed; an earlier checkpoint is unchanged.
            RankError: another rank failed, with its message; an earlier checkpoint is unchanged.
        """
        self._session.saving.save(folder)

    # --- torch's own ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The options of the groups and, as "memascend", the position of the run: its store, and the committed steps.

        It has no state: `save()` writes that.
        """
        groups, first = [], 0
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            options["params"] = list(range(first, first + len(group["params"])))
            first += len(group["params"])
            groups.append(options)
        return {"state": {}, "param_groups": groups, "memascend": self._session.run.metadata.identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the options of the groups, from a state dict of the run's present position.

        That is a state dict of this store with as many steps; and before the first step of a run that began from a
        checkpoint, one of the run that wrote it.

        Raises:
            UsageError: the state dict is of another position, or not of an offloaded optimizer; or this one is closed.
                Nothing was changed.
            ValueError: it has other groups. Nothing was changed.
        """
        self._session.run.resources.require_open()
        self._session.run.metadata.require(state_dict)
        for group, options in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in options.items() if name != "params"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only before offload()."""
        if hasattr(self, "_session"):
            raise UsageError(
                "parameters cannot be added to an offloaded optimizer: its store is made. Add the group before "
                "offload()"
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "an offloaded optimizer cannot be pickled or copied: its state is on storage. Use optimizer.save(folder)"
        )

    # --- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Keep the last commit of `step()`, drop uncommitted changes, free all memory. Twice is fine.

        Buffers that changed since the last step, as by `torch.optim.swa_utils.update_bn`, are committed with it, unless
        a forward in training mode with gradients ran since: a resume repeats that. Then, and with several ranks, a
        warning says that they are lost.
        """
        self._session.close()
        self._finalizer.detach()
