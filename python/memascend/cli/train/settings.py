"""Reads the options of `memascend train` from flags and a file, and lists those that decide the result."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from memascend.errors import ConfigError
from memascend.text import expanded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memascend.plan.options import Options

SCHEDULES = ("linear", "cosine", "constant")
REPORTERS = ("tensorboard", "wandb")
# These decide the result, and stay as they were at the first start of a run; all others may change.
_OF_THE_RESULT = (
    "max_length", "packing", "batch", "accumulate", "optimizer", "lr", "min_lr", "betas", "eps", "weight_decay",
    "momentum", "schedule", "epochs", "max_steps", "warmup", "max_grad_norm", "state", "lora", "lora_alpha",
    "lora_dropout", "lora_targets", "seed",
)  # fmt: skip
# These decide the number of steps, and may change under a schedule that does not depend on it.
OF_THE_END = ("--epochs", "--max-steps")
_REQUIRED = ("model", "data", "output", "storage")
# A file of options is small.
_CONFIG_BYTES_MAX = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a run."""

    model: str
    data: tuple[str, ...]
    output: Path
    storage: tuple[str, ...]
    columns: str | None = None
    eval: tuple[str, ...] = ()
    previous: bool = False
    host_memory: str | None = None
    device: str | None = None
    device_memory: str | None = None
    activations: str = "device"
    max_length: int = 2048
    packing: bool = False
    batch: int = 1
    accumulate: int = 8
    optimizer: str = "adamw"
    lr: float = 1e-5
    min_lr: float = 0.0
    betas: str | None = None
    eps: float | None = None
    weight_decay: float = 0.0
    momentum: float | None = None
    schedule: str = "linear"
    epochs: float = 1.0
    max_steps: int | None = None
    warmup: float = 0.03
    max_grad_norm: float = 1.0
    state: str | None = None
    lora: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    lora_targets: str = "all-linear"
    merge: bool = False
    seed: int = 0
    save_every: int = 500
    eval_every: int | None = None
    keep: int = 0
    log: Path | None = None
    report: tuple[str, ...] = ()
    json: bool = False
    dry_run: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> Settings:
        """The options of the command line, completed by the file of --config.

        Raises:
            ConfigError: the file cannot be read, or names an unknown option.
            argparse.ArgumentError: a required option is missing.
        """
        given = vars(options)
        merged = {**_in_file(given.get("config")), **given}
        found = {field.name: merged[field.name] for field in fields(cls) if field.name in merged}
        missing = [_flag(name) for name in _REQUIRED if name not in found]
        if missing:
            raise argparse.ArgumentError(None, f"the following arguments are required: {', '.join(missing)}")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
        }
        return cls(**values)

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is out of range, or needs another option.
        """
        least = {"max_length": 2, "batch": 1, "accumulate": 1, "save_every": 1, "eval_every": 1, "max_steps": 1,
                 "keep": 0, "lora": 1}  # fmt: skip
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                what = "a rank of " if name == "lora" else ""
                raise ConfigError(f"{_flag(name)} must be {what}at least {smallest}, not {value}")
        for name in ("lr", "epochs", "lora_alpha"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{_flag(name)} must be a number above 0, not {value}")
        self._require_rates()
        self._require_together()
        self.pair_of_betas()
        # offload() checks its options before any data is read.
        self.offload_options()

    def _require_rates(self) -> None:
        if not (0 <= self.warmup < 1 or (self.warmup.is_integer() and self.warmup >= 1)):
            raise ConfigError(
                "--warmup must be a fraction of all steps, from 0 to less than 1, or a whole number of steps, not "
                f"{self.warmup}"
            )
        if not (math.isfinite(self.max_grad_norm) and self.max_grad_norm >= 0):
            raise ConfigError(
                f"--max-grad-norm must be a number above 0, or 0 for no clipping, not {self.max_grad_norm}"
            )
        if not 0 <= self.min_lr <= self.lr:
            raise ConfigError(f"--min-lr must be from 0 to --lr {self.lr:g}, not {self.min_lr:g}")
        if self.min_lr and self.schedule == "constant":
            raise ConfigError("--min-lr needs a schedule that falls, and --schedule constant does not: leave it out")
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"--lora-dropout must be from 0 to less than 1, not {self.lora_dropout}")

    def _require_together(self) -> None:
        for name in ("lora_alpha", "lora_dropout", "lora_targets", "merge"):
            if self.lora is None and getattr(self, name) != _DEFAULTS[name]:
                raise ConfigError(f"{_flag(name)} is an option of adapters: also give --lora RANK")
        if self.eval_every is not None and not self.eval:
            raise ConfigError("--eval-every needs examples to evaluate: also give --eval FILE")

    def pair_of_betas(self) -> tuple[float, float] | None:
        """The two numbers of --betas, or None if it was not given.

        Raises:
            ConfigError: --betas is not two numbers with a comma between them.
        """
        if self.betas is None:
            return None
        try:
            first, second = map(float, self.betas.split(","))
        except ValueError as error:
            raise ConfigError(
                f"--betas takes two numbers with a comma between them, as 0.9,0.95, not {self.betas}"
            ) from error
        return first, second

    def offload_options(self, ranks: int = 1) -> Options:
        """The options of `offload()` among these, which that class checks."""
        from memascend.plan.options import Options

        return Options(**self.offloaded(ranks))

    def offloaded(self, ranks: int = 1) -> dict[str, Any]:
        """The keywords of `offload()` that depend on the options alone, for one of `ranks` ranks."""
        return {
            # Ranks share a single folder, and divide a list among themselves.
            "storage": list(self.storage) if len(self.storage) > 1 else self.storage[0],
            "host_memory": self.host_memory,
            "device": self.device,
            "device_memory": self.device_memory,
            "activations": self.activations,
            "max_grad_norm": self.max_grad_norm or None,
            # `accumulate()` on one rank needs no accumulation steps.
            "accumulation_steps": 1 if ranks == 1 else self.accumulate // ranks,
            "state": self.state,
        }

    def of_the_result(self) -> dict[str, Any]:
        """The options that decide the result, by flag."""
        return {_flag(name): getattr(self, name) for name in _OF_THE_RESULT}

    def resolved(self) -> str:
        """All options, defaults included, as a file for --config."""
        lines = ["# The options of this run at its last start. `memascend train --config` reads this file."]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("model", "data", "eval", "storage", "output", "log") and value is not None:
                value = [_absolute(one) for one in value] if isinstance(value, tuple) else _absolute(str(value))
            if field.name not in ("previous", "dry_run") and value not in (None, [], ()):
                lines.append(f"{field.name.replace('_', '-')}: {json.dumps(value)}")
        return "\n".join(lines) + "\n"


_DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(Settings) if one.default is not MISSING}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _absolute(path: str) -> str:
    """The absolute path; a name on the hub stays."""
    from memascend.cli.train.rows import is_hub_name

    if is_hub_name(path):
        return path
    return os.path.abspath(path) + "/" * path.endswith("/")  # noqa: PTH100 - a link stays the link that was named


# --- the file of --config --------------------------------------------------------------------------------------------


class _FileParser(argparse.ArgumentParser):
    """Raises an error that names the file, instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--config {self.prog}: {message}")


