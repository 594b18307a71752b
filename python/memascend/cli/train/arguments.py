"""Parses the options of `memascend train` from the command line and from a --config file.

Accepts the options of TRL and transformers, arguments of `memascend.trainer.offload()`, and a few further options.
"""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import os
import socket
from argparse import ArgumentError
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from memascend.errors import ConfigError
from memascend.text import expanded, how_to_install

if TYPE_CHECKING:
    from collections.abc import Sequence

# For each kind of training, the prefix of the names of TRL's classes.
KINDS = {"sft": "SFT", "dpo": "DPO", "reward": "Reward", "kto": "KTO"}
_MODEL = "model_name_or_path"
_ALIASES = {"model": _MODEL, "data": "dataset_name", "output": "output_dir"}
_LISTS = ("dataset_name", "eval", "storage")
# Defaults that replace defaults of TRL. TRL's defaults of "dtype" and "bf16" silently change results. TRL's default of
# "save_strategy" writes checkpoints with state that the store already has.
_DEFAULTS: dict[str, Any] = {"dtype": "auto", "bf16": False, "save_strategy": "no"}
# For each removed option of an earlier version, its replacement.
_SUCCESSORS = {
    "batch": "--per_device_train_batch_size",
    "accumulate": "--gradient_accumulation_steps",
    "optimizer": "--optim",
    "lr": "--learning_rate",
    "min_lr": "--lr_scheduler_type cosine_with_min_lr with --lr_scheduler_kwargs '{\"min_lr\": 1e-6}'",
    "betas": "--adam_beta1 and --adam_beta2",
    "eps": "--adam_epsilon",
    "momentum": "--optim_args momentum=0.9",
    "schedule": "--lr_scheduler_type",
    "epochs": "--num_train_epochs",
    "warmup": "--warmup_steps, where a number below 1 is a fraction of all steps",
    "lora": "--use_peft with --lora_r",
    "lora_targets": "--lora_target_modules",
    "merge": "merge_and_unload() of peft, on the adapters in --output",
    "save_every": "--save_steps",
    "eval_every": "--eval_steps",
    "keep": "--save_total_limit",
    "report": "--report_to",
    "log": "trainer_state.json in --output, which has every line of the log",
    "json": "trainer_state.json in --output, which has every line of the log",
    "previous": "--existing previous",
}

# Options that are also arguments of `memascend.trainer.offload()`. If the user does not give `host_memory`, `train()`
# chooses the budget. Any other option that the user does not give keeps the default of the argument.
OFFLOAD = (
    *("existing", "clipping", "host_memory", "device", "device_memory", "activations", "gradients", "state"),
    *("nonfinite", "rounding", "durability", "reduction", "scratch"),
)


class Command(NamedTuple):
    """The parsed options of a command line."""

    kind: str
    script: Any  # TRL's ScriptArguments
    training: Any  # TRL's SFTConfig, DPOConfig, ...
    model: Any  # TRL's ModelConfig
    mixture: Any  # TRL's DatasetMixtureConfig
    own: Any  # the options in `OFFLOAD`, and storage, eval, columns and dry_run
    # For "sft", True if --assistant_only_loss is not given. In conversations, the loss then covers only the assistant's
    # messages.
    finds_answers: bool
    finds_packing: bool  # for "sft", True if --packing is not given; examples of plain text are packed then


USAGE = f"memascend train [{'|'.join(KINDS)}] --model F --data F --output F --storage P [--config F.yaml] [option ...]"
# This text is a constant, so that --help needs neither TRL nor torch.
HELP = (
    "Accepts all options of TRL and transformers (`trl sft --help` lists them), and arguments of "
    f"memascend.trainer.offload(): --{', --'.join(OFFLOAD)}. Further options: --eval FILE, "
    "--columns OURS=THEIRS, --dry_run."
)


