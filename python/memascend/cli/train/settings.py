"""Reads the options of `memascend train` from flags and a file, and says which of them change the result."""

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
# What a step is computed from. A run keeps these as it began; all others may change from one start to the next.
_OF_THE_RESULT = (
    "max_length", "packing", "batch", "accumulate", "optimizer", "lr", "min_lr", "betas", "eps", "weight_decay",
    "momentum", "schedule", "epochs", "max_steps", "warmup", "max_grad_norm", "state", "lora", "lora_alpha",
    "lora_dropout", "lora_targets", "seed",
)  # fmt: skip
# What decides how many steps there are; a schedule that does not depend on it lets it change.
OF_THE_END = ("--epochs", "--max-steps")
# What the other options are, where a change is told.
_OF_THE_MACHINE = (
    "host_memory", "device", "device_memory", "activations", "save_every", "eval_every", "keep", "merge",
)  # fmt: skip
_REQUIRED = ("model", "data", "output", "storage")
# A file of options is small.
_CONFIG_BYTES_MAX = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is asked to do."""

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
        """As the command line has them, and what it leaves out as the file of --config has it.

        Raises:
            ConfigError: the file cannot be read, or says what is no option.
            argparse.ArgumentError: an option is missing that every run needs.
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
        """Refuse values that mean nothing.

        Raises:
            ConfigError: one of them does.
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
        self.pair("betas")
        # Those of offload() are refused before any data is read.
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

    def pair(self, name: str) -> tuple[float, ...] | None:
        """Two numbers with a comma between them; None where the option was not given.

        Raises:
            ConfigError: it is something else.
        """
        text = getattr(self, name)
        if text is None:
            return None
        wrong = ConfigError(f"{_flag(name)} takes two numbers with a comma between them, as 0.9,0.95, not {text}")
        try:
            numbers = tuple(float(part) for part in text.split(","))
        except ValueError as error:
            raise wrong from error
        if len(numbers) != 2:
            raise wrong
        return numbers

    def offload_options(self, ranks: int = 1) -> Options:
        """What `offload()` is given of these, with its own checks."""
        from memascend.plan.options import Options

        return Options(**self.offloaded(ranks))

    def offloaded(self, ranks: int = 1) -> dict[str, Any]:
        """The keywords for `offload()` that do not depend on what is there already, on one of so many ranks."""
        return {
            # Ranks share a folder, and divide what is a list.
            "storage": list(self.storage) if len(self.storage) > 1 else self.storage[0],
            "host_memory": self.host_memory,
            "device": self.device,
            "device_memory": self.device_memory,
            "activations": self.activations,
            "max_grad_norm": self.max_grad_norm or None,
            # One rank's `accumulate()` needs none.
            "accumulation_steps": 1 if ranks == 1 else self.accumulate // ranks,
            "state": self.state,
        }

    def of_the_result(self) -> dict[str, Any]:
        """By their flags: those that a run keeps as it began."""
        return {_flag(name): getattr(self, name) for name in _OF_THE_RESULT}

    def of_the_machine(self) -> dict[str, Any]:
        """By their flags: those that may change from one start to the next, as JSON has them."""
        found = {_flag(name): getattr(self, name) for name in _OF_THE_MACHINE}
        found["--eval"] = " ".join(self.eval) or None
        return found

    def resolved(self) -> str:
        """All of them as a file for --config: what was given, and the defaults of what was not."""
        lines = ["# The options of this run at its last start. `memascend train --config` reads this file."]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("model", "data", "eval", "storage", "output", "log") and value is not None:
                value = [_absolute(one) for one in value] if isinstance(value, tuple) else _absolute(str(value))
            if field.name not in ("previous", "dry_run") and value not in (None, [], ()):
                lines.append(f"{field.name.replace('_', '-')}: {json.dumps(value)}")
        return "\n".join(lines) + "\n"


_DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(Settings) if one.default is not MISSING}


def with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Options by their flags, with the defaults of what an earlier version did not have, which it did."""
    return {**{_flag(name): value for name, value in _DEFAULTS.items()}, "--eval": None, **options}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _absolute(path: str) -> str:
    """A path that means the same from another folder; a name on the hub stays."""
    from memascend.cli.train.rows import is_hub_name

    if is_hub_name(path):
        return path
    return os.path.abspath(path) + "/" * path.endswith("/")  # noqa: PTH100 - a link stays the link that was named


# --- the file of --config --------------------------------------------------------------------------------------------


class _FileParser(argparse.ArgumentParser):
    """Says what is wrong with a file of options, where a command line would be shown its usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--config {self.prog}: {message}")


def _in_file(path: Path | None) -> dict[str, Any]:
    """What a file says, each under the name that its flag has; relative paths are those of the command."""
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
    """What a command line would have of one option."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; one that is not given is not in what they are read into."""
    parser.argument_default = argparse.SUPPRESS
    _add_places(parser.add_argument_group("model, data, output"))
    _add_memory(parser.add_argument_group("memory"))
    _add_learning(parser.add_argument_group("training"))
    _add_adapters(parser.add_argument_group("adapters"))
    _add_telling(parser.add_argument_group("saving and logging"))


