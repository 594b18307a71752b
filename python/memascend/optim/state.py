"""Finds what state an optimizer keeps for a parameter, and in which format the engine stores it."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from memascend.errors import ConfigError
from memascend.optim.comparison import PLAIN, Manner
from memascend.optim.shared import TensorParts, arithmetic_dtype, named, parts_of, same, stand_in, user_attributes
from memascend.optim.trial import elementwise, known, stepping, uncompiled, undrawn
from memascend.params.offloaded_param import dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


_log = logging.getLogger("memascend")
# Steps without memory, or on little: state that first appears after some, or grows, is seen.
_STEPS = 7
# Steps on memory of the true size, which may be large.
_TRUE_STEPS = 2
# Dimensions of the small tensors that stand for large ones: unlike, so that each can be told in a state's shape.
_SMALL_DIMS = (3, 5, 7, 11, 13, 17, 19, 23)


class StateTrials:
    """What an optimizer keeps for parameters of each kind, each tried once."""

    def __init__(self, optimizer: torch.optim.Optimizer, manner: Manner = PLAIN) -> None:
        self._optimizer = optimizer
        self.manner = manner
        self._found: dict[tuple[int, torch.Size, torch.dtype], dict[str, Any]] = {}

    def state(self, group: int, shape: torch.Size, dtype: torch.dtype, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter of that shape, in the group of that number, whose update computes in `dtype`.

        Raises:
            ConfigError: its step failed, or keeps what cannot be streamed.
        """
        trial = _Trial(self._optimizer, group, dtype, attributes, self.manner)
        if attributes:
            # Of one parameter alone.
            return trial.state(shape)
        kind = group, shape, dtype
        if kind not in self._found:
            self._found[kind] = trial.state(shape)
        return self._found[kind]


class _Way(NamedTuple):
    """One way to try a step: on a parameter of what size, and where."""

    size: torch.Size
    device: str = "cpu"
    sparse: bool = False
    steps: int = _STEPS
    fill: float = 1.0


@dataclass(frozen=True)
class _Trial:
    """Of one kind of parameter."""

    optimizer: torch.optim.Optimizer
    group: int
    dtype: torch.dtype
    attributes: Mapping[str, Any]
    manner: Manner

    def state(self, shape: torch.Size) -> dict[str, Any]:
        """The state after a trial; its tensors have the shapes that they have for a parameter of `shape`."""
        small = torch.Size(1 if dim == 1 else unlike for dim, unlike in zip(shape, _SMALL_DIMS, strict=False))
        ways = [_Way(small), _Way(small, sparse=True)]
        if not known(self.optimizer):
            # What it keeps may depend on the size: first of a parameter that takes no memory, then of one that does.
            ways = [_Way(shape, "meta"), _Way(shape, steps=_TRUE_STEPS), ways[1]]
            self._refuse_kinds_by_value(small)
        failed: Exception | None = None
        for way in ways:
            if len(way.size) != len(shape) or (way.sparse and not shape):
                continue
            try:
                state = self._after(way)
                # Where there are values it may keep something else.
                if way.device == "meta" and not _alike(state, self._after(_Way(small))):
                    continue
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - the next kind of tensor may do
                failed = failed or error
                continue
            return {name: _scaled(self.optimizer, name, value, way.size, shape) for name, value in state.items()}
        raise ConfigError(
            f"what {named(self.optimizer)} keeps for a parameter of shape {list(shape)} could not be found out: its "
            f"step failed ({type(failed).__name__}: {failed})"
        ) from failed

    def _refuse_kinds_by_value(self, small: torch.Size) -> None:
        """Refuse state whose kinds depend on what the parameter holds: the store is made before that is known."""
        try:
            one, other = self._after(_Way(small)), self._after(_Way(small, fill=0.0))
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - it may need another kind of tensor, which is tried next
            return
        differs = next((name for name in one if _kind(one[name]) != _kind(other.get(name))), None)
        if differs is not None:
            raise ConfigError(
                f"{named(self.optimizer)} keeps {differs!r} as another kind of value where the parameter is zero; "
                "only one kind of state can be streamed"
            )

    def _after(self, way: _Way) -> dict[str, Any]:
        """The state after some steps."""
        values = torch.full(way.size, way.fill, dtype=self.dtype, device=way.device)
        ones = torch.ones_like(values)
        gradients = (_sparse(ones) if way.sparse else ones.clone() for _ in range(way.steps))
        # Neither has kernels for tensors without bytes. Of torch's own classes what they keep is the same.
        plain = known(self.optimizer) or way.device == "meta"
        off = {"foreach": False, "fused": False} if plain else {}
        parameter = stand_in(values, self.attributes)
        states = stepping(self.optimizer, self.group, parameter, gradients, off, self.manner)
        with undrawn(self.optimizer, meta=way.device == "meta"), warnings.catch_warnings(), uncompiled():
            warnings.simplefilter("ignore")
            return _steady(self.optimizer, states)


