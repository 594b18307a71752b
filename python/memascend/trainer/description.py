"""Describes the arguments, model and data that decide a training's results; a resume compares the descriptions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from memascend.checkpoint.weights import first_rows
from memascend.errors import ConfigError, UsageError
from memascend.optim.shared import plain, storable
from memascend.session import schedule
from memascend.trainer.digest import digest_of
from memascend.trainer.generators import undisturbed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_log = logging.getLogger("memascend")
# A resume compares at most this many rows of a data set, and at most this many rows of the embeddings.
_ROWS = 64
# The largest number of characters of a text that `_texts()` keeps whole by default. Of a longer text, it keeps a prefix
# and a digest.
_TEXT_MAX = 80
# The number of levels of nested values that `_text()` follows.
_DEPTH_MAX = 6
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Entries of a model's configuration, of an adapter and of an optimizer's group that do not change the results of a
# training.
_OF_NO_MODEL = frozenset({"_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype"})
_OF_NO_ADAPTER = frozenset({"base_model_name_or_path", "revision", "inference_mode", "peft_version", "runtime_config"})
_OF_NO_GROUP = frozenset({"params", "param_names", "initial_lr"})
# Prefixes of the names of arguments that do not change the results of a training.
_FREE = (
    *("output_dir", "log", "save_", "eval_", "report_to", "run_name", "project", "trackio", "hub", "push_to_hub"),
    *("disable_tqdm", "do_", "dataloader_", "local_rank", "ddp_", "resume_from", "overwrite", "skip_memory_metrics"),
    *("load_best_model", "metric_for_best", "greater_is_better", "include_", "restore_callback", "use_cpu", "debug"),
    *("per_device_eval", "prediction_loss_only", "batch_eval_metrics", "torch_empty_cache", "dataset_num_proc"),
    *("ignore_data_skip", "enable_jit_checkpoint", "auto_find_batch_size", "place_model", "fsdp"),
    *("gradient_checkpointing", "activation_checkpointing"),
)
# Arguments that change results although `_FREE` has a prefix of their names.
_NOT_FREE = ("dataloader_drop_last",)
_MICRO = "gradient_accumulation_steps"
_LENGTH = ("max_steps", "num_train_epochs")


def description(trainer: Any, clipping: str) -> dict[str, Any]:
    """Describes a run as JSON: arguments, data, ranks, clipping, model and losses.

    Also describes optimizer and schedule if the Trainer has made these.
    """
    found: dict[str, Any] = {
        "arguments": arguments_of(trainer.args),
        "data": _data(trainer.train_dataset),
        "ranks": trainer.args.world_size,
        "others": {
            "clipping": clipping,
            **_model(trainer.model),
            **_losses(trainer),
            **_optimizer(trainer.optimizer),
        },
    }
    scheduler = trainer.lr_scheduler
    return found if scheduler is None else {**found, "schedule": schedule.described(scheduler)}


def arguments_of(args: Any) -> dict[str, Any]:
    """Returns the Trainer's arguments that can change the results of a training."""
    kept = {name: value for name, value in args.to_dict().items() if name in _NOT_FREE or not name.startswith(_FREE)}
    return _texts(kept, whole=True)


def _model(model: Any) -> dict[str, Any]:
    """Describes a model's class, configuration and adapters, and rows of its embeddings if the weights were loaded."""
    config: Any = getattr(model, "config", None)
    settings: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    found = {"model": type(model).__name__, **_texts(dict(_flat("config", settings, _OF_NO_MODEL)))}
    if getattr(config, "_name_or_path", "") and hasattr(model, "get_input_embeddings"):
        with contextlib.suppress(NotImplementedError, AttributeError):
            rows = first_rows(model.get_input_embeddings().weight, _ROWS)
            found |= {} if rows is None else {"model's embeddings": digest_of(rows)}
    adapters = getattr(model, "peft_config", None)
    for name, adapter in (adapters if isinstance(adapters, dict) else {}).items():
        # Do not flatten an adapter's dicts of patterns: a new pattern changes results, but `_changed()` ignores new
        # names.
        settings = {key: value for key, value in adapter.to_dict().items() if key not in _OF_NO_ADAPTER}
        found |= _texts({f"adapter {name}.{key}": value for key, value in settings.items()})
    return found


