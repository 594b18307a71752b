"""Advances learning rate schedulers within the commit of each step, and restores them at a resume.

[Note: fresh states] A commit stores two states of each scheduler: the newest state, which a resume loads, and the fresh
state, which the scheduler had when it was made. `_since` computes the entries in which the fresh state differs from the
newest state, and a commit stores only these entries; `_fresh` rebuilds the fresh state. At a resume, the user's
scheduler must have the stored fresh state, except for entries of its position (`_PLACE`): any other difference means
that the scheduler was made with different arguments.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import distributed

from memascend.errors import ConfigError, UsageError
from memascend.optim.shared import SharedValues, copied, group_options, plain, put, restored, same, storable
from memascend.storage.store import foreign_contents_error
from memascend.text import counted, warn

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    import torch

    from memascend.storage import Store


# The largest number of bytes that the schedulers may take in a commit. In a commit, options, loss scale, schedulers and
# position share 128 KiB.
_BYTES_MAX = 32 << 10
# State entries that may change although the scheduler did not advance: accelerate's wrapper counts every call.
_COUNTS = frozenset({"_step_count", "_is_initial", "_get_lr_called_within_step"})
# State entries that tell how far a scheduler has advanced. All other entries of a fresh state depend only on the
# arguments with which the scheduler was made, and on the optimizer's options at that time.
_PLACE = _COUNTS | {"last_epoch", "_last_lr", "T_cur", "T_i"}
# Options of groups that torch's schedulers set once, from their arguments or from the learning rate.
_SET_ONCE = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
_PAGE = "docs/resume.md"
# The text that stands for a missing entry in messages and in a commit.
_NONE = "none"
_log = logging.getLogger("memascend")


class _Snapshot:
    """A snapshot of the schedulers' states and of the options of all groups; schedulers set some of these options."""

    def __init__(self, schedulers: Sequence[Any], groups: Sequence[dict[str, Any]]) -> None:
        """Takes the snapshot; raises a ConfigError if JSON cannot hold a scheduler's state."""
        self._schedulers, self._groups = schedulers, groups
        self.entries = [_entries(scheduler) for scheduler in schedulers]
        self.options = SharedValues({}, [group_options(group) for group in groups])

    def restore(self) -> None:
        """Restores schedulers and groups to the snapshot."""
        for scheduler, entries in zip(self._schedulers, self.entries, strict=True):
            _load(scheduler, entries)
        now = SharedValues({}, [group_options(group) for group in self._groups])
        for place, value in now.changes(self.options).items():
            assert place.group is not None
            put(self._groups[place.group], place.name, value)