def _in_file(path: Path | None) -> dict[str, Any]:
    """The options of a file by their names; relative paths are relative to the current folder."""
    if path is None:
        return {}
    values = _loaded(path)
    parser = _FileParser(prog=str(path), add_help=False, allow_abbrev=False)
    add_arguments(parser)
    known = {action.dest for action in parser._actions if action.dest != "config"}  # noqa: SLF001
    names = {str(key): str(key).lstrip("-").replace("-", "_") for key in values}
    for key, name in names.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
            raise ConfigError(f"--config {path}: memascend train has no option {key}{hint}")
    return vars(parser.parse_args([word for key, name in names.items() for word in _words(name, values[key])]))


def _loaded(path: Path) -> dict[Any, Any]:
    with path.open("rb") as file:
        data = file.read(_CONFIG_BYTES_MAX + 1)
    if len(data) > _CONFIG_BYTES_MAX:
        raise ConfigError(f"--config {path} has more than {_CONFIG_BYTES_MAX} bytes: this is not a file of options")
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("--config needs PyYAML, which is not installed: pip install 'memascend[train]'") from error
    try:
        values = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} has no options: write one in each line, as `lr: 1e-5`")
    return values


def _words(name: str, value: Any) -> Iterator[str]:
    """An option of the file as words of a command line."""
    if value is None or value is False:
        return
    flag = _flag(name)
    if value is True:
        yield flag
    elif name in ("data", "eval", "storage", "report"):
        for one in value if isinstance(value, list) else [value]:
            yield f"{flag}={expanded(str(one))}"
    elif isinstance(value, list):
        yield f"{flag}={','.join(map(str, value))}"
    elif isinstance(value, dict):
        yield f"{flag}={','.join(f'{key}={one}' for key, one in value.items())}"
    else:
        yield f"{flag}={expanded(str(value))}"


# --- the flags -------------------------------------------------------------------------------------------------------


