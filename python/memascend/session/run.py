"""Owns store, engine and memory of a run, and tracks its position: the step, and the data of a commit."""

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
CLOSED = "this model was offloaded, and its optimizer has been closed; open its storage again to resume"


@dataclass(kw_only=True, eq=False)
class Resources:
    """The resources to release: without references to model and optimizer, so that both can be collected."""

    store: Store
    engine: Engine
    units: UnitMemory
    activations: Activations | None
    release: Callable[[], None]  # ends the run's share in process-wide hooks
    temporary: bool  # the store ends with the process
    closed: bool = False
    process: OwnProcess = field(default_factory=OwnProcess)
    _unread: bool = False  # there are committed steps whose values were not read out
    _warned_of_loss: bool = False

    def _close_store(self) -> None:
        try:
            if self.temporary:
                # Its data is not needed any more.
                self.store.give_up()
            else:
                self._write_in_ram()
        finally:
            self.store.close()

    def _write_in_ram(self) -> None:
        """Write the RAM tier to storage; without a log one Ctrl-C does not stop it, as all training would be lost."""
        with Progress("writing parameters kept in RAM to storage", 0) as progress:
            try:
                self.store.write_applied(progress.reached)
            except KeyboardInterrupt:
                if self.store.info()["log_steps"]:
                    _log.info(
                        "interrupted while parameters kept in RAM are written: the store is whole with its gradient log"
                    )
                    raise
                _log.warning(
                    "interrupted while trained parameters are written to storage, and nothing else has them, so the "
                    "write continues; another Ctrl-C drops them, and the store with them"
                )
                try:
                    self.store.write_applied(progress.reached)
                except KeyboardInterrupt:
                    self.store.give_up()
                    raise
                raise

    def values_changed(self) -> None:
        """A step was committed: closing a temporary store loses it."""
        self._unread = True

    def values_read(self) -> None:
        """The values were read out."""
        self._unread = False

    def require_open(self) -> None:
        """Reject calls after close(), and calls in a forked child."""
        if self.closed:
            raise UsageError(CLOSED)
        self.process.require_here()

    def warn_if_lost(self) -> None:
        """Warn once where the store's file was deleted or renamed: the data is lost when the process ends."""
        lost = None if self._warned_of_loss else self.store.lost()
        if lost is not None:
            self._warned_of_loss = True
            warn(str(lost))

    def close(self) -> None:
        """Drain, drop uncommitted values, free all memory. Twice is fine."""
        if self.closed:
            return
        self.closed = True
        if self.process.is_elsewhere:
            # A forked child has none of the threads, and the store is its parent's.
            return
        with contextlib.ExitStack() as last_first:
            # Each callback runs also where another one fails.
            last_first.callback(self.release)
            if self.activations is not None:
                last_first.callback(self.activations.close, CLOSED)
            last_first.callback(self.units.close)
            last_first.callback(self._close_store)
            last_first.callback(self.units.stop)
            last_first.callback(self.engine.close)
        if self.temporary and self._unread:
            warn(
                "the trained weights were in a temporary store and are gone, for nobody read them out: give storage=, "
                "or save model.state_dict() before close()"
            )


def shown(identity: dict[str, Any]) -> str:
    """A step of a store, for messages."""
    return f"step {identity.get('step')} of store {identity.get('store')}"


_USER_BYTES_MAX = 64 << 10


