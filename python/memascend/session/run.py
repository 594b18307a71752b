"""Holds a run's resources (store, engine, memory), its position, and the metadata that each commit stores."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError, UsageError
from memascend.optim.shared import options_of
from memascend.params.threads import OwnProcess
from memascend.text import Progress, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from memascend.activations.activations import Activations
    from memascend.checkpoint.init import Buffers
    from memascend.device.unit_memory import UnitMemory
    from memascend.grads.gradients import Gradients
    from memascend.grads.loss_scale import LossScale
    from memascend.optim.rules import Arithmetic
    from memascend.params.module_hooks import Frames
    from memascend.params.residency import Residency
    from memascend.session.schedule import Schedule
    from memascend.storage import Engine, Store


_log = logging.getLogger("memascend")
CLOSED = (
    "the optimizer of this offloaded model has been closed: call offload() again, with the same storage= and "
    "existing='resume', to continue"
)


@dataclass(kw_only=True, eq=False)
class Resources:
    """The store, threads and memory of a run, which `close` releases.

    `Resources` must not refer to the model or the optimizer. Otherwise the optimizer's finalizer, which refers to
    `Resources`, would keep the model and the optimizer alive.
    """

    store: Store
    engine: Engine
    units: UnitMemory
    activations: Activations | None
    release: Callable[[], None]  # ends the run's share in process-wide hooks, and its exchange with other ranks
    temporary: bool  # True if the store's file is unlinked, so that its data is lost when the process ends
    closed: bool = False
    process: OwnProcess = field(default_factory=OwnProcess)
    _unread: bool = False  # True if steps were committed since user code last read the values out
    _warned_of_loss: bool = False

    def _close_store(self) -> None:
        try:
            if self.temporary:
                # The data ends with the process, so records in RAM need not be written.
                self.store.give_up()
            else:
                self._write_in_ram()
        finally:
            self.store.close()

    def _write_in_ram(self) -> None:
        """Writes the RAM tier to storage, before the store is closed.

        With a gradient log, Ctrl-C stops the write. Without a log, only RAM has the trained values of these records. So
        after a first Ctrl-C the write is continued, and a second Ctrl-C abandons the store.
        """
        with Progress("writing parameters kept in RAM to storage", 0) as progress:
            try:
                self.store.write_applied(progress.reached)
            except KeyboardInterrupt:
                if self.store.info()["log_steps"]:
                    _log.info(
                        "interrupted while parameters kept in RAM were written to storage. Nothing is lost: the "
                        "store's gradient log has their gradients, and a resume repeats their updates"
                    )
                    raise
                _log.warning(
                    "interrupted while trained parameters were written to storage. Only memory has these parameters, "
                    "so the write continues; another Ctrl-C drops them and makes the store unusable"
                )
                try:
                    self.store.write_applied(progress.reached)
                except KeyboardInterrupt:
                    self.store.give_up()
                    raise
                raise

    def values_changed(self) -> None:
        """Records that a step was committed. If no code reads the values, `close()` of a temporary store then warns."""
        self._unread = True

    def values_read(self) -> None:
        """Records that user code read the values out, by a state dict, a checkpoint or `materialized()`."""
        self._unread = False

    def require_open(self) -> None:
        """Raises UsageError after close(), and in a forked child."""
        if self.closed:
            raise UsageError(CLOSED)
        self.process.require_here()

    def warn_if_lost(self) -> None:
        """Warns once if the store's file was deleted, moved, truncated or replaced, because its data may be lost."""
        lost = None if self._warned_of_loss else self.store.lost()
        if lost is not None:
            self._warned_of_loss = True
            warn(str(lost))

    def close(self) -> None:
        """Waits for I/O, writes the RAM tier to storage, drops uncommitted values, and frees all memory.

        A second call does nothing. The RAM tier of a temporary store is not written.
        """
        if self.closed:
            return
        self.closed = True
        if self.process.is_elsewhere:
            # A forked child has none of the run's threads, and the parent process still uses the store.
            return
        with contextlib.ExitStack() as last_first:
            # The callbacks run in reverse order, all of them even if one raises.
            last_first.callback(self.release)
            if self.activations is not None:
                last_first.callback(self.activations.close, CLOSED)
            last_first.callback(self.units.close)
            last_first.callback(self._close_store)
            last_first.callback(self.units.stop)
            last_first.callback(self.engine.close)
        if self.temporary and self._unread:
            warn(
                "the trained weights are lost: they were in a temporary store, and no code read them after the last "
                "step. Pass storage= to offload(), or save model.state_dict() before optimizer.close()"
            )


