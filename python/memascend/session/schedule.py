"""Advances learning rate schedulers within the commit of each step, and restores them at a resume."""

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
from memascend.storage.store import not_as_written
from memascend.text import counted, warn

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    import torch

    from memascend.storage import Store


# A commit holds 128 KiB of options, loss scale, schedulers and position together.
_BYTES_MAX = 32 << 10
# accelerate counts calls that advance nothing.
_COUNTS = frozenset({"_step_count", "_is_initial", "_get_lr_called_within_step"})
# Entries of state dicts that tell where a scheduler is, and not with which arguments it was made.
_PLACE = _COUNTS | {"last_epoch", "_last_lr", "T_cur", "T_i"}
# Options of groups that torch's schedulers set once, from their arguments or from the learning rate.
_SET_ONCE = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
_PAGE = "docs/resume.md"
# Stands for a missing entry in words, and in a commit.
_NONE = "none"
_log = logging.getLogger("memascend")


class _Moment:
    """Copies of schedulers' states, and of the options of groups that they set, at one moment."""

    def __init__(self, schedulers: Sequence[Any], groups: Sequence[dict[str, Any]]) -> None:
        """The present one; `ConfigError` names an entry that JSON cannot hold."""
        self._schedulers, self._groups = schedulers, groups
        self.entries = [_entries(scheduler) for scheduler in schedulers]
        self.options = SharedValues({}, [group_options(group) for group in groups])

    def bring_back(self) -> None:
        """Give schedulers and groups what they had."""
        for scheduler, entries in zip(self._schedulers, self.entries, strict=True):
            _load(scheduler, entries)
        now = SharedValues({}, [group_options(group) for group in self._groups])
        for place, value in now.changes(self.options).items():
            assert place.group is not None
            put(self._groups[place.group], place.name, value)