class Metadata:
    """What a commit has beside values and state, and the position of the run: its store, and the committed steps."""

    def __init__(
        self, store: Store, arithmetic: Arithmetic, scale: LossScale, schedule: Schedule, budget: int | None
    ) -> None:
        """`budget`: of host memory, for a resume to which none is given; None: the smallest good one."""
        self._store = store
        # Known beforehand, as a fork must not ask the store: a thread that is not there may hold its locks.
        self._uuid: str = store.info()["uuid"]
        self.schedule = schedule
        self.step = store.step  # the number of committed steps
        self.made = 0  # those of them that this run committed
        # The position of the checkpoint from which the run began, until its first step.
        self._origin: dict[str, Any] | None = (store.hyperparameters or {}).get("origin")
        # The optimizer's own dicts, which a scheduler changes.
        self.groups = arithmetic.optimizer.param_groups
        self.arithmetic = arithmetic
        self._constant = {**arithmetic.committed(), **({"host_memory": budget} if budget else {})}
        self.scale = scale
        self.user_state: Any = store.user_state
        # Blocks of doors that ended since the last step: a trainer's resume runs them again.
        self.blocks: int = (store.hyperparameters or {}).get("blocks", 0)
        # Where a trainer is after the last step, as text; None where none made it.
        self.position: str | None = (store.hyperparameters or {}).get("position")
        self._positioned: Callable[[], str] | None = None

    def follow(self, positioned: Callable[[], str]) -> None:
        """Commit with each step the position of a trainer, which `positioned` gives within `step()`."""
        self._positioned = positioned

    @property
    def is_followed(self) -> bool:
        """Whether a trainer's position is committed."""
        return self._positioned is not None

    def take_position(self) -> None:
        """Note where the trainer is after the step that is about to be committed."""
        self.keep_position(None if self._positioned is None else self._positioned())

    def keep_position(self, position: str | None) -> None:
        """Let commits have this position."""
        self.position = position

    def hyperparameters(self) -> dict[str, Any]:
        """The groups' options, the optimizer's attributes that its steps change, schedulers and loss scale, as JSON."""
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
        """Set the JSON value of the next commit."""
        try:
            size = len(json.dumps(value).encode())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"user_state must be a JSON value, such as numbers, text, lists and dicts: {error}"
            ) from error
        if size > _USER_BYTES_MAX:
            raise ConfigError(
                f"user_state has {size} bytes as JSON, and at most {_USER_BYTES_MAX} are kept: put the rest in a file"
            )
        self.user_state = value

    @property
    def has_new_options(self) -> bool:
        """Whether options of groups changed since the last step of this run, and not of a scheduler of `schedule`."""
        if not self.made:
            # A resume that is refused or ends early has only what making schedulers set.
            return False
        stored = (self._store.hyperparameters or {}).get("groups")
        now = json.loads(json.dumps([options_of(group) for group in self.groups]))
        return bool(now != stored and not self.schedule.is_foreign)

    def advance(self) -> None:
        """A step was committed."""
        self.step += 1
        self.made += 1
        self._origin = None

    def identity(self) -> dict[str, Any]:
        """The position of the last commit, as state dicts and checkpoints have it."""
        return {"store": self._uuid, "step": self.step}

    def is_at(self, identity: Any) -> bool:
        """Whether this is the present position, or that of the checkpoint from which the run began."""
        return identity is not None and identity in (self.identity(), self._origin)

    def require(self, state_dict: Mapping[str, Any]) -> None:
        """Reject an optimizer's state dict of another position (`UsageError`), or with other groups (`ValueError`)."""
        here, given = self.identity(), state_dict.get("memascend")
        if given is None:
            raise UsageError(
                "this state dict was not made by an offloaded optimizer; give the optimizer that holds the state to "
                "offload()"
            )
        if not self.is_at(given):
            began = f" (begun from a checkpoint of {shown(self._origin)})" if self._origin else ""
            raise UsageError(
                f"this state dict is of {shown(given)}, and the storage holds {shown(here)}{began}. The optimizer's "
                "state was left as it is, and weights that were loaded into the model before this call stay beside it. "
                "Begin from a checkpoint of the other position, which optimizer.save() writes, "
                'offload(existing="replace", checkpoint=...); or go on from the storage (existing="resume") with the '
                "weights and the data of its step"
            )
        lengths = [len(group["params"]) for group in self.groups]
        if [len(group["params"]) for group in state_dict["param_groups"]] != lengths:
            raise ValueError("loaded state dict has other parameter groups than the optimizer")

    def facts(self) -> dict[str, Any]:
        """The description of the run in a checkpoint."""
        return {
            **self.identity(),
            # A checkpoint may be used on another machine.
            **{name: value for name, value in self.hyperparameters().items() if name != "host_memory"},
            "user_state": self.user_state,
            "optimizer": self._store.info()["optimizer"],
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """An offloaded model and optimizer, without their objects."""

    resources: Resources  # store, engine and memory
    residency: Residency  # the parameters
    frames: Frames  # the modules that are being computed
    gradients: Gradients  # of the trained parameters
    buffers: Buffers  # the persistent ones, which are committed with the parameters
    metadata: Metadata  # of the commits

    def require_open(self) -> None:
        """Reject calls after close(); unwind modules that an interrupt left open."""
        self.resources.require_open()
        self.frames.unwind()

    def require_quiet(self, *, loads: bool = False) -> None:
        """Raise where a step is staged, a unit is in use or a copy was written to; wait for pending writes.

        `loads`: a state dict may have been written to, since one is loaded.
        """
        self.require_open()
        self.residency.copies.require_unwritten(loads=loads)
        if self.gradients.are_taken_away():
            self.discard()
        if self.gradients.is_staged():
            raise UsageError("a step is staged, which this would mix with: call step() or zero_grad() first")
        self.residency.require_idle("this")
        self.resources.engine.finish()

    def discard(self) -> None:
        """Drop the gradients, and what they staged."""
        drops_updates = self.gradients.has_updates
        self.gradients.clear()
        if drops_updates:
            self.residency.units.read_again()

    @contextlib.contextmanager
    def committing(self, stands: Callable[[], None], failed: Callable[[], None]) -> Iterator[None]:
        """Inside is one commit: afterwards `stands` is called, or `failed` where it failed.

        Ctrl-C is raised once the commit has returned, so the store's generation shows whether it failed, and not the
        exception.
        """
        store = self.resources.store
        generation = store.info()["generation"]
        if self.resources.engine.is_behind:
            self.residency.units.drop_reads()
        try:
            yield
        except BaseException:
            (failed if store.info()["generation"] == generation else stands)()
            raise
        stands()

    def changed(self, names: Iterable[str]) -> None:
        """Parameters have new values on storage: cached values are stale."""
        names = set(names)
        self.residency.units.changed(names)
        self.residency.copies.age(names)
