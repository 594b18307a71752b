"""Defines the optimizer that `offload()` returns. Its `step()` commits a step; `zero_grad()` drops gradients."""

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
    """The `state` attribute of the original and the returned optimizer: an empty mapping. Lookups raise UsageError.

    Libraries that move optimizer state to a device iterate over the items of `state`, and find no items here.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    def __getitem__(self, parameter: object) -> NoReturn:
        self._resources.require_open()
        raise UsageError(
            "the optimizer's state is on storage: call state_of(parameter) of the optimizer that offload() returned"
        )

    __delitem__ = __getitem__

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, torch.Tensor) and self[parameter]

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        refuse_other_state()

    def popitem(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """Raises UsageError. `clear()` calls `popitem()`, so `clear()` raises UsageError, too."""
        return self[None]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(())

    def __len__(self) -> int:
        return 0


def refuse_other_state() -> NoReturn:
    """Raises the UsageError for an assignment to `state`. The message names two ways to start with different state."""
    raise UsageError(
        "the optimizer's state is on storage and cannot be replaced: pass the optimizer that has the new state to "
        "offload(), or start from a checkpoint with offload(checkpoint=...)"
    )


def session_of(optimizer: OffloadedOptimizer) -> Session:
    """Returns the session of an optimizer, for other modules of memascend."""
    return optimizer._session  # noqa: SLF001


class OffloadedOptimizer(Closing, torch.optim.Optimizer):
    """A torch optimizer whose parameters and state are on storage; `memascend.offload()` makes it.

    It shares the `param_groups` of the original optimizer. So you may make schedulers for the original optimizer or for
    this optimizer; see `schedule`.
    """

    def __init__(self, original: torch.optim.Optimizer, session: Session) -> None:
        """Makes this optimizer take the place of `original` in the loop, and pass calls on to `session`."""
        # torch's constructor gets only the first group, because the constructor rejects a list in which some groups
        # have parameter names and other groups do not.
        super().__init__(original.param_groups[:1], original.defaults)
        # Both optimizers share this list and its dicts, so that an option set on either optimizer is set on both.
        self.param_groups = original.param_groups
        self.members: tuple[torch.optim.Optimizer, ...] = members_of(original)
        """The optimizers that were given to offload(), in order; `param_groups` has all of their groups."""
        self._session = session
        self._groups = GroupMembers(self.param_groups)
        self._groups_of_members = [GroupMembers(one.param_groups) for one in self.members if one is not original]
        # step() runs the hooks of the originals and of this optimizer.
        before = [member._optimizer_step_pre_hooks for member in self.members]  # noqa: SLF001
        after = [member._optimizer_step_post_hooks for member in self.members]  # noqa: SLF001
        self._optimizer_step_pre_hooks = before[0] if len(before) == 1 else JoinedHooks(before)
        self._optimizer_step_post_hooks = after[0] if len(after) == 1 else JoinedHooks(after)
        self._state = StoredState(session.run.resources)
        # The callback must not refer to the model or to this optimizer: `finalize` keeps the callback and every object
        # that the callback refers to alive, so Python could not collect this optimizer.
        self._finalizer = weakref.finalize(self, session.run.resources.close)

    # --- the loop --------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commits the step that backward staged: all of it takes effect at once, or none of it.

        With `durability="step"`, a committed step survives a loss of power. `step` commits nothing if no parameter has
        a gradient, or if it skips the step (`overflowed`).

        Args:
            closure: a function that computes the loss again; called once, before the step. `step` returns its result.

        Raises:
            UsageError: `step` is not allowed now or cannot give an exact result, or the norm of the gradients is not
                finite (`nonfinite="raise"`); the message says what to do instead.
            ConfigError: the model has a new trainable parameter, the dtype or shape of a buffer changed, or the
                schedulers' state cannot be stored.
            StorageError: storage failed; the last committed step is intact.
            RankError: another rank failed or is gone; the message says how to continue.
        """
        self._groups.require_same(self.param_groups)
        for member, groups in zip(self.members, self._groups_of_members, strict=False):
            groups.require_same(member.param_groups)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # torch sets this mark when an optimizer steps. A scheduler that was made for one of the original optimizers
        # warns if that optimizer has no mark.
        for member in self.members:
            member._opt_called = True  # type: ignore[attr-defined] # noqa: SLF001
        self._session.step((self, *self.members))
        return loss

    def schedule(self, *schedulers: Any, restore: bool = True) -> None:
        """Makes `step()` advance learning rate schedulers: once for each committed step, as a part of its commit.

        A step updates with the present learning rates. Its commit stores the next learning rates and the state of the
        schedulers, so a run that is killed at any moment resumes with the right rates. The loop must not call
        `scheduler.step()`. A step that overflows, has no gradients or fails advances no scheduler.

        At a resume, and at a start from a checkpoint, `schedule` restores the schedulers and the options that they set.
        Call `schedule` once, with all schedulers, before the first step; a later call replaces the schedulers.

        Args:
            schedulers: schedulers of torch.optim.lr_scheduler, or objects with the same methods, made for the original
                optimizer or for this one, before or after offload(). `step()` advances them in this order.
            restore: False keeps the state that the schedulers have, and ignores the stored state.

        Raises:
            ConfigError: an argument is not a scheduler of this optimizer, or was passed twice; `step()` of a scheduler
                needs an argument; a wrapper of accelerate advances its scheduler once for each rank; the schedulers'
                state cannot be stored as JSON, or is too large for a commit; or the class, arguments or initial
                learning rates of a scheduler differ from the stored run. Nothing was changed.
            UsageError: the call is not allowed now, for example because a step is staged.
            StorageError: the store has schedulers that memascend cannot have written.
        """
        if not schedulers:
            raise ConfigError("schedule() was given no scheduler: pass the schedulers that step() is to advance")
        self._session.schedule(schedulers, restore=restore)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients and, before `step()`, their staged updates.

        With `set_to_none=False`, gradients become zeros, which `step()` applies as torch does.

        Raises:
            UsageError: `set_to_none=False`, but an update has already used a gradient.
        """
        self._session.zero_grad(set_to_none=set_to_none)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Calls `loss.backward(**options)`, after multiplying the loss by the loss scale, if any."""
        self._session.backward(loss, options)

    def accumulate(
        self,
        loss_of: Callable[[Any], Any],
        batches: Iterable[Any],
        *,
        scale: float = 1.0,
        by_layer: bool = False,
    ) -> list[Any]:
        """Computes losses and gradients of all micro-batches of a step; call `step()` next.

        The result is bit-identical to `for batch in batches: (loss_of(batch) * scale).backward()`. In such a loop, each
        micro-batch reads all weights, and writes and reads the sums of gradients. With `by_layer`, each unit (such as a
        transformer block) computes all micro-batches before the next unit begins. Weights are then read, and gradients
        written, only as often as in a step of one micro-batch. With `by_layer`, each micro-batch also gets its own
        random seed. The seeds are drawn from torch's default generator before the first `loss_of`. The result is
        bit-identical to the loop above with `torch.manual_seed(seed)` before each `loss_of`.

        The first call with `by_layer` computes one micro-batch after the other and records the order of units. A call
        that cannot compute by layer also computes one micro-batch after the other, and a log message gives the reason.
        Reasons are, for example: several ranks share the model; your code has a hook on accumulated gradients;
        gradients existed before the call; or an attribute or buffer of a module (as in BatchNorm) changed between
        micro-batches of the first call.

        Args:
            loss_of: called with each micro-batch; returns its loss, or a tuple that begins with the loss.
            batches: the micro-batches of the step.
            scale: factor of each loss before its backward, such as 1 / len(batches) for a mean.
            by_layer: True computes all micro-batches in each block before the next block. You then promise two things:
                `loss_of` and the model carry no data from one micro-batch to the next, and modules pass data only by
                arguments and results. Code that breaks this promise may compute wrong gradients without an error.

        Returns:
            The results of `loss_of`, detached, in order.

        Raises:
            UsageError: the call is inside of the model's forward. With `by_layer`, also: gradients arrived in an
                unexpected order, are sparse or have a graph; or a weight was changed in place. All gradients of a call
                by layer that fails are dropped.
            ConfigError: `scale` is not finite, or `loss_of` returned no loss.
        """
        return self._session.accumulate(loss_of, batches, scale=scale, by_layer=by_layer)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Calls `torch.nn.utils.clip_grad_norm_`, with the same bits as in memory; returns the norm before clipping."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        sharding = self._session.sharding
        if sharding is not None:
            # The norm is computed over the rows of all ranks.
            parameters = [sharding.leaf_of(parameter) for parameter in parameters]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def __getattr__(self, name: str) -> Any:
        """Provides `train()` and `eval()` if an original optimizer has them, as schedule-free optimizers do."""
        if name in MODES and any(callable(getattr(type(one), name, None)) for one in vars(self).get("members", ())):
            return functools.partial(switch_mode, self._session.edits, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property  # type: ignore[override]
    def state(self) -> StoredState:
        """An empty mapping, because the state is on storage: `state_of()` reads the state of a parameter.

        Raises:
            UsageError: torch's get_optimizer_state_dict() or set_optimizer_state_dict() reads this property.
        """
        # If `state` is empty, these torch functions call step() to create state. That call would change the run.
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":  # noqa: SLF001
            raise UsageError(
                "the optimizer's state is on storage, so torch's get_optimizer_state_dict(), get_state_dict() and "
                "set_optimizer_state_dict() cannot read or set it. Call optimizer.save(folder) on every rank to write "
                "values and state, and offload(checkpoint=folder) to start from that checkpoint; "
                "get_model_state_dict() returns the values"
            )
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        # `torch.optim.Optimizer.__init__` assigns `state` before `_state` exists.
        if "_state" in vars(self) and state is not self._state:
            refuse_other_state()

    # --- figures and values --------------------------------------------------------------

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, unscaled and before clipping; None before the first step."""
        return self._session.grad_norm

    @property
    def overflowed(self) -> bool:
        """True if the last step was skipped because a gradient, or the norm of all gradients, was not finite.

        Only a loss scale or `nonfinite="skip"` skips steps. A skipped step commits nothing, and advances no scheduler
        of `schedule()`.
        """
        return self._session.overflowed

    @property
    def loss_scale(self) -> float:
        """The factor by which `backward()` multiplies the loss."""
        return self._session.run.metadata.scale.scale

    @property
    def steps(self) -> int:
        """The number of committed steps, including steps before a resume or before the checkpoint of the run."""
        return self._session.run.metadata.step

    @property
    def user_state(self) -> Any:
        """A JSON value of at most 64 KiB, which `step()` commits and a resume restores."""
        return self._session.run.metadata.user_state

    @user_state.setter
    def user_state(self, value: Any) -> None:
        self._session.run.metadata.set_user_state(value)

    @property
    def plan(self) -> Plan:
        """The memory plan of the run, including memory that steps have added to the plan."""
        return self._session.measurements.plan

    def report(self) -> Report:
        """Returns host memory by owner, bytes read and written by kind, and seconds by stage."""
        return self._session.report()

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Reads a parameter's state from storage, by torch's names.

        The entry "master" is the master weight, or the parameter's values if it has no master weight.
        """
        return self._session.state_of(parameter)

    @contextlib.contextmanager
    def edit(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> Iterator[torch.Tensor | list[torch.Tensor]]:
        """Provides real values of one or several parameters inside a `with` block; commits changes when the block ends.

        The values are on the host; under `fully_shard` they are this rank's rows. A parameter whose bits did not change
        keeps its master weight. After an exception nothing is committed. All ranks enter and leave the block together.

        Args:
            parameters: one parameter of the model, for which the block gets a tensor; or several parameters, for which
                the block gets a list of tensors.

        Raises:
            ConfigError: `parameters` are not parameters of the offloaded model; the storage is a raw device, and
                `offload()` got no `scratch` folder; or the dtype or shape of a buffer changed.
            UsageError: the call is not allowed now, for example because a step is staged; or the block changed the
                weights in another way, or replaced the tensors or their dtype or shape.
            StorageError: storage failed; the last commit is intact.
            RankError: another rank failed; nothing was committed.
        """
        if isinstance(parameters, torch.Tensor):
            with self._session.edits.values([parameters]) as (values,):
                yield values
        else:
            if not isinstance(parameters, Iterable):
                raise ConfigError(
                    "edit() takes parameters of the offloaded model: pass one parameter or a list of parameters, such "
                    "as module.parameters(). Inside materialized(), write to the parameters directly"
                )
            with self._session.edits.values(list(parameters)) as several:
                yield several

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes a whole checkpoint: weights for `from_pretrained` and other tools, state and options to resume from.

        The checkpoint has the weights and the state of the last step, and the current options and buffers. Call `save`
        between steps; `offload(checkpoint=folder)` resumes bit-identically.

        The checkpoint is streamed, so that memory does not grow with the model. It is written under another name beside
        `folder`, flushed and renamed: after a crash, `folder` has either the earlier checkpoint or the new one. Other
        files in an earlier checkpoint's folder are kept.

        With several ranks, all of them call `save` together and write one checkpoint: each rank writes its rows, or the
        first rank writes all rows if other ranks do not see the folder. Any number of ranks, or one process, can start
        from the checkpoint.

        Args:
            folder: the folder of the checkpoint; on the first rank its parent must exist.

        Raises:
            UsageError: the call is not allowed now, for example because a step is staged.
            ConfigError: the folder has other contents, its parent does not exist, or the path is not valid; the dtype
                or shape of a buffer changed; or safetensors does not support a dtype.
            StorageError: the disk is full, or the device failed; an earlier checkpoint is unchanged.
            RankError: another rank failed; the message has the error of that rank. An earlier checkpoint is unchanged.
        """
        self._session.saving.save(folder)

    # --- other methods of torch's optimizers ------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the options of the groups and, as "memascend", the run's position: its store and number of steps.

        The dict has no optimizer state: `save()` writes it.
        """
        groups, first = [], 0
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            options["params"] = list(range(first, first + len(group["params"])))
            first += len(group["params"])
            groups.append(options)
        return {"state": {}, "param_groups": groups, "memascend": self._session.run.metadata.identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the options of the groups from a state dict of the run's present position.

        The state dict must be of this store, at its present number of committed steps. If the run began from a
        checkpoint and has made no step yet, a state dict of the run that wrote the checkpoint also fits, if the state
        dict is of the checkpoint's step.

        Raises:
            UsageError: the state dict is of another position, or not of an offloaded optimizer; or this optimizer is
                closed. Nothing was changed.
            ValueError: the state dict has other groups. Nothing was changed.
        """
        self._session.run.resources.require_open()
        self._session.run.metadata.require(state_dict)
        for group, options in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in options.items() if name != "params"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError, except in torch's constructor: the user can add groups only before offload()."""
        if hasattr(self, "_session"):
            raise UsageError(
                "parameters cannot be added to an offloaded optimizer: the store is made for the present parameters. "
                "Add the group before offload()"
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "an offloaded optimizer cannot be pickled or copied: its state is on storage. Use optimizer.save(folder)"
        )

    # --- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Keeps the last commit, drops uncommitted changes, frees all memory. A second call does nothing.

        The commit of a temporary store is lost, too. Changes since the last step of buffers (for example, by
        `torch.optim.swa_utils.update_bn`) and of the groups' options are added to the last commit. They are lost if the
        run has several ranks, while an exception is handled, or if the norm of the last step is not finite and
        `nonfinite` is not "commit". Changes of buffers are also lost if a forward in training mode with gradients ran
        after the last step, because a resume repeats that forward. `close` warns of changes of buffers that it drops
        because of several ranks, or because of a forward whose gradients are not staged.

        Raises:
            UsageError: code wrote to a copy of a weight; the run is closed nevertheless.
            StorageError: storage failed, or the store's file was deleted or moved; the run is closed nevertheless.
        """
        self._session.close()
        self._finalizer.detach()