def _flat(title: str, values: Mapping[Any, Any], left_out: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yields the entries of nested dicts, each with its dotted name, except entries with a name in `left_out`."""
    for name, value in values.items():
        if name in left_out:
            continue
        if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
            yield from _flat(f"{title}.{name}", value, left_out)
        else:
            yield f"{title}.{name}", value


def _losses(trainer: Any) -> dict[str, Any]:
    """Describes the user's functions and modules that compute losses or rewards."""
    found: dict[str, Any] = {}
    for name in ("compute_loss_func", "loss", "reward_funcs"):
        value = getattr(trainer, name, None)
        settings = getattr(value, "get_config_dict", None)
        if callable(settings):
            # `value` is a loss of sentence-transformers.
            found |= _flat(name, {"kind": type(value).__qualname__, **settings()}, frozenset())
        else:
            found[name] = value
    return _texts(found)


def _optimizer(optimizer: Any) -> dict[str, Any]:
    """Describes the class and the options of an optimizer, which must not have stepped yet. Returns {} for None."""
    if optimizer is None:
        return {}
    groups = optimizer.param_groups
    options = {name for group in groups for name in group} - _OF_NO_GROUP
    found = {f"optimizer.{name}": [_option(group.get(name)) for group in groups] for name in sorted(options)}
    return _texts({"optimizer": type(optimizer).__qualname__, **found})


def _option(value: Any) -> Any:
    return plain(value) if storable(value) else value


def _data(data: Any) -> str:
    """Describes a data set by its length and, if reading rows draws no random numbers, a digest of some rows.

    For a stream, `Feed` compares batches instead.
    """
    if data is None or isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or isinstance(data, dict):
        return "a stream"
    count = len(data)
    compared = min(_ROWS, count)
    with undisturbed(data) as draws:
        rows, again = ([digest_of(data[number * count // compared]) for number in range(compared)] for _ in range(2))
        is_drawn = draws() or rows != again
    # Rows that draw random numbers differ at each read, so leave the digest out.
    return f"{count} rows {'' if is_drawn else digest_of(rows)}".strip()


# --- values as text --------------------------------------------------------------------------------------


class _IncomparableError(Exception):
    """A value has no text that another process can compare."""


def _texts(values: Mapping[str, Any], *, whole: bool = False) -> dict[str, Any]:
    """Converts values to numbers and texts that are the same in each process.

    Leaves out a value that has no such text, and logs its name. Unless `whole` is true, shortens a long text to a
    prefix and a digest.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        try:
            text = value if isinstance(value, int | float | str) else _text(value)
        except _IncomparableError:
            _log.warning(
                "%s is of type %s, which cannot be compared, so a resume does not notice a change of this value: keep "
                "the value unchanged between starts",
                name,
                type(value).__qualname__,
            )
            continue
        if isinstance(text, str) and len(text) > _TEXT_MAX and not whole:
            text = f"{text[: _TEXT_MAX // 2]}... (digest {digest_of(text)})"
        found[name] = text
    return found


def _text(value: Any, depth: int = 0) -> str:
    """Returns a value as text that has no memory address in it.

    The text of a function has its module, qualified name, closure and defaults. If the `str()` of an object has an
    address, the text has its class and attributes instead.

    Raises:
        _IncomparableError: the `str()` of a value has an address, and the value has no attributes; or values are
            nested too deeply.
    """
    if depth > _DEPTH_MAX:
        raise _IncomparableError
    below = functools.partial(_text, depth=depth + 1)
    for kinds, text_of in _TEXTS:
        if isinstance(value, kinds):
            return text_of(value, below)
    if dataclasses.is_dataclass(value):
        return f"{type(value).__qualname__}{below(vars(value))}"
    text = str(value)
    if not _ADDRESS.search(text):
        return text
    name = getattr(value, "__qualname__", None)
    if name is not None:
        # `value` is a function implemented in C.
        return f"{getattr(value, '__module__', '')}.{name}"
    if not hasattr(value, "__dict__"):
        raise _IncomparableError
    return f"{type(value).__module__}.{type(value).__qualname__}{below(vars(value))}"


_Below = Callable[[Any], str]


def _of_function(value: Any, below: _Below) -> str:
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    bound = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
    return f"{value.__module__}.{value.__qualname__}" + (below(bound) if bound else "")


def _of_dict(value: Any, below: _Below) -> str:
    return "{" + ", ".join(f"{name!r}: {_part(part, below)}" for name, part in value.items()) + "}"


def _of_list(value: Any, below: _Below) -> str:
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    parts = ", ".join(_part(part, below) for part in value) + comma
    return f"({parts})" if isinstance(value, tuple) else f"[{parts}]"


def _part(value: Any, below: _Below) -> str:
    return repr(value) if isinstance(value, str) else below(value)


# `_text()` uses the first entry whose type fits the value.
_TEXTS: tuple[tuple[Any, Callable[[Any, _Below], str]], ...] = (
    (type, lambda value, _: f"{value.__module__}.{value.__qualname__}"),
    (functools.partial, lambda value, below: f"partial{below((value.func, value.args, value.keywords))}"),
    (types.MethodType, lambda value, below: f"{below(value.__func__)} of {type(value.__self__).__qualname__}"),
    (types.FunctionType, _of_function),
    (torch.Tensor, lambda value, _: digest_of(value)),
    (torch.nn.Module, lambda value, _: type(value).__qualname__),
    (set | frozenset, lambda value, below: f"{{{', '.join(sorted(map(below, value)))}}}"),
    (dict, _of_dict),
    (list | tuple, _of_list),
)


# --- comparisons -----------------------------------------------------------------------------------------


def require_same(kept: Mapping[str, Any], run: Mapping[str, Any], trainer: Any) -> None:
    """Rejects a run that differs from the run of the position `kept`.

    Under a constant schedule, `run` may have another number of steps or epochs, but may not end before the stored step.
    These numbers must stay the same if the warmup is a share of the steps, or if the store has the weights of the best
    checkpoint. Another number of ranks is allowed if each step keeps its examples.

    Compares only the entries that both descriptions have, because another version of a library may have more or fewer
    arguments.

    Raises:
        ConfigError: the runs differ; the message lists the differences.
    """
    before, now = kept["run"]["arguments"], run["arguments"]
    changed = _changed(before, now)
    args = trainer.args
    may_grow = args.lr_scheduler_type.value.startswith("constant") and not 0 < args.warmup_steps < 1
    best = kept.get("best")
    if may_grow and best is None and not 0 < now["max_steps"] < kept["step"]:
        changed -= {*_LENGTH}
    earlier, ranks = kept["run"]["ranks"], run["ranks"]
    batches = before[_MICRO] * earlier
    if earlier != ranks and now[_MICRO] * ranks == batches:
        changed -= {_MICRO}
    found = [f"{name} {before.get(name)} -> {now.get(name)}" for name in sorted(changed)]
    was, own = ({"data": one["data"], **one.get("others", {})} for one in (kept["run"], run))
    found += [
        f"{name} {was.get(name, 'with entries')} -> {own.get(name, 'with entries')}"
        for name in sorted(_changed(was, own))
    ]
    if "schedule" in kept["run"] and "schedule" in run:
        found += [f"scheduler {one}" for one in schedule.differences(kept["run"]["schedule"], run["schedule"])]
    if earlier != ranks and now[_MICRO] * ranks != batches:
        fit = ", ".join(f"{one} with {batches // one}" for one in range(1, batches + 1) if batches % one == 0)
        found.append(f"ranks {earlier} -> {ranks}, so that a step has other examples (fitting {_MICRO}: {fit})")
    if found:
        longer = (
            "only a training with a constant schedule may get longer; " if changed and changed <= {*_LENGTH} else ""
        )
        if longer and best is not None:
            longer = f"the store has the best weights, from {best}, instead of the last step's weights; "
        elif longer and may_grow:
            longer = ""
        raise ConfigError(
            f"the store or the checkpoint holds another training, after step {kept['step']}: {'; '.join(found)}. No "
            f"step was trained: {longer}restore the earlier settings. To start again, pass another storage= or "
            'existing="replace", and no checkpoint='
        )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Returns names whose values differ. Ignores a name that one side lacks, unless that side has a dict instead."""
    found = {name for name in before.keys() & now.keys() if before[name] != now[name]}
    for one, other in ((before, now), (now, before)):
        # If a value was replaced by a dict, or a dict by a value, one side has "name" and the other side has
        # "name.key": return "name", too.
        parents = {name.rpartition(".")[0] for name in other.keys() - one.keys()}
        found |= parents & (one.keys() - other.keys())
    return found


def require_same_arguments(run: Mapping[str, Any], trainer: Any) -> None:
    """Rejects arguments that changed after `memascend.trainer.offload()`.

    `memascend.trainer.offload()` made the optimizer and the store from the earlier arguments.
    """
    now = arguments_of(trainer.args)
    changed = sorted(_changed(run["arguments"], now))
    if changed:
        found = "; ".join(f"{name} {run['arguments'][name]} -> {now[name]}" for name in changed)
        raise UsageError(
            "arguments were changed between memascend.trainer.offload() and train(), but memascend.trainer.offload() "
            f"made the optimizer and the store from the earlier arguments: {found}. Change arguments before "
            "memascend.trainer.offload()"
        )


def of_ranks(kept: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Converts a position to another number of ranks.

    Rescales the numbers of batches, and keeps rank 0's random states.
    """
    earlier = kept["run"]["ranks"]
    if earlier == ranks:
        return kept
    passed, group = kept["passed"] * earlier // ranks, -(-kept["group"] * earlier // ranks)
    ahead = kept["feed"]["fetched"] > kept["passed"] + kept["group"]
    # The newest batch of each rank now differs from the stored batch. "digest": None skips the comparison.
    feed = {**kept["feed"], "fetched": passed + group + ahead, "digest": None}
    moved = {**kept, "passed": passed, "group": group, "feed": feed}
    return moved | ({"accumulation": kept["accumulation"] * earlier // ranks} if "accumulation" in kept else {})