@dataclass(eq=False)
class Schedule:
    """The schedulers that `step()` advances.

    They are advanced after the updates of a step have begun and before its commit, which holds the new options and
    their state. So a process killed at any moment leaves updates and schedulers of one step.

    A commit has two states of each scheduler: the newest one, which a resume loads, and the fresh one, as it was made.
    A scheduler with other arguments differs in the latter.
    """

    # The optimizer's own dicts, with the stored options in place of those that it had, `_given`.
    _groups: Sequence[dict[str, Any]]
    _given: Sequence[Mapping[str, Any]]
    _store: Store
    _resumed: bool  # the store has a run that began in another process
    _schedulers: tuple[Any, ...] = ()
    _fresh: list[dict[str, Any]] = field(default_factory=list)
    _options: set[str] = field(default_factory=set)  # options of groups that steps changed
    _now: _Moment | None = None
    _before: _Moment | None = None  # before the last step, where that advanced the schedulers
    # This run has committed a step, or is about to; and whether it had before the present step.
    _stepped: bool = False
    _had_stepped: bool = False

    # --- given by the user -----------------------------------------------------------------

    def attach(self, given: Sequence[Any], *, restore: bool) -> None:
        """Advance these schedulers from now on, in place of others; at a resume, `restore` them first.

        Where one is rejected, nothing was changed.
        """
        schedulers = tuple(map(_unwrapped, given))
        own = {id(group) for group in self._groups}
        for number, scheduler in enumerate(schedulers):
            _require_scheduler(scheduler, number)
            if not all(id(group) in own for group in scheduler.optimizer.param_groups):
                raise ConfigError(
                    f"{_title(scheduler)} sets the options of another optimizer: make it from the optimizer that "
                    "offload() returned, or from the one that was given to it"
                )
        if len(set(map(id, schedulers))) != len(schedulers):
            raise ConfigError("a scheduler is given to schedule() twice: give each once")
        dropped = [one for one in self._schedulers if one not in schedulers]
        if dropped and not self._stepped:
            warn(
                f"{_listed(dropped)} was given to schedule() before, and no step() advances it any more: give all "
                "schedulers in one call"
            )
        now = _Moment(schedulers, self._groups)
        # One that is given again is not fresh.
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
                f"the store has {counted(self._store.step, 'step')} and no scheduler: {_listed(schedulers)} begins "
                f"where it was made or loaded, and the next resume restores it ({_PAGE})"
            )
        _require_small(self._saved(schedulers, now, fresh, options))
        if stored is not None:
            now = self._restored(schedulers, now, stored)
        functions = types.FunctionType | types.BuiltinFunctionType
        uncompared = [place for one in schedulers for place, has in _lambdas(one) if isinstance(has, functions)]
        if uncompared:
            _log.info(
                "a resume cannot compare functions of %s: %s may compute other rates then",
                _listed(schedulers),
                ", ".join(uncompared),
            )
        self._schedulers, self._fresh, self._options, self._now, self._before = schedulers, fresh, options, now, None

    def _stored(self) -> dict[str, Any] | None:
        """The entry of the last commit, which another program may have written."""
        stored: dict[str, Any] | None = (self._store.hyperparameters or {}).get("schedule")
        if stored is not None and not _is_schedule(stored):
            raise not_as_written(self._store.info()["devices"][0], f"the schedulers of step {self._store.step}")
        return stored

    def _kept_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = (self._store.hyperparameters or {})["groups"]
        return groups

    def _require_fits(
        self, schedulers: Sequence[Any], fresh: Sequence[Mapping[str, Any]], now: _Moment, stored: Mapping[str, Any]
    ) -> None:
        """Reject schedulers of other classes or arguments, and other rates of the optimizer that they begin with."""
        instead = (
            "Nothing was changed: give the schedulers that the run had, and the optimizer its rates, or begin with "
            "these, in this one start, by schedule(..., restore=False)"
        )
        titles = _stored_titles(stored)
        if _listed(schedulers) != titles:
            raise ConfigError(f"the run was scheduled by {titles}, not {_listed(schedulers)}. {instead}")
        found = self._other_options(now.options.groups, stored)
        begun = [group.get("initial_lr") for group in self._kept_groups()]
        for entries, one in zip(fresh, stored["schedulers"], strict=True):
            # One that is made after offload() finds the stored rates in the groups, and not the optimizer's own.
            inherited = {
                path
                for path, rates in entries.items()
                if path.rpartition(".")[2] == "base_lrs" and all(rate in begun for rate in rates)
            }
            found += _differences(_fresh(one), entries, {*_PLACE, *inherited, *one.get("moved", ())})
        if found:
            raise ConfigError(
                f"{titles} has other arguments than in the run: {', '.join(sorted({*found})[:3])}"
                f"{' and more' if len({*found}) > 3 else ''}. {instead}"
            )

    def _other_options(self, groups: Sequence[Mapping[str, Any]], stored: Mapping[str, Any]) -> list[str]:
        """The options of groups that schedulers set once, and that differ from the run's, in words."""
        rates = [] if _begins_rates(stored) else stored.get("rates", [])
        found = [
            (number, "initial_lr", *pair)
            for number, pair in enumerate(zip(rates, map(_own_rate, self._given), strict=False))
        ]
        for number, (group, given, kept) in enumerate(zip(groups, self._given, self._kept_groups(), strict=True)):
            for name in kept.keys() & group.keys() - {*stored["options"]} - (given.keys() - _SET_ONCE):
                now = plain(group[name])
                # Where it was made before offload(), that set the stored option.
                found.append((number, name, kept[name], given.get(name, now) if now == kept[name] else now))
        return [f"{name} of group {number} {had} -> {now}" for number, name, had, now in found if now != had]

    def _restored(self, schedulers: Sequence[Any], now: _Moment, stored: Mapping[str, Any]) -> _Moment:
        """Set what was stored on schedulers that fit, and on the groups."""
        try:
            for scheduler, one in zip(schedulers, stored["schedulers"], strict=True):
                _load(scheduler, one["state"])
            for group, theirs in zip(self._groups, self._kept_groups(), strict=True):
                for name in {"lr", *stored["options"]} & theirs.keys():
                    put(group, name, restored(theirs[name], group.get(name)))
            return _Moment(schedulers, self._groups)
        except BaseException:
            now.bring_back()
            raise

    # --- steps ---------------------------------------------------------------------------------

    def begin_step(self, optimizers: Sequence[torch.optim.Optimizer], *, is_followed: bool) -> None:
        """Reject a scheduler that something else advanced; warn of schedulers that a resumed run does not restore.

        `optimizers` are those for which a scheduler may have been made. `is_followed`: the position of a trainer has
        its schedulers, so that none is missing here.
        """
        self._before, self._had_stepped = None, self._stepped
        self._require_own()
        is_missing = not self._schedulers and not is_followed
        if is_missing and self._resumed and not self._stepped and self._store.step:
            self._warn_of_others(optimizers)

    def _require_own(self) -> None:
        found = self._changed()
        if found:
            raise UsageError(
                f"{found}, and step() advances it by itself since optimizer.schedule(), which also restores it at a "
                "resume: delete the line scheduler.step(), or load_state_dict()"
            )

    def _warn_of_others(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        stored = self._stored()
        if stored is not None:
            words = (
                f"the run was scheduled by {_stored_titles(stored)}, and this resume has no optimizer.schedule() for it"
            )
        elif any(hasattr(vars(one).get("step"), "_wrapped_by_lr_sched") for one in optimizers):
            # torch marks `step` of each optimizer for which a scheduler was made.
            words = (
                "a scheduler was made for this optimizer and not given to optimizer.schedule(), so a resume restores "
                "neither its state nor the learning rate that it set after the last step"
            )
        else:
            return
        warn(f"{words}: {_PAGE} has the lines that resume exactly")

    def _changed(self) -> str | None:
        """The scheduler that something else advanced since the last step, in words."""
        for scheduler, known in zip(self._schedulers, self._now.entries if self._now else (), strict=True):
            found = _differences(known, _entries(scheduler), _COUNTS)
            if found:
                return f"{_title(scheduler)} was changed since the last step ({found[0]})"
        return None

    def advance(self) -> None:
        """Advance the schedulers by a step that is about to be committed."""
        self._stepped = True
        if not self._schedulers:
            return
        self._before = before = _Moment(self._schedulers, self._groups)
        for scheduler in self._schedulers:
            try:
                scheduler.step()
            except Exception as error:
                error.add_note(f"{_title(scheduler)} was advanced by optimizer.step(), and nothing was committed")
                raise
        now = _Moment(self._schedulers, self._groups)
        self._options |= {place.name for place in before.options.changes(now.options)}
        _require_small(self._saved(self._schedulers, now, self._fresh, self._options))
        self._now = now

    def take_back(self) -> None:
        """The step was not committed: schedulers and groups have what they had before it."""
        self._stepped = self._had_stepped
        if self._before is not None:
            self._before.bring_back()
            self._now, self._before = self._before, None

    def committed(self) -> dict[str, Any]:
        """The entry of each commit and checkpoint."""
        if self._now is None:
            # A run that was not told of the schedulers keeps them until it steps without them.
            stored = None if self._stepped else (self._store.hyperparameters or {}).get("schedule")
            return {} if stored is None else {"schedule": stored}
        self._require_own()
        return {"schedule": self._saved(self._schedulers, self._now, self._fresh, self._options)}

    def _saved(
        self, schedulers: Sequence[Any], now: _Moment, fresh: Sequence[Mapping[str, Any]], options: set[str]
    ) -> dict[str, Any]:
        states = [
            {"scheduler": _title(one), "state": state, "fresh": _since(state, began)}
            for one, state, began in zip(schedulers, now.entries, fresh, strict=True)
        ]
        return {"schedulers": states, "options": sorted(options), "rates": [_own_rate(group) for group in self._given]}

    # --- trainers that advance schedulers themselves -------------------------------------------

    def rewind(self) -> None:
        """Let a trainer log the learning rate of the step just made, and advance the schedulers itself."""
        if self._before is not None:
            self._before.bring_back()

    def catch_up(self) -> None:
        """Give schedulers and groups what the last step left, whether a trainer advanced them or not."""
        if self._now is not None and self.is_foreign:
            self._now.bring_back()

    @property
    def is_foreign(self) -> bool:
        """Whether something else advanced a scheduler since the last step."""
        return self._changed() is not None


def options_set(hyperparameters: Mapping[str, Any]) -> set[str]:
    """Options that the schedulers of a commit set, whatever the optimizer is made with."""
    stored: Any = hyperparameters.get("schedule")
    if not _is_schedule(stored):
        return set()
    return set(stored["options"]) - (set() if _begins_rates(stored) else {"lr"})


def _begins_rates(stored: Mapping[str, Any]) -> bool:
    """Whether a scheduler takes no rate from the optimizer; others multiply its own, so another one counts."""
    return any(kind in one["scheduler"] for one in stored["schedulers"] for kind in ("CyclicLR", "OneCycleLR"))


def _unwrapped(scheduler: Any) -> Any:
    """The scheduler in accelerate's wrapper, unless that advances it several times a step."""
    if type(scheduler).__name__ != "AcceleratedScheduler":
        return scheduler
    own = scheduler.scheduler
    ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if ranks > 1 and not scheduler.split_batches:
        raise ConfigError(
            f"accelerate advances {_title(own)} {ranks} times a step, once for each rank: make it for the number of "
            "steps, and give schedule() the scheduler that prepare() has not wrapped"
        )
    return own


def _require_scheduler(scheduler: Any, number: int) -> None:
    kind = type(scheduler).__name__
    if not all(hasattr(scheduler, name) for name in ("optimizer", "step", "state_dict", "load_state_dict")):
        raise ConfigError(
            f"schedule() takes schedulers as those of torch.optim.lr_scheduler, and argument {number} is {kind}"
        )
    if not steps_alone(scheduler):
        raise ConfigError(
            f"step() of {kind} needs an argument (a metric or an epoch), which step() of the optimizer has not: call "
            f"it in the loop, as {_PAGE} has it"
        )


def steps_alone(scheduler: Any) -> bool:
    """Whether a scheduler's `step()` takes no arguments, such as a metric."""
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError:
        return False
    return True


def _title(scheduler: Any) -> str:
    """Its class, and those of the schedulers that it consists of."""
    parts = ", ".join(map(_title, getattr(scheduler, "_schedulers", ())))
    return f"{type(scheduler).__name__}({parts})" if parts else type(scheduler).__name__


def _listed(schedulers: Iterable[Any]) -> str:
    return " and ".join(map(_title, schedulers))


def _stored_titles(stored: Mapping[str, Any]) -> str:
    return " and ".join(one["scheduler"] for one in stored["schedulers"])


def _entries(scheduler: Any) -> dict[str, Any]:
    """The state of a scheduler as flat JSON: "last_epoch", "_schedulers.0.last_epoch" and so on.

    With the arguments of transformers' schedulers: they are bound to the functions of a LambdaLR, whose state leaves
    them out.
    """
    found = dict(_leaves(scheduler.state_dict()))
    for place, function in _lambdas(scheduler):
        if isinstance(function, functools.partial):
            bound = [*enumerate(function.args), *function.keywords.items()]
            found |= {f"{place}({name})": value for name, value in bound if storable(value)}
    for path, value in found.items():
        # Keys of JSON are texts, and MultiStepLR counts by numbers.
        pairs = [list(pair) for pair in value.items()] if isinstance(value, dict) and not storable(value) else value
        if not storable(pairs):
            raise ConfigError(
                f"{path!r} in the state of {_title(scheduler)} is {value!r:.80}, which a commit cannot hold: let its "
                "state_dict() have numbers, texts, lists and dicts alone"
            )
        found[path] = plain(pairs)
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
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
    """The functions of a scheduler and of its parts, by their places."""
    for number, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
        yield f"{path}lr_lambdas.{number}", function
    for number, part in enumerate(getattr(scheduler, "_schedulers", ())):
        yield from _lambdas(part, f"{path}_schedulers.{number}.")


def _load(scheduler: Any, entries: Mapping[str, Any]) -> None:
    """Set the entries that differ; a scheduler's own values keep their classes."""
    state, now = copied(scheduler.state_dict(), deep=True), _entries(scheduler)
    for path, value in entries.items():
        if path not in now or not same(value, now[path]):
            _set(state, path.split("."), value)
    scheduler.load_state_dict(state)


def _set(state: Any, path: Sequence[str], value: Any) -> None:
    """Set an entry of a state dict that `_leaves` found; one whose container is missing is left out."""
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
    """The entries of a fresh state that steps have changed since, but for those of its place."""
    return {
        name: fresh.get(name, _NONE)
        for name in dict.fromkeys((*fresh, *state))
        if not same(fresh.get(name, _NONE), state.get(name, _NONE)) and name.rpartition(".")[2] not in _PLACE
    }


def _fresh(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The fresh state of a stored scheduler, as far as it is known."""
    moved = stored.get("moved", ())
    return {**{name: value for name, value in stored["state"].items() if name not in moved}, **stored.get("fresh", {})}


def described(scheduler: Any) -> dict[str, Any]:
    """A scheduler as plain JSON that another process can compare, by `differences`.

    It has the classes, the state, and the arguments that are bound to functions of LambdaLR. A function is not part of
    it, nor are arguments that a scheduler keeps in the optimizer's groups.

    Raises:
        ConfigError: JSON cannot hold the state.
    """
    return {"scheduler": _title(scheduler), "state": _entries(scheduler)}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The classes or arguments in which two descriptions of schedulers that were just made differ, in words.

    Entries that tell where a scheduler is are not compared. The base rates are: those of the optimizer's groups when
    the scheduler was made.
    """
    if before["scheduler"] != now["scheduler"]:
        return [f"{before['scheduler']} -> {now['scheduler']}"]
    return _differences(before["state"], now["state"], _PLACE)


def _differences(had: Mapping[str, Any], has: Mapping[str, Any], ignored: Container[str]) -> list[str]:
    """The entries that differ, in words, but for those `ignored`, by their paths or last names."""
    found = []
    for path in dict.fromkeys((*had, *has)):
        name = path.rpartition(".")[2]
        # Another version of torch may have other private entries.
        comes_or_goes = name.startswith("_") and (path in had) != (path in has)
        one, other = had.get(path, _NONE), has.get(path, _NONE)
        if not (comes_or_goes or path in ignored or name in ignored or one == other or same(one, other)):
            found.append(f"{path} {one} -> {other}")
    return found


def _own_rate(given: Mapping[str, Any]) -> Any:
    """The rate of a group before a scheduler changed it."""
    return given.get("initial_lr", given.get("lr"))


def _is_schedule(value: Any) -> bool:
    """Whether a value that was read has the form that `Schedule.committed` makes, or that an earlier version made."""
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
            f"the state of {_stored_titles(saved)} has {size} bytes as JSON, and a commit holds at most {_BYTES_MAX}: "
            "make it from fewer numbers, or restore it by user_state or a file of your own"
        )