def parse(words: Sequence[str]) -> Command:
    """Parses the options of a command line.

    Raises:
        ArgumentError: an option is missing, unknown or wrong.
        ConfigError: a package is missing, the file in --config is not a YAML mapping, or `require_model()` rejects the
            model.
        OSError: the file in --config cannot be read.
    """
    kind, words = (words[0], words[1:]) if words and not words[0].startswith("-") else ("sft", words)
    if kind not in KINDS:
        raise ArgumentError(None, f"the kind of training must be one of {', '.join(KINDS)}, not {kind!r}")
    given = _by_name(words)
    lacking = next((name for name in ("datasets", "trl") if importlib.util.find_spec(name) is None), None)
    if lacking is not None:
        raise ConfigError(f"{lacking} is not installed: {how_to_install('train')}")
    if given.get("config") == []:
        raise ArgumentError(None, "--config expects a file")
    config = _in_file(given.pop("config")[-1]) if "config" in given else {}
    needed = ["model", "output", "storage", *([] if "datasets" in config else ["data"])]
    if missing := [f"--{name}" for name in needed if not {**config, **given}.get(_ALIASES.get(name, name))]:
        raise ArgumentError(None, f"the following arguments are required: {', '.join(missing)}")
    # Checks the model before the import of TRL, which takes seconds.
    revision = [*given.get("model_revision", ()), config.get("model_revision"), None][0]
    require_model(str([*given.get(_MODEL, ()), config.get(_MODEL)][0]), revision)
    import trl

    class Parser(trl.TrlParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ArgumentError(None, message)

    kinds = (trl.ScriptArguments, getattr(trl, f"{KINDS[kind]}Config"), trl.ModelConfig, trl.DatasetMixtureConfig)
    own: list[Any] = [(name, list[str], field(default_factory=list)) for name in ("storage", "eval")]
    own += [*((name, str | None, None) for name in (*OFFLOAD, "columns")), ("dry_run", bool, False)]
    parser = Parser((*kinds, make_dataclass("Own", own)), allow_abbrev=False, add_help=False)
    actions = {action.dest: action for action in parser._actions}  # noqa: SLF001
    # TRL's parser accepts only one name after --data, but a data set may have several files, so --data is parsed here.
    files = given.pop("dataset_name", None)
    if kind == "sft":
        config = {"assistant_only_loss": None, "packing": None, **config}
    saves = {"save_strategy": "steps"} if "save_steps" in {*given, *config} else {}
    unknown = parser.set_defaults_with_config(**{**_DEFAULTS, **saves, **config})
    words = [word for name, values in given.items() for word in (f"--{name}", *values)]
    namespace, others = parser.parse_known_args(words)
    if unknown := unknown + others:
        near = difflib.get_close_matches(unknown[0].lstrip("-"), actions, 1)
        hint = f"; did you mean --{near[0]}?" if near else ""
        raise ArgumentError(None, f"unrecognized arguments: {' '.join(unknown)}{hint}")
    values = vars(namespace) | ({"dataset_name": files} if files else {})
    values["use_cpu"] |= values["device"] == "cpu"
    if values["eval"] and values["eval_strategy"] == "no":
        values["eval_strategy"] = "epoch" if values["eval_steps"] is None else "steps"
    finds = [values.get(name, False) is None for name in ("assistant_only_loss", "packing")]
    values |= {name: bool(values.get(name)) for name in ("assistant_only_loss", "packing")}
    try:
        return Command(kind, *parser.parse_dict(values, allow_extra_keys=True), *finds)
    except (ValueError, TypeError, ImportError) as error:
        raise ArgumentError(None, " ".join(str(error).split())) from error


def _name(word: str) -> str:
    """Returns the name of an option, with aliases resolved. Raises ArgumentError if the option no longer exists."""
    name = word.lstrip("-").replace("-", "_")
    if name in _SUCCESSORS:
        raise ArgumentError(None, f"{word} no longer exists: use {_SUCCESSORS[name]}")
    return _ALIASES.get(name, name)


def _by_name(words: Sequence[str]) -> dict[str, list[str]]:
    """Returns the values of each option, by the option's name.

    If an option is repeated, only the last values count. For an option in `_LISTS`, all values count.
    """
    found: dict[str, list[str]] = {"": []}
    name = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            name = _name(flag)
            found[name] = [*(found.get(name, ()) if name in _LISTS else ()), *([value] if equals else ())]
        else:
            found[name].append(word)
    if unknown := found.pop(""):
        raise ArgumentError(None, f"unrecognized arguments: {' '.join(unknown)}")
    return found


def _in_file(path: str) -> dict[str, Any]:
    """Returns the options in a YAML file by name. Relative paths in the file are relative to the current folder."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_bytes())
        found = {_name(str(key)): value for key, value in values.items() if value is not None}
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
        raise ConfigError(
            f"--config {path} must be a YAML file with lines such as `max_steps: 100`: {' '.join(str(error).split())}"
        ) from error
    for name in found.keys() & {*_LISTS}:
        found[name] = [expanded(str(one)) for one in (found[name] if isinstance(found[name], list) else [found[name]])]
    return found


# An error suggests a folder only if the folder has at least this similarity to the user's wrong path. `_VERY_NEAR` is
# used if the path may be the name of a model on the hub.
_NEAR, _VERY_NEAR = 0.7, 0.9
_CONFIG = "config.json"
_CONFIGS = (_CONFIG, "adapter_config.json")
# At most this number of folders is compared with a wrong path.
_FOLDERS_MAX = 1000


def require_model(name: str, revision: str | None = None) -> None:
    """Checks quickly that `name` is a folder with a model, or may be the name of a model on the hub.

    Raises:
        ConfigError: `name` is a file, a folder without a model, or a path that does not exist. Or `name` is not in the
            hub's cache, and resembles the path of a model's folder. Or `name` is not in the hub's cache, no proxy is
            set, and the hub's host name has no address.
    """
    path = Path(name)
    if path.is_dir():
        if not any((path / file).is_file() for file in _CONFIGS):
            raise ConfigError(f"--model {name} has no {_CONFIG}: give the folder of a transformers model")
        return
    if path.exists():
        raise ConfigError(f"--model {name} is a file: give the folder that contains the model")
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    is_path = name.startswith((".", "/"))
    try:
        found = () if is_path else (try_to_load_from_cache(name, file, revision=revision) for file in _CONFIGS)
        if any(isinstance(one, str) for one in found):
            return
    except HFValidationError:
        is_path = True
    near = difflib.get_close_matches(name, _model_folders(path), 1, _NEAR if is_path else _VERY_NEAR)
    if near or is_path:
        hint = f": did you mean {near[0]}?" if near else ": give the folder of a transformers model"
        hub = "" if is_path else f" (to use the hub's model {name}, first run `hf download {name}`)"
        raise ConfigError(f"--model {name} does not exist{hint}{hub}")
    if any(key.lower().endswith("_proxy") for key in os.environ):
        # Behind a proxy, the machine may be unable to resolve the hub's host name, so the hub is not checked.
        return
    host = constants.ENDPOINT.partition("://")[2].partition("/")[0].partition(":")[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ConfigError(
            f"--model {name} is not a folder and not in the cache of the hub, and {host} cannot be reached ({error}): "
            "correct the name, or connect to the network"
        ) from error


def _model_folders(path: Path) -> list[str]:
    """Returns the folders of models that are one or two levels below the parent folder of a wrong path.

    If the parent folder does not exist, searches the folder above the parent folder instead. Returns at most
    `_FOLDERS_MAX` folders.
    """
    above = path.parent if path.parent.is_dir() else path.parent.parent
    if not above.is_dir():
        return []
    found = itertools.chain(above.glob(f"*/{_CONFIG}"), above.glob(f"*/*/{_CONFIG}"))
    return [str(file.parent) for file in itertools.islice(found, _FOLDERS_MAX)]