@dataclass(eq=False)
class Schedule:
    """Advances a run's learning rate schedulers in `step()`, stores them in commits, and restores them at a resume.

    `step()` calls `advance` after the updates of the step have begun and before the commit. The commit holds the new
    options and the schedulers' new state, so if the process is killed at any moment, the store has updates and
    schedulers of the same step.
    """

    # `_groups` are the optimizer's own dicts of group options, in which a resume has set the stored options. `_given`
    # has the options that the user gave.
    _groups: Sequence[dict[str, Any]]
    _given: Sequence[Mapping[str, Any]]
    _store: Store
    _resumed: bool  # True if the store's values come from the stores of an earlier run
    _schedulers: tuple[Any, ...] = ()
    _fresh: list[dict[str, Any]] = field(default_factory=list)  # fresh states of `_schedulers`; [Note: fresh states]
    _options: set[str] = field(default_factory=set)  # names of the group options that schedulers have changed in steps
    _now: _Snapshot | None = None  # the snapshot for the next commit; None without schedulers
    # the snapshot before the last `advance`; None without schedulers, and between `begin_step` and `advance`
    _before: _Snapshot | None = None
    _stepped: bool = False  # True once this run has called `advance`, unless `take_back` has undone the call
    _had_stepped: bool = False  # the value of `_stepped` before the present step

    # --- attaching schedulers --------------------------------------------------------------

    def attach(self, given: Sequence[Any], *, restore: bool) -> None:
        """Makes `given` the run's schedulers, in place of earlier ones.

        `restore`: before this run's first step, loads the stored states of `given`. If a scheduler is rejected, nothing
        changes.
        """
        schedulers = tuple(map(_unwrapped, given))
        own = {id(group) for group in self._groups}
        for number, scheduler in enumerate(schedulers):
            _require_scheduler(scheduler, number)
            if not all(id(group) in own for group in scheduler.optimizer.param_groups):
                raise ConfigError(
                    f"{_title(scheduler)} sets the options of another optimizer: make the scheduler from the "
                    "optimizer that offload() returned, or from the optimizer that you passed to offload()"
                )
        if len(set(map(id, schedulers))) != len(schedulers):
            raise ConfigError("the same scheduler was passed to schedule() twice: pass each scheduler once")
        dropped = [one for one in self._schedulers if one not in schedulers]
        if dropped and not self._stepped:
            warn(
                f"{_listed(dropped)} was passed to an earlier schedule(), which this call replaces, so step() no "
                "longer advances it: pass all schedulers in one call"
            )
        now = _Snapshot(schedulers, self._groups)
        # A scheduler that was attached before may have advanced, so keep the fresh state that is already known.
        known = dict(zip(map(id, self._schedulers), self._fresh, strict=True))
        fresh = [known.get(id(one), entries) for one, entries in zip(schedulers, now.entries, strict=True)]
        options = self._options if self._stepped else set()
        begins = restore and not self._stepped
        stored = self._stored() if begins else None
        if stored is not None:
            self._require_fits(schedulers, fresh, now, stored)
            parts = zip(fresh, stored["schedulers"], strict=True)
            fresh, options = [{**entries, **_fresh(one)} for entries, one in parts], set(stored["options"])
        elif begins and self._resumed and self._store.step:
            warn(
                f"the store has {counted(self._store.step, 'step')} but no stored scheduler, so {_listed(schedulers)} "
                f"keeps its present state. Later resumes restore it: see {_PAGE}"
            )
        _require_small(self._saved(schedulers, now, fresh, options))
        if stored is not None:
            now = self._restored(schedulers, now, stored)
        functions = types.FunctionType | types.BuiltinFunctionType
        uncompared = [place for one in schedulers for place, has in _lambdas(one) if isinstance(has, functions)]
        if uncompared:
            _log.info(
                "a resume cannot check whether the functions of %s are the same: keep %s unchanged between starts",
                _listed(schedulers),
                ", ".join(uncompared),
            )
        self._schedulers, self._fresh, self._options, self._now, self._before = schedulers, fresh, options, now, None

    def _stored(self) -> dict[str, Any] | None:
        """Returns the schedulers' entry of the last commit; rejects an entry that memascend never writes."""
        stored: dict[str, Any] | None = (self._store.hyperparameters or {}).get("schedule")
        if stored is not None and not _is_schedule(stored):
            raise foreign_contents_error(
                self._store.info()["devices"][0], f"the schedulers of step {self._store.step} have a wrong form"
            )
        return stored

    def _kept_groups(self) -> list[dict[str, Any]]:
        """Returns the options of all groups in the last commit."""
        groups: list[dict[str, Any]] = (self._store.hyperparameters or {})["groups"]
        return groups

    def _require_fits(
        self, schedulers: Sequence[Any], fresh: Sequence[Mapping[str, Any]], now: _Snapshot, stored: Mapping[str, Any]
    ) -> None:
        """Rejects schedulers if their classes or arguments, or the optimizer's initial rates, differ from the store."""
        instead = (
            "Nothing was changed: use the schedulers and the learning rates of the stored run. To start with the new "
            "schedulers instead, call schedule(..., restore=False) in this start only"
        )
        titles = _stored_titles(stored)
        if _listed(schedulers) != titles:
            raise ConfigError(f"the stored run used {titles}, not {_listed(schedulers)}. {instead}")
        found = self._other_options(now.options.groups, stored)
        begun = [group.get("initial_lr") for group in self._kept_groups()]
        for entries, one in zip(fresh, stored["schedulers"], strict=True):
            # A scheduler made after offload() took its base rates from the groups, which have the stored rates already.
            inherited = {
                path
                for path, rates in entries.items()
                if path.rpartition(".")[2] == "base_lrs" and all(rate in begun for rate in rates)
            }
            found += _differences(_fresh(one), entries, {*_PLACE, *inherited, *one.get("moved", ())})
        if found:
            raise ConfigError(
                f"{titles} has different arguments or learning rates than in the stored run: "
                f"{', '.join(sorted({*found})[:3])}{' and more' if len({*found}) > 3 else ''}. {instead}"
            )

    def _other_options(self, groups: Sequence[Mapping[str, Any]], stored: Mapping[str, Any]) -> list[str]:
        """Describes initial learning rates and options set by schedulers' constructors that differ from the store."""
        rates = [] if _begins_rates(stored) else stored.get("rates", [])
        found = [
            (number, "initial_lr", *pair)
            for number, pair in enumerate(zip(rates, map(_own_rate, self._given), strict=False))
        ]
        for number, (group, given, kept) in enumerate(zip(groups, self._given, self._kept_groups(), strict=True)):
            for name in kept.keys() & group.keys() - {*stored["options"]} - (given.keys() - _SET_ONCE):
                now = plain(group[name])
                # A scheduler that was made before offload() set its option in `given`. offload() then replaced the
                # option by the stored option. So compare the option in `given`.
                found.append((number, name, kept[name], given.get(name, now) if now == kept[name] else now))
        return [f"{name} of group {number} {had} -> {now}" for number, name, had, now in found if now != had]

    def _restored(self, schedulers: Sequence[Any], now: _Snapshot, stored: Mapping[str, Any]) -> _Snapshot:
        """Loads the stored states and options into schedulers and groups; returns the new snapshot.

        If an error occurs, restores the snapshot `now`.
        """
        try:
            for scheduler, one in zip(schedulers, stored["schedulers"], strict=True):
                _load(scheduler, one["state"])
            for group, theirs in zip(self._groups, self._kept_groups(), strict=True):
                for name in {"lr", *stored["options"]} & theirs.keys():
                    put(group, name, restored(theirs[name], group.get(name)))
            return _Snapshot(schedulers, self._groups)
        except BaseException:
            now.restore()
            raise

    # --- steps ---------------------------------------------------------------------------------

    def begin_step(self, optimizers: Sequence[torch.optim.Optimizer], *, commits_position: bool) -> None:
        """Rejects a scheduler that other code advanced; warns of schedulers that a resumed run does not restore.

        `optimizers`: the optimizers for which the user may have made schedulers. `commits_position`: True if a trainer
        stores its position and schedulers itself. The trainer then restores the schedulers at a resume, without
        `schedule()`.
        """
        self._before, self._had_stepped = None, self._stepped
        self._require_own()
        is_missing = not self._schedulers and not commits_position
        if is_missing and self._resumed and not self._stepped and self._store.step:
            self._warn_of_others(optimizers)

    def _require_own(self) -> None:
        """Rejects a scheduler that other code changed since the last step."""
        found = self._changed()
        if found:
            raise UsageError(
                f"{found}, but after optimizer.schedule() only step() advances the scheduler, and only a resume "
                "restores it: delete your calls of scheduler.step() and scheduler.load_state_dict()"
            )

    def _warn_of_others(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Warns if the stored run had schedulers, or if a scheduler of `optimizers` was not given to `schedule()`."""
        stored = self._stored()
        if stored is not None:
            words = (
                f"the stored run used {_stored_titles(stored)}, but this start did not call optimizer.schedule() for it"
            )
        elif any(hasattr(vars(one).get("step"), "_wrapped_by_lr_sched") for one in optimizers):
            # torch's schedulers wrap `step` of their optimizer, and mark the wrapper.
            words = (
                "a scheduler was made for this optimizer but not passed to optimizer.schedule(), so a resume restores "
                "neither the scheduler's state nor the learning rate that it set after the last step"
            )
        else:
            return
        warn(f"{words}: {_PAGE} shows how to resume exactly")

    def _changed(self) -> str | None:
        """Describes a scheduler whose state changed since the last step; returns None if there is none."""
        for scheduler, known in zip(self._schedulers, self._now.entries if self._now else (), strict=True):
            found = _differences(known, _entries(scheduler), _COUNTS)
            if found:
                return f"{_title(scheduler)} was changed since the last step ({found[0]})"
        return None

    def advance(self) -> None:
        """Advances the schedulers for a step that is about to be committed."""
        self._stepped = True
        if not self._schedulers:
            return
        self._before = before = _Snapshot(self._schedulers, self._groups)
        for scheduler in self._schedulers:
            try:
                scheduler.step()
            except Exception as error:
                error.add_note(
                    f"{_title(scheduler)} raised this error when optimizer.step() advanced it; nothing was committed"
                )
                raise
        now = _Snapshot(self._schedulers, self._groups)
        self._options |= {place.name for place in before.options.changes(now.options)}
        _require_small(self._saved(self._schedulers, now, self._fresh, self._options))
        self._now = now

    def take_back(self) -> None:
        """Undoes `advance` after the commit failed: restores schedulers and groups."""
        self._stepped = self._had_stepped
        if self._before is not None:
            self._before.restore()
            self._now, self._before = self._before, None

    def committed(self) -> dict[str, Any]:
        """Returns the schedulers' entry for a commit or checkpoint, as {"schedule": ...}; {} if there is no entry."""
        if self._now is None:
            # A resumed run to which no scheduler was given keeps the stored entry until its first step.
            stored = None if self._stepped else (self._store.hyperparameters or {}).get("schedule")
            return {} if stored is None else {"schedule": stored}
        self._require_own()
        return {"schedule": self._saved(self._schedulers, self._now, self._fresh, self._options)}

    def _saved(
        self, schedulers: Sequence[Any], now: _Snapshot, fresh: Sequence[Mapping[str, Any]], options: set[str]
    ) -> dict[str, Any]:
        states = [
            {"scheduler": _title(one), "state": state, "fresh": _since(state, began)}
            for one, state, began in zip(schedulers, now.entries, fresh, strict=True)
        ]
        return {"schedulers": states, "options": sorted(options), "rates": [_own_rate(group) for group in self._given]}

    # --- trainers that advance schedulers themselves -------------------------------------------

    def rewind(self) -> None:
        """Restores schedulers and groups to their state before the last step advanced the schedulers.

        A trainer then logs the learning rate of that step, and advances the schedulers itself.
        """
        if self._before is not None:
            self._before.restore()

    def catch_up(self) -> None:
        """Restores schedulers and groups to the state after the last step, even if a trainer has not advanced them."""
        if self._now is not None and self.is_foreign:
            self._now.restore()

    @property
    def is_foreign(self) -> bool:
        """True if a scheduler's state changed since the last step: other code advanced it, or `rewind` was called."""
        return self._changed() is not None


def options_set(hyperparameters: Mapping[str, Any]) -> set[str]:
    """Returns the names of group options that the stored schedulers set independently of the optimizer's options."""
    stored: Any = hyperparameters.get("schedule")
    if not _is_schedule(stored):
        return set()
    return set(stored["options"]) - (set() if _begins_rates(stored) else {"lr"})


def _begins_rates(stored: Mapping[str, Any]) -> bool:
    """True if a stored scheduler sets its own initial learning rate; other schedulers scale the optimizer's rate."""
    return any(kind in one["scheduler"] for one in stored["schedulers"] for kind in ("CyclicLR", "OneCycleLR"))


def _unwrapped(scheduler: Any) -> Any:
    """Unwraps a scheduler in accelerate's wrapper; rejects a wrapper that advances the scheduler once for each rank."""
    if type(scheduler).__name__ != "AcceleratedScheduler":
        return scheduler
    own = scheduler.scheduler
    ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if ranks > 1 and not scheduler.split_batches:
        raise ConfigError(
            f"accelerate advances {_title(own)} {ranks} times in each step, once for each rank: make the scheduler for "
            "the number of steps, and pass schedule() the scheduler itself, not the wrapper that prepare() returns"
        )
    return own


def _require_scheduler(scheduler: Any, number: int) -> None:
    """Rejects an argument of `schedule()` that is not a scheduler, or whose `step()` needs an argument."""
    kind = type(scheduler).__name__
    if not all(hasattr(scheduler, name) for name in ("optimizer", "step", "state_dict", "load_state_dict")):
        raise ConfigError(
            f"schedule() takes schedulers like those of torch.optim.lr_scheduler, but argument {number} is of type "
            f"{kind}: pass each scheduler as an argument of its own, and nothing else"
        )
    if not steps_alone(scheduler):
        raise ConfigError(
            f"step() of {kind} needs an argument (a metric or an epoch), which the optimizer's step() does not have: "
            f"call step() of the scheduler in your loop, as {_PAGE} shows"
        )


def steps_alone(scheduler: Any) -> bool:
    """True if a scheduler's `step()` needs no argument. `step()` of ReduceLROnPlateau needs a metric, for example."""
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError:
        return False
    return True


def _title(scheduler: Any) -> str:
    """Returns the name of a scheduler's class, with the classes of its parts: "SequentialLR(LinearLR, CosineLR)"."""
    parts = ", ".join(map(_title, getattr(scheduler, "_schedulers", ())))
    return f"{type(scheduler).__name__}({parts})" if parts else type(scheduler).__name__


def _listed(schedulers: Iterable[Any]) -> str:
    return " and ".join(map(_title, schedulers))


def _stored_titles(stored: Mapping[str, Any]) -> str:
    return " and ".join(one["scheduler"] for one in stored["schedulers"])


def _entries(scheduler: Any) -> dict[str, Any]:
    """Returns a scheduler's state as flat JSON, by paths: "last_epoch", "_schedulers.0.last_epoch" and so on.

    The result includes arguments that `functools.partial` binds to the functions of a LambdaLR, because torch's state
    dict does not contain them. Schedulers of transformers bind arguments in this way.
    """
    found = dict(_leaves(scheduler.state_dict()))
    for place, function in _lambdas(scheduler):
        if isinstance(function, functools.partial):
            bound = [*enumerate(function.args), *function.keywords.items()]
            found |= {f"{place}({name})": value for name, value in bound if storable(value)}
    for path, value in found.items():
        # JSON allows only text keys, but a dict of MultiStepLR has numbers as keys. Store such a dict as a list of
        # pairs.
        pairs = [list(pair) for pair in value.items()] if isinstance(value, dict) and not storable(value) else value
        if not storable(pairs):
            raise ConfigError(
                f"{path!r} in the state of {_title(scheduler)} is {value!r:.80}, which a commit cannot hold: let "
                "the scheduler's state_dict() return only numbers, texts, lists and dicts"
            )
        found[path] = plain(pairs)
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields path and value of each leaf: descends into dicts with text keys without dots, and lists with dicts."""
    parts: Iterable[tuple[Any, Any]] | None = None
    if isinstance(value, dict) and all(type(name) is str and "." not in name for name in value):
        parts = value.items()
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        parts = enumerate(value)
    if parts is None:
        yield path, value
        return
    for name, part in parts:
        yield from _leaves(part, f"{path}.{name}" if path else str(name))


def _lambdas(scheduler: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields path and function of each `lr_lambdas` entry of a scheduler and of its parts."""
    for number, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
        yield f"{path}lr_lambdas.{number}", function
    for number, part in enumerate(getattr(scheduler, "_schedulers", ())):
        yield from _lambdas(part, f"{path}_schedulers.{number}.")


def _load(scheduler: Any, entries: Mapping[str, Any]) -> None:
    """Loads entries into a scheduler, each converted to the type of the present entry. Skips entries that are equal."""
    state, now = copied(scheduler.state_dict(), deep=True), _entries(scheduler)
    for path, value in entries.items():
        if path not in now or not same(value, now[path]):
            _set(state, path.split("."), value)
    scheduler.load_state_dict(state)


def _set(state: Any, path: Sequence[str], value: Any) -> None:
    """Sets the entry of a state dict at a path of `_entries`; does nothing if a parent or a list item is missing."""
    *parents, name = path
    try:
        for part in parents:
            state = state[int(part) if isinstance(state, list) else part]
        key = int(name) if isinstance(state, list) else name
        like = state.get(key) if isinstance(state, dict) else state[key]
    except (KeyError, IndexError, ValueError, TypeError):
        return
    if isinstance(like, dict) and isinstance(value, list):
        like.clear()
        like.update(value)
    else:
        state[key] = restored(value, like)


def _since(state: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of `fresh` that differ in `state`, without entries of the position; [Note: fresh states]."""
    return {
        name: fresh.get(name, _NONE)
        for name in dict.fromkeys((*fresh, *state))
        if not same(fresh.get(name, _NONE), state.get(name, _NONE)) and name.rpartition(".")[2] not in _PLACE
    }


def _fresh(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuilds a stored scheduler's fresh state: its newest state, in which the entries of `_since` are put back.

    An earlier version of memascend stored only the names of changed entries ("moved"). The fresh values of these
    entries are unknown, so they are left out.
    """
    moved = stored.get("moved", ())
    return {**{name: value for name, value in stored["state"].items() if name not in moved}, **stored.get("fresh", {})}


def described(scheduler: Any) -> dict[str, Any]:
    """Describes a scheduler as JSON, which `differences` compares in another process.

    The description has the classes, the state, and arguments that are bound to functions of a LambdaLR. The description
    does not have functions, or arguments that a scheduler keeps in the optimizer's groups.

    Raises:
        ConfigError: JSON cannot hold the state.
    """
    return {"scheduler": _title(scheduler), "state": _entries(scheduler)}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describes how two new schedulers differ in class or arguments, from their descriptions by `described`.

    Entries of the position (`_PLACE`) are not compared. Base rates, which a scheduler took from the optimizer's groups
    when it was made, are compared.
    """
    if before["scheduler"] != now["scheduler"]:
        return [f"{before['scheduler']} -> {now['scheduler']}"]
    return _differences(before["state"], now["state"], _PLACE)


def _differences(had: Mapping[str, Any], has: Mapping[str, Any], ignored: Container[str]) -> list[str]:
    """Describes the entries that differ. `ignored` has paths, or last parts of paths, of entries to leave out."""
    found = []
    for path in dict.fromkeys((*had, *has)):
        name = path.rpartition(".")[2]
        # A private entry may exist in one version of torch and not in another.
        is_optional = name.startswith("_") and (path in had) != (path in has)
        one, other = had.get(path, _NONE), has.get(path, _NONE)
        if not (is_optional or path in ignored or name in ignored or one == other or same(one, other)):
            found.append(f"{path} {one} -> {other}")
    return found


def _own_rate(given: Mapping[str, Any]) -> Any:
    """Returns a group's learning rate before a scheduler changed it."""
    return given.get("initial_lr", given.get("lr"))


def _is_schedule(value: Any) -> bool:
    """True if a stored value has the form of `Schedule.committed`, of this version or an earlier one."""
    return (
        isinstance(value, dict)
        and _are(str, value.get("options"))
        and isinstance(value.get("rates", []), list)
        and _are(dict, value.get("schedulers"))
        and all(
            isinstance(one.get("scheduler"), str)
            and isinstance(one.get("state"), dict)
            and isinstance(one.get("fresh", {}), dict)
            and _are(str, one.get("moved", []))
            for one in value["schedulers"]
        )
    )


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(one, kind) for one in values)


def _require_small(saved: Mapping[str, Any]) -> None:
    size = len(json.dumps(saved))
    if size > _BYTES_MAX:
        raise ConfigError(
            f"the state of {_stored_titles(saved)} has {size} bytes as JSON, but may have at most {_BYTES_MAX} bytes "
            "in a commit: give the scheduler fewer numbers as arguments, or keep the state in optimizer.user_state or "
            "in a file"
        )