def _alike(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states of parameters of other sizes are of the same kinds; never of subclasses of tensors."""
    if any(parts_of(value) is not None for value in state.values()):
        # What they know of themselves may be the device.
        return False
    return {name: _kind(value) for name, value in state.items()} == {name: _kind(of) for name, of in other.items()}


def _kind(value: Any) -> Any:
    """What a value is, whatever its size."""
    return (type(value), value.dtype, value.dim()) if isinstance(value, torch.Tensor) else type(value)


def _sparse(values: torch.Tensor) -> torch.Tensor:
    # No check of its invariants: the check warns that it was not asked for.
    indices = torch.zeros((1, 1), dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, torch.ones_like(values[:1]), values.shape, check_invariants=False)


def _steady(optimizer: torch.optim.Optimizer, states: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The state, which has the same names and shapes after each step."""
    first = next(states)
    if known(optimizer):
        return first
    shapes = _shapes(first)
    for number, later in enumerate(states, 2):
        if not same(shapes, _shapes(later)):
            raise ConfigError(
                f"{named(optimizer)} keeps other state after step {number} than after its first; only state that is "
                "there from the first step on can be streamed"
            )
    return first


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [value.shape, value.dtype] if isinstance(value, torch.Tensor) else type(value)
        for name, value in state.items()
    }