class _Group:
    """An argument group whose help ends with the default of each option."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self._group = parser.add_argument_group(title)

    def add(self, name: str, metavar: str | None, text: str, kind: Any = None, **options: Any) -> None:
        default = _DEFAULTS.get(name.replace("-", "_"))
        if default is not None and default != ():
            text += f" ({default:g})" if isinstance(default, int | float) else f" ({default})"
        if "choices" not in options:
            options |= {"metavar": metavar, "type": kind}
        self._group.add_argument(f"--{name}", help=text, **options)

    def switch(self, name: str, text: str) -> None:
        self._group.add_argument(f"--{name}", action="store_true", help=text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. An option that is not given is missing in the namespace."""
    parser.argument_default = argparse.SUPPRESS
    _add_places(_Group(parser, "model, data, output"))
    _add_memory(_Group(parser, "memory"))
    _add_learning(_Group(parser, "training"))
    _add_adapters(_Group(parser, "adapters"))
    _add_reports(_Group(parser, "saving and logging"))


def _add_places(group: _Group) -> None:
    several = {"nargs": "+", "action": "extend"}
    examples = ".jsonl, .json, .csv, .tsv, .parquet or .txt files, patterns, folders, or a data set on the hub"
    storage = "a folder, file or NVMe device for the training state; repeat it to stripe it over several; {rank} is "
    group.add("config", "YAML", "a file of these options by their names; flags override it", Path)
    group.add("model", "FOLDER", "a folder with config.json, safetensors and tokenizer, or a name on the hub")
    group.add("data", "FILE", f"examples: {examples}", **several)
    group.add("columns", "OURS=THEIRS", "columns with other names: prompt=question,completion=answer")
    group.add("output", "OUT", "a folder for the trained model, which from_pretrained() loads", Path)
    group.add("storage", "PATH", f"{storage}filled in", action="append")
    group.add("eval", "FILE", "held-out examples, whose loss is computed at each save", **several)
    group.switch("previous", "resume from the commit before the last one, if the last one is damaged")


def _add_memory(group: _Group) -> None:
    smallest = "(default: the smallest that keeps disk and compute busy)"
    group.add("host-memory", "B", f'a hard budget, as "48GiB" {smallest}')
    group.add("device", "D", "cpu, cuda or cuda:1 (default: cuda if there is one)")
    group.add("device-memory", "B", f"a budget of the GPU's memory {smallest}")
    activations = "where checkpointed activations are stored until the backward"
    group.add("activations", None, activations, choices=("device", "host", "ssd"))
    group.add("state", None, "of the optimizer's moments (default: exact)", choices=("fp32", "bf16", "8bit"))


def _add_learning(group: _Group) -> None:
    group.add("max-length", "N", "tokens of an example; longer ones are cut", int)
    group.switch("packing", "several examples in one sequence of --max-length; attention stays within each")
    group.add("batch", "N", "examples, or packed sequences, of a micro-batch", int)
    group.add("accumulate", "N", "micro-batches of a step (gradient accumulation)", int)
    group.add("optimizer", "NAME", "muon, or a class of torch.optim, such as sgd or adafactor")
    group.add("lr", "X", "the learning rate after warmup", float)
    group.add("min-lr", "X", "the learning rate at the end of the schedule", float)
    group.add("betas", "X,X", "of the optimizer (default: its own)")
    group.add("eps", "X", "of the optimizer (default: its own)", float)
    group.add("momentum", "X", "of the optimizer (default: its own)", float)
    group.add("weight-decay", "X", "of matrices; biases and norms never decay", float)
    group.add("schedule", None, "of the learning rate after warmup", choices=SCHEDULES)
    group.add("epochs", "X", "passes over the data", float)
    group.add("max-steps", "N", "steps of the run; overrides --epochs", int)
    group.add("warmup", "X", "a fraction of all steps, or a number of steps", float)
    group.add("max-grad-norm", "X", "clip the global norm; 0: no clipping", float)
    group.add("seed", "N", "of the order of examples, dropout and adapters", int)


def _add_adapters(group: _Group) -> None:
    group.add("lora", "RANK", "train LoRA adapters of this rank instead of the model", int)
    group.add("lora-alpha", "X", "adapters are scaled by this, divided by the rank (twice the rank)", float)
    group.add("lora-dropout", "X", "dropout before the adapters", float)
    group.add("lora-targets", "NAMES", "linear layers, as q_proj,v_proj; all-linear: all but the LM head")
    group.switch("merge", "at the end, write the model with its adapters added to OUT/merged")


def _add_reports(group: _Group) -> None:
    kept = "keep the last N saved models in OUT/checkpoint-STEP and, with --eval, the best one in OUT/best"
    group.add("save-every", "N", "save the model every N steps", int)
    group.add("eval-every", "N", "compute the loss of --eval every N steps (default: at each save)", int)
    group.add("keep", "N", kept, int)
    group.add("log", "FILE", "write one JSON line for each step to it (OUT/log.jsonl)", Path)
    group.add("report", None, "also log to it", choices=REPORTERS, action="append")
    group.switch("json", "print one JSON line for each step")
    group.switch("dry-run", "check everything, print the plan, and change nothing")