def shown(identity: dict[str, Any]) -> str:
    """Formats the position of a run for messages; `identity` is a result of `Metadata.identity`."""
    return f"step {identity.get('step')} of store {identity.get('store')}"


_USER_BYTES_MAX = 64 << 10


class Metadata:
    """The metadata that each commit stores beside values and state, and the position of the run.

    The position is the id of the store and the number of committed steps.
    """

    def __init__(
        self, store: Store, arithmetic: Arithmetic, scale: LossScale, schedule: Schedule, budget: int | None
    ) -> None:
        """`budget`: the budget that each commit stores for a resume with `host_memory="auto"`; None: no budget."""
        self._store = store
        # The id is read only once, because a forked child must not call the store: a thread of the parent may hold the
        # store's locks.
        self._uuid: str = store.info()["uuid"]
        self.schedule = schedule
        self.step = store.step  # the number of committed steps
        self.made = 0  # the number of steps that this run has committed
        # The position of the checkpoint from which the run began; None after the first step, or without a checkpoint.
        self._origin: dict[str, Any] | None = (store.hyperparameters or {}).get("origin")
        # The optimizer's own dicts of group options, which schedulers change in place.
        self.groups = arithmetic.optimizer.param_groups
        self.arithmetic = arithmetic
        self._constant = {**arithmetic.committed(), **({"host_memory": budget} if budget else {})}
        self.scale = scale
        self.user_state: Any = store.user_state
        # The number of blocks (uses of `edit()` and other doors, see `value_edits`) that ended since the last step.
        # After a resume, a trainer's program runs these blocks again, and `Edits.repeat` makes the run drop their
        # changes.
        self.blocks: int = (store.hyperparameters or {}).get("blocks", 0)
        # A trainer's position after the last step, as text; None without a trainer.
        self.position: str | None = (store.hyperparameters or {}).get("position")
        self._positioned: Callable[[], str] | None = None

    def follow(self, positioned: Callable[[], str]) -> None:
        """Makes each step commit a trainer's position; `step()` calls `positioned` to get the position."""
        self._positioned = positioned

    @property
    def commits_position(self) -> bool:
        """True if steps commit a trainer's position."""
        return self._positioned is not None

    def update_position(self) -> None:
        """Sets `position` to the trainer's position after the step that is about to be committed."""
        self.set_position(None if self._positioned is None else self._positioned())

    def set_position(self, position: str | None) -> None:
        """Sets the trainer's position that the next commits store."""
        self.position = position

    def hyperparameters(self) -> dict[str, Any]:
        """Returns the metadata of a commit as JSON values.

        The metadata has the options of groups, attributes that the optimizer's steps change, loss scale, schedulers,
        the trainer's position and the number of blocks. The entries of `_constant` are equal in all commits of a run.
        """
        attributes = self.arithmetic.attributes()
        return {
            "groups": [options_of(group) for group in self.groups],
            "loss_scale": self.scale.state(),
            **({"attributes": attributes} if attributes else {}),
            **({} if self.position is None else {"position": self.position}),
            **({"blocks": self.blocks} if self.blocks else {}),
            **self._constant,
            **self.schedule.committed(),
        }

    def set_user_state(self, value: Any) -> None:
        """Sets the user's JSON value, which the next steps commit."""
        try:
            size = len(json.dumps(value).encode())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"user_state must be a JSON value, made of numbers, text, lists and dicts: {error}"
            ) from error
        if size > _USER_BYTES_MAX:
            raise ConfigError(
                f"user_state has {size} bytes as JSON, but may have at most {_USER_BYTES_MAX} bytes: keep larger data "
                "in a file"
            )
        self.user_state = value

    @property
    def has_new_options(self) -> bool:
        """True if options of groups changed since this run's last step, other than by an attached scheduler."""
        if not self.made:
            # Before this run's first step, a difference may come from a scheduler's constructor, which sets options.
            return False
        stored = (self._store.hyperparameters or {}).get("groups")
        now = json.loads(json.dumps([options_of(group) for group in self.groups]))
        return bool(now != stored and not self.schedule.is_foreign)

    def advance(self) -> None:
        """Counts a committed step."""
        self.step += 1
        self.made += 1
        self._origin = None

    def identity(self) -> dict[str, Any]:
        """Returns the position of the last commit, as state dicts and checkpoints contain it."""
        return {"store": self._uuid, "step": self.step}

    def is_at(self, identity: Any) -> bool:
        """True if `identity` is the present position, or before the first step the position of the run's checkpoint."""
        return identity is not None and identity in (self.identity(), self._origin)

    def require(self, state_dict: Mapping[str, Any]) -> None:
        """Rejects a state dict that does not fit.

        Raises:
            UsageError: the state dict is of a different position, or not of an offloaded optimizer.
            ValueError: the state dict has different groups.
        """
        here, given = self.identity(), state_dict.get("memascend")
        if given is None:
            raise UsageError(
                "this state dict was not made by an offloaded optimizer: load it into a plain optimizer, and pass "
                "that optimizer to offload()"
            )
        if not self.is_at(given):
            began = f" (begun from a checkpoint of {shown(self._origin)})" if self._origin else ""
            raise UsageError(
                f"this state dict is of {shown(given)}, but the storage has {shown(here)}{began}. The optimizer's "
                "state was not changed; weights that you loaded into the model before this call remain loaded. To "
                "continue from the state dict's step, start from a checkpoint that optimizer.save() wrote at that "
                'step, with offload(existing="replace", checkpoint=...); to continue from the storage, pass '
                'existing="resume", and use the weights and the data of the storage\'s step'
            )
        lengths = [len(group["params"]) for group in self.groups]
        if [len(group["params"]) for group in state_dict["param_groups"]] != lengths:
            raise ValueError(
                "the loaded state dict has different parameter groups than the optimizer: load a state dict of this "
                "optimizer"
            )

    def facts(self) -> dict[str, Any]:
        """Returns the run's entries for a checkpoint: position, hyperparameters, `user_state`, optimizer's name."""
        return {
            **self.identity(),
            # The budget is left out: it fits this machine, and another machine may use the checkpoint.
            **{name: value for name, value in self.hyperparameters().items() if name != "host_memory"},
            "user_state": self.user_state,
            "optimizer": self._store.info()["optimizer"],
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The parts of a run that `Session`, `Edits`, `Saving` and `Measurements` share."""

    resources: Resources  # store, engine and memory
    residency: Residency  # brings parameters into memory and evicts them
    frames: Frames  # the modules that compute at this moment
    gradients: Gradients  # gradients and updates of the trained parameters
    buffers: Buffers  # the model's persistent buffers, which are committed with the parameters
    metadata: Metadata  # the metadata that each commit stores

    def require_open(self) -> None:
        """Raises UsageError after close(); ends the frames of modules whose forward was interrupted."""
        self.resources.require_open()
        self.frames.unwind()

    def require_quiet(self, *, loads: bool = False) -> None:
        """Raises if a step is staged, a unit is in use or a copy was written to; then waits for pending writes.

        If user code has set every `p.grad` to None, first drops the staged updates. With `loads`, the caller loads a
        state dict. A write of user code to that state dict is then no error.
        """
        self.require_open()
        self.residency.copies.require_unwritten(loads=loads)
        if self.gradients.all_grads_removed():
            self.discard()
        if self.gradients.is_staged():
            raise UsageError(
                "a step is staged: gradients wait for step(), so this call is not possible now. Call step() or "
                "zero_grad() first"
            )
        self.residency.require_idle("this")
        self.resources.engine.finish()

    def discard(self) -> None:
        """Drops the gradients and their staged updates."""
        drops_updates = self.gradients.has_updates
        self.gradients.clear()
        if drops_updates:
            self.residency.units.read_again()

    @contextlib.contextmanager
    def committing(self, committed: Callable[[], None], failed: Callable[[], None]) -> Iterator[None]:
        """Runs one commit in a `with` block, then calls `committed` if the commit took effect, and `failed` if not.

        A Ctrl-C during the commit is raised only after the commit has returned. So an exception does not show whether
        the commit took effect, but the store's generation does.
        """
        store = self.resources.store
        generation = store.info()["generation"]
        if self.resources.engine.is_behind:
            self.residency.units.drop_reads()
        try:
            yield
        except BaseException:
            (failed if store.info()["generation"] == generation else committed)()
            raise
        committed()

    def changed(self, names: Iterable[str]) -> None:
        """For parameters that have new values on storage, evicts cached values and marks copies as old."""
        names = set(names)
        self.residency.units.changed(names)
        self.residency.copies.age(names)