def _scaled(optimizer: torch.optim.Optimizer, name: str, value: Any, size: Sequence[int], shape: torch.Size) -> Any:
    """What stands for a tensor of a small parameter's state in that of a parameter of `shape`."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or tuple(size) == tuple(shape):
        return value
    dims = {1: 1, torch.Size(size).numel(): shape.numel(), **dict(zip(size, shape, strict=True))}
    if parts_of(value) is not None or any(dim not in dims for dim in value.shape):
        raise ConfigError(
            f"the shape of {name!r}, which {named(optimizer)} keeps, does not follow from that of the parameter"
        )
    return torch.empty([dims[dim] for dim in value.shape], dtype=value.dtype, device="meta")


# Python's numbers in a state, and how the store holds each.
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_MASTER = "master"


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """What an optimizer keeps for one parameter."""

    # Its state by torch's names, on "meta", what has the parameter's shape laid out as that is; scalars are 0-dim, and
    # "master" is ours.
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, type]  # the names among them that are Python's numbers in torch's state, and of which type
    # Names in torch's state that are tensors of a subclass: `tensors` has the parts that they are made of.
    parted: dict[str, TensorParts]
    shape: torch.Size  # the parameter's
    stride: tuple[int, ...]  # the parameter's, in elements, as its bytes are laid out
    dtype: torch.dtype  # what the update computes in: the master's where there is one
    master: bool  # whether it has a master, which the values are rounded from
    whole: bool  # whether an update needs all of the parameter at once
    attributes: Mapping[str, Any] = field(default_factory=dict)  # what users wrote on the parameter
    manner: Manner = PLAIN  # in which the optimizer is run for one parameter

    @property
    def names(self) -> list[str]:
        """The names in torch's state."""
        parts = {part for name, parted in self.parted.items() for part in parted.names(name)}
        return [*(name for name in self.tensors if name != _MASTER and name not in parts), *self.parted]

    def state_from(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The state as torch has it, on the memory of these tensors: numbers, and subclasses put together."""
        state: dict[str, Any] = {}
        for name in self.names:
            if name in self.parted:
                # What is quantised in blocks counts row by row, whatever the parameter's strides.
                plain = {part: tensors[part].contiguous() for part in self.parted[name].names(name)}
                state[name] = self.parted[name].together(name, plain)
            else:
                state[name] = self.numbers[name](tensors[name].item()) if name in self.numbers else tensors[name]
        return state

    @property
    def whole_bytes(self) -> int:
        """Bytes in memory at once while a whole parameter is updated, beside what the optimizer makes itself."""
        # Where there is a master, the gradient in its type.
        return self.stored_bytes + (self.shape.numel() * self.dtype.itemsize if self.master else 0)

    @property
    def stored_bytes(self) -> int:
        """Of these, what is read or written: values, state, and the gradient as it came."""
        values = self.shape.numel() * (2 if self.master else self.dtype.itemsize)
        return sum(tensor.nbytes for tensor in self.tensors.values()) + 2 * values


def describe(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    master_dtype: torch.dtype | None = torch.float32,
    trials: StateTrials | None = None,
) -> StateLayout:
    """What `optimizer` keeps for `parameter`, which may be on "meta"; nothing is done to either.

    State that it has already and would not make now (Adam's maximum after amsgrad was switched off) is kept too, as
    torch keeps it.

    Args:
        optimizer: any whose state is per parameter.
        parameter: one of its parameters.
        master_dtype: of the master of 16-bit parameters, in which their update computes; None: they have none.
        trials: of this optimizer, where several of its parameters are described.

    Raises:
        ConfigError: it keeps what cannot be streamed, or could not be tried.
    """
    group = next(
        (
            number
            for number, group in enumerate(optimizer.param_groups)
            if any(parameter is member for member in group["params"])
        ),
        None,
    )
    if group is None:
        raise ConfigError("the optimizer does not own this parameter")
    dtype = arithmetic_dtype(parameter.dtype, master_dtype)
    master = dtype != parameter.dtype
    # Where elements are repeated or left out there is no such layout, and this is the next best.
    stride = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()
    found = _Found(optimizer, parameter, dtype, stride)
    if master:
        found.tensors[_MASTER] = torch.empty_strided(parameter.shape, stride, dtype=dtype, device="meta")
    attributes = user_attributes(parameter)
    trials = trials or StateTrials(optimizer)
    tried = trials.state(group, parameter.shape, dtype, attributes)
    existing = optimizer.state.get(parameter, {})
    if existing and trials.manner.stacks and not same(_shapes(tried), _shapes(existing)):
        raise ConfigError(
            f"{named(optimizer)} has state of several parameters as one stack, which is not taken apart: start without "
            "its state"
        )
    for name, value in {**tried, **existing}.items():
        # Of a subclass, what a step makes of it: its own may be of the parameter's type.
        found.add(name, tried[name] if parts_of(value) is not None and name in tried else value)
    return StateLayout(
        tensors=found.tensors,
        numbers=found.numbers,
        parted=found.parted,
        shape=parameter.shape,
        stride=stride,
        dtype=dtype,
        master=master,
        # The scalars of a 0-dim parameter would pass for parts of it.
        whole=not elementwise(optimizer) or parameter.dim() == 0,
        attributes={} if known(optimizer) else attributes,
        manner=trials.manner,
    )


class _Found:
    """The state of one parameter, as it is found."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, dtype: torch.dtype, stride: tuple[int, ...]
    ) -> None:
        self._optimizer = optimizer
        self._parameter = parameter
        self._dtype = dtype
        self._stride = stride
        self.tensors: dict[str, torch.Tensor] = {}
        self.numbers: dict[str, type] = {}
        self.parted: dict[str, TensorParts] = {}

    def add(self, name: Any, value: Any) -> None:
        """Take a value of the state, under its name there."""
        if value is None:
            return
        if not isinstance(name, str) or name == _MASTER or name in self.tensors:
            raise ConfigError(f"{named(self._optimizer)} keeps state under {name!r}, a name that cannot be stored")
        parts = parts_of(value)
        if type(value) in _NUMBERS:
            self.numbers[name] = type(value)
            self.tensors[name] = torch.empty((), dtype=_NUMBERS[type(value)], device="meta")
        elif parts is not None:
            self.parted[name] = parts
            for part, tensor in parts.apart(name, value).items():
                self._add_tensor(part, tensor, tensor.dtype)
        else:
            dtype = getattr(value, "dtype", None)
            self._add_tensor(name, value, self._dtype if dtype == self._parameter.dtype else dtype)

    def _add_tensor(self, name: str, value: Any, dtype: Any) -> None:
        plain = type(value) in {torch.Tensor, torch.nn.Parameter}
        if not plain or value.layout != torch.strided or name in self.tensors:
            kind = f"a {type(value).__qualname__}" if not plain else "a sparse tensor"
            raise ConfigError(
                f"{named(self._optimizer)} keeps {kind} as {name!r}; only dense tensors and numbers are streamed: "
                "docs/optimizers.md lists optimizers that are"
            )
        made = torch.empty(value.shape, dtype=dtype, device="meta")
        # State of the parameter's shape lies as the parameter does.
        own = made.shape == self._parameter.shape
        self.tensors[name] = made.as_strided(made.shape, self._stride) if own else made


def in_order(tensor: torch.Tensor, layout: StateLayout) -> torch.Tensor:
    """The tensor, laid out as the parameter is where it has the parameter's shape, else row by row."""
    if tensor.shape != layout.shape:
        return tensor.contiguous()
    if tensor.stride() == layout.stride:
        return tensor
    return torch.empty_strided(layout.shape, layout.stride, dtype=tensor.dtype).copy_(tensor)


# Parameters of fewer elements keep 32 bits, unless its user said otherwise.
MIN_8BIT_SIZE = 4096
_CLASSES = frozenset(
    (f"bitsandbytes.optim.{name.lower()}", f"{paged}{name}{bits}")
    for name in ("Adam", "AdamW")
    for paged in ("", "Paged")
    for bits in ("", "8bit")
)
# What may be said of one parameter alone.
_OVERRIDDEN = frozenset({"optim_bits", "min_8bit_size"})
_NAMES = {"state1": "exp_avg", "state2": "exp_avg_sq", "absmax1": "exp_avg_absmax", "absmax2": "exp_avg_sq_absmax"}


def is_8bit_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is Adam8bit or AdamW8bit of bitsandbytes, by the exact type, with the options that we compute."""
    kind = type(optimizer)
    if (kind.__module__, kind.__qualname__) not in _CLASSES:
        return False
    arguments = getattr(optimizer, "args", None)
    wanted = {"optim_bits": 8, "max_unorm": 0.0, "skip_zeros": False}
    return all(getattr(arguments, name, None) == value for name, value in wanted.items())


def has_8_bits(optimizer: Any, group: int, place: int) -> bool:
    """Whether its parameter number `place` of that group keeps 8 bits: as its state is, or would be made.

    Raises:
        ConfigError: bitsandbytes' GlobalOptimManager has other options for this parameter alone.
    """
    parameter = optimizer.param_groups[group]["params"][place]
    state = optimizer.state.get(parameter) or {}
    said = _overridden(optimizer, parameter, (group, place))
    others = sorted(said.keys() - _OVERRIDDEN)
    if others:
        raise ConfigError(
            f"bitsandbytes' GlobalOptimManager has {others[0]!r} for one parameter alone; give that parameter a group "
            "of the optimizer with these options instead"
        )
    if "state1" in state:
        return bool(state["state1"].dtype == torch.uint8)
    if said.get("optim_bits", 8) == 32:
        return False
    smallest = said.get("min_8bit_size", getattr(optimizer.args, "min_8bit_size", MIN_8BIT_SIZE))
    return bool(parameter.numel() >= smallest)


def _overridden(optimizer: Any, parameter: torch.Tensor, index: tuple[int, int]) -> Mapping[str, Any]:
    """What its manager of overrides says of one parameter."""
    manager = optimizer.mng
    said: dict[str, Any] = {**manager.index2config.get(index, {}), **manager.pid2config.get(id(parameter), {})}
    # Those of modules are looked up in its first step only.
    for module, name, config in manager.module_weight_config_triple:
        if getattr(module, name, None) is parameter:
            said.update(config)
    return said


def state_of(optimizer: Any, parameter: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
    """The state that it keeps for a parameter, by our names, and how many updates made it.

    Codes come with the largest of each block; state of 32 bits is float32.

    Raises:
        ConfigError: blocks of the parameter are not what lies together in it.
    """
    state = optimizer.state.get(parameter) or {}
    if "state1" not in state:
        return {}, 0
    found = {}
    for theirs, ours in _NAMES.items():
        if theirs not in state:
            continue
        tensor = state[theirs].detach().cpu()
        if tensor.dtype == torch.uint8 and not parameter.is_contiguous():
            raise ConfigError(
                f"a parameter of shape {list(parameter.shape)} is not row-major, and bitsandbytes' blocks of its state "
                "are: make the parameter contiguous, or start without the state"
            )
        if tensor.shape == parameter.shape:
            tensor = torch.empty_strided(parameter.shape, dense_strides(parameter), dtype=tensor.dtype).copy_(tensor)
        found[ours] = tensor
    return found, int(state["step"])


_16_BITS = frozenset({torch.bfloat16, torch.float16})


def rule_of(optimizer: torch.optim.Optimizer) -> Literal["adam", "momentum"] | None:
    """By which of the engine's rules it can be updated; None where it runs its own code."""
    if type(optimizer) in {torch.optim.AdamW, torch.optim.Adam} or is_8bit_adam(optimizer):
        return "adam"
    if type(optimizer) is torch.optim.SGD and all(group["momentum"] for group in optimizer.param_groups):
        return "momentum"
    return None


def keeps_momentum_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it runs its own code on a momentum that may be kept in bfloat16."""
    return type(optimizer) is torch.optim.Muon


def compact_format(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, layout: StateLayout) -> str | None:
    """The engine's format of a parameter that its optimizer's own code updates whole, with a master and a momentum.

    The same bits in fewer bytes: the values are the upper halves of their master. None where it keeps anything else.
    """
    if elementwise(optimizer) or not layout.whole or not layout.master or parameter.dtype != torch.bfloat16:
        return None
    if layout.numbers or layout.parted or layout.tensors.keys() != {_MASTER, "momentum_buffer"}:
        return None
    same_shape = all(
        tensor.dtype == torch.float32 and tensor.shape == layout.shape and tensor.stride() == layout.stride
        for tensor in layout.tensors.values()
    )
    return "compact fp32" if same_shape and layout.shape.numel() else None


def momentum_options(group: Mapping[str, Any]) -> dict[str, Any] | None:
    """The numbers of `engine.Momentum` for a group of SGD; None where it keeps no momentum now."""
    if not group["momentum"]:
        return None
    return {
        "lr": float(group["lr"]),
        "momentum": float(group["momentum"]),
        "dampening": float(group["dampening"]),
        "nesterov": bool(group["nesterov"]),
        "weight_decay": float(group["weight_decay"]),
        "maximize": bool(group["maximize"]),
    }


def options_of_formats(formats: Iterable[str | None]) -> str:
    """The options of `offload()` that make entries of these formats of the engine, as they are written."""
    words = {word for given in formats for word in (given or "").split()}
    state = next((f"state={width!r}" for width in ("bf16", "8bit") if width in words), "state=None")
    return f"{state}, master_dtype=None, rounding='stochastic'" if "stochastic" in words else state


@dataclass(frozen=True, kw_only=True)
class StateFormats:
    """What the options of `offload()` say of formats."""

    # In how many bits moments are kept; None: as the optimizer has them.
    state: Literal["fp32", "bf16", "8bit"] | None = None
    stochastic: bool = False  # 16-bit parameters have no masters, and are rounded stochastically
    seed: int = 0  # of what is rounded stochastically
    whole: frozenset[int] = frozenset()  # the ids of parameters that keep 32 bits where others have 8: embeddings
    # By the ids of parameters that are rows of others, how many those have in all.
    elements: Mapping[int, int] = field(default_factory=dict)

    def of(self, optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None) -> dict[int, str]:
        """The engine's format of each parameter, by its id, where the choice is ours; others are as without formats.

        Raises:
            ConfigError: optimizer, options, or a parameter do not go with it.
        """
        taken = is_8bit_adam(optimizer)
        if taken and self.elements:
            raise ConfigError(
                f"{named(optimizer)} of bitsandbytes decides by whole parameters which have 8 bits, and ranks have "
                "rows of them: give a torch.optim.AdamW, with state='8bit'"
            )
        if taken and self.state is None and not self.stochastic and master_dtype is None:
            # As bitsandbytes has it in RAM: its own code.
            return {}
        if not taken and self.state in (None, "fp32") and not self.stochastic:
            self._require_fp32(optimizer, master_dtype)
            return {}
        if not self._narrows_momentum(optimizer):
            self._require_rule(optimizer, taken=taken)
        found = {}
        for number, group in enumerate(optimizer.param_groups):
            if group.get("amsgrad"):
                raise ConfigError(
                    f"amsgrad keeps a third moment, which has no format of {self._asked}: set amsgrad=False, or leave "
                    f"{self._asked} out"
                )
            for place, parameter in enumerate(group["params"]):
                if not parameter.is_floating_point():
                    continue
                width = ("8bit" if has_8_bits(optimizer, number, place) else "") if taken else self._width(parameter)
                found[id(parameter)] = self._format(parameter, width, master_dtype)
        if self.stochastic and not any(given.startswith("stochastic") for given in found.values()):
            raise ConfigError(
                "rounding='stochastic' is for parameters of bfloat16 and float16, and the optimizer has none: leave it "
                "out"
            )
        return found

    def of_each(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[StateFormats]:
        """What they are for each of several optimizers: those that have no such format keep their state as it is."""
        capable = [rule_of(one) is not None or self._narrows_momentum(one) for one in optimizers]
        asked = self.stochastic or self.state is not None
        if not asked or len(optimizers) == 1 or not any(capable):
            return [self] * len(optimizers)
        others = [named(optimizer) for optimizer, can in zip(optimizers, capable, strict=True) if not can]
        if others and (self.stochastic or self.state != "fp32"):
            _log.warning("%s does not apply to %s, whose state stays as it keeps it", self._asked, " and ".join(others))
        narrow = [
            any(one.dtype in _16_BITS for group in optimizer.param_groups for one in group["params"])
            for optimizer in optimizers
        ]
        if not any(has and can for has, can in zip(narrow, capable, strict=True)):
            # The first says so.
            narrow = [True] * len(optimizers)
        return [
            replace(self, state=self.state if can else None, stochastic=self.stochastic and can and has)
            for can, has in zip(capable, narrow, strict=True)
        ]

    @property
    def _asked(self) -> str:
        if self.stochastic and self.state in (None, "fp32"):
            return "rounding='stochastic'"
        return f"state={self.state or '8bit'!r}"

    def _narrows_momentum(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its own code runs on a momentum in bfloat16."""
        return self.state == "bf16" and not self.stochastic and keeps_momentum_alone(optimizer)

    def _require_fp32(self, optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None) -> None:
        """state="fp32" is what is there without it, or refused."""
        if self.state is None:
            return
        if rule_of(optimizer) is None:
            self._require_rule(optimizer, taken=False)
        if master_dtype is None and any(
            parameter.dtype in _16_BITS for group in optimizer.param_groups for parameter in group["params"]
        ):
            raise ConfigError(
                "state='fp32' with master_dtype=None: 16-bit parameters without fp32 master weights have 16-bit "
                "moments in "
                "torch; pass rounding='stochastic' for moments of 32, or leave master_dtype out"
            )

    def _require_rule(self, optimizer: torch.optim.Optimizer, *, taken: bool) -> None:
        if taken and self.state not in (None, "8bit"):
            raise ConfigError(
                f"{named(optimizer)} of bitsandbytes keeps 8 bits, not {self.state!r}: leave state= out, or give a "
                "torch.optim.AdamW"
            )
        if rule_of(optimizer) is None:
            asked = "rounding='stochastic'" if self.state is None else f"state={self.state!r}"
            what = "SGD without momentum" if type(optimizer) is torch.optim.SGD else named(optimizer)
            raise ConfigError(
                f"{asked} is for torch's Adam, AdamW and SGD with momentum, and for bitsandbytes' Adam8bit and "
                f"AdamW8bit; the optimizer is {what}: leave it out"
            )

    def _width(self, parameter: torch.Tensor) -> str:
        if self.state in (None, "fp32"):
            return ""
        elements = self.elements.get(id(parameter), parameter.numel())
        small = elements < MIN_8BIT_SIZE or id(parameter) in self.whole
        return "" if self.state == "8bit" and small else str(self.state)

    def _format(self, parameter: torch.Tensor, width: str, master_dtype: torch.dtype | None) -> str:
        dtype = parameter.dtype
        if dtype not in _16_BITS | {torch.float32}:
            raise ConfigError(
                f"a parameter is {dtype}, and {self._asked} is for float32, bfloat16 and float16: freeze it, or leave "
                f"{self._asked} out"
            )
        if dtype == torch.float32:
            return width
        if self.stochastic:
            return f"stochastic {width}".strip()
        if master_dtype is None:
            raise ConfigError(
                f"{self._asked} with master_dtype=None: 16-bit parameters without fp32 master weights are updated with "
                "rounding='stochastic' alone; pass that, or leave master_dtype out"
            )
        # The master of bfloat16 is the value and the bits after it.
        return f"compact {width}" if width and dtype == torch.bfloat16 else width