def _add_places(group: Any) -> None:
    add = group.add_argument
    add("--config", metavar="YAML", type=Path, help="a file of these options by their names; flags override it")
    add("--model", metavar="FOLDER", help="a folder with config.json, safetensors and tokenizer, or a name on the hub")
    add(
        "--data",
        metavar="FILE",
        nargs="+",
        action="extend",
        help="examples: .jsonl, .json, .csv, .tsv, .parquet or .txt files, patterns, folders, or a data set on the hub",
    )
    add("--columns", metavar="OURS=THEIRS", help="columns with other names: prompt=question,completion=answer")
    add("--output", metavar="OUT", type=Path, help="a folder for the trained model, which from_pretrained() loads")
    add(
        "--storage",
        metavar="PATH",
        action="append",
        help="a folder, file or NVMe device for the training state; repeat it to stripe it over several; {rank} is "
        "filled in",
    )
    add(
        "--eval",
        metavar="FILE",
        nargs="+",
        action="extend",
        help="held-out examples, whose loss is computed at each save",
    )
    add("--previous", action="store_true",
        help="resume from the commit before the last one, if the last one is damaged")  # fmt: skip


def _add_memory(group: Any) -> None:
    add = group.add_argument
    add(
        "--host-memory",
        metavar="B",
        help='a hard budget, as "48GiB" (default: the smallest that keeps disk and compute busy)',
    )
    add("--device", metavar="D", help="cpu, cuda or cuda:1 (default: cuda if there is one)")
    add(
        "--device-memory",
        metavar="B",
        help="a budget of the GPU's memory (default: the smallest that keeps disk and compute busy)",
    )
    add(
        "--activations",
        choices=("device", "host", "ssd"),
        help="where checkpointed activations are stored until the backward (device)",
    )
    add("--state", choices=("fp32", "bf16", "8bit"), help="of the optimizer's moments (default: exact)")


def _add_learning(group: Any) -> None:
    def add(flag: str, metavar: str, kind: type, text: str) -> None:
        default = _DEFAULTS[flag[2:].replace("-", "_")]
        shown = "" if default is None else f" ({default:g})" if isinstance(default, int | float) else f" ({default})"
        group.add_argument(flag, metavar=metavar, type=kind, help=text + shown)

    add("--max-length", "N", int, "tokens of an example; longer ones are cut")
    group.add_argument(
        "--packing",
        action="store_true",
        help="several examples in one sequence of --max-length; attention stays within each",
    )
    add("--batch", "N", int, "examples, or packed sequences, of a micro-batch")
    add("--accumulate", "N", int, "micro-batches of a step (gradient accumulation)")
    add("--optimizer", "NAME", str, "muon, or a class of torch.optim, such as sgd or adafactor")
    add("--lr", "X", float, "the learning rate after warmup")
    add("--min-lr", "X", float, "the learning rate at the end of the schedule")
    add("--betas", "X,X", str, "of the optimizer (default: its own)")
    add("--eps", "X", float, "of the optimizer (default: its own)")
    add("--momentum", "X", float, "of the optimizer (default: its own)")
    add("--weight-decay", "X", float, "of matrices; biases and norms never decay")
    group.add_argument("--schedule", choices=SCHEDULES, help="of the learning rate after warmup (linear)")
    add("--epochs", "X", float, "passes over the data")
    add("--max-steps", "N", int, "steps of the run; overrides --epochs")
    add("--warmup", "X", float, "a fraction of all steps, or a number of steps")
    add("--max-grad-norm", "X", float, "clip the global norm; 0: no clipping")
    add("--seed", "N", int, "of the order of examples, dropout and adapters")


def _add_adapters(group: Any) -> None:
    add = group.add_argument
    add("--lora", metavar="RANK", type=int, help="train LoRA adapters of this rank instead of the model")
    add(
        "--lora-alpha",
        metavar="X",
        type=float,
        help="adapters are scaled by this, divided by the rank (twice the rank)",
    )
    add("--lora-dropout", metavar="X", type=float, help="dropout before the adapters (0)")
    add("--lora-targets", metavar="NAMES", help="linear layers, as q_proj,v_proj (all-linear: all but the LM head)")
    add("--merge", action="store_true", help="at the end, write the model with its adapters added to OUT/merged")


def _add_telling(group: Any) -> None:
    add = group.add_argument
    add("--save-every", metavar="N", type=int, help="save the model every N steps (500)")
    add("--eval-every", metavar="N", type=int, help="compute the loss of --eval every N steps (default: at each save)")
    add(
        "--keep",
        metavar="N",
        type=int,
        help="keep the last N saved models in OUT/checkpoint-STEP and, with --eval, the best one in OUT/best (0)",
    )
    add("--log", metavar="FILE", type=Path, help="write one JSON line for each step to it (OUT/log.jsonl)")
    add("--report", choices=REPORTERS, action="append", help="also log to it")
    add("--json", action="store_true", help="print one JSON line for each step")
    add("--dry-run", action="store_true", help="check everything, print the plan, and change nothing")  # fmt: skip
