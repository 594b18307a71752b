"""Finds the state that an optimizer keeps for a parameter, and the format in which the engine stores it."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from memascend.errors import ConfigError
from memascend.optim.comparison import PLAIN, RunMode, copy_of_one, on_trial
from memascend.optim.shared import (
    SharedValues,
    TensorParts,
    arithmetic_dtype,
    give_gradient,
    named,
    parts_of,
    plain_parameter,
    run,
    same,
    user_attributes,
)
from memascend.optim.trial import elementwise, known
from memascend.storage import MIN_8BIT_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


_log = logging.getLogger("memascend")
# The number of steps of a trial on meta or on small tensors: enough to find state that appears or grows in a later
# step.
_STEPS = 7
# The number of steps of a trial with a parameter of true size, which may be large.
_TRUE_STEPS = 2
# The sizes of a small trial parameter's dimensions. All sizes differ, so that each size in the shape of a state tensor
# identifies a dimension of the parameter.
_SMALL_DIMS = (3, 5, 7, 11, 13, 17, 19, 23)


class _Way(NamedTuple):
    """One way to try a step: the shape, device and values of the parameter, and the kind of its gradients."""

    size: torch.Size
    device: str = "cpu"
    sparse: bool = False
    steps: int = _STEPS
    fill: float = 1.0


@dataclass(eq=False)
class StateTrials:
    """Finds the state that an optimizer keeps for each kind of parameter, by one trial per kind."""

    _optimizer: torch.optim.Optimizer
    _master_dtype: torch.dtype | None  # the dtype in which 16-bit parameters are updated; None: their own
    _run_mode: RunMode = PLAIN
    _found: dict[tuple[int, torch.Size, torch.dtype], dict[str, Any]] = field(init=False, default_factory=dict)

    def layout(self, group: int, parameter: torch.Tensor) -> StateLayout:
        """Returns the layout of the state of `parameter` in group number `group`. The parameter may be on "meta".

        The layout also has existing state that a step would not make, such as Adam's `max_exp_avg_sq` after amsgrad was
        switched off.
        """
        optimizer = self._optimizer
        dtype = arithmetic_dtype(parameter.dtype, self._master_dtype)
        attributes = user_attributes(parameter)
        layout = StateLayout(
            shape=parameter.shape,
            # Strides with repeated or skipped elements have no dense layout: `preserve_format` replaces them by dense
            # strides.
            stride=torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride(),
            dtype=dtype,
            master=dtype != parameter.dtype,
            # In chunks, the scalars of a 0-dim parameter would be mistaken for state of the parameter's shape.
            whole=not elementwise(optimizer) or parameter.dim() == 0,
            attributes={} if known(optimizer) else attributes,
            run_mode=self._run_mode,
        )
        if layout.master:
            layout.tensors[_MASTER] = torch.empty_strided(parameter.shape, layout.stride, dtype=dtype, device="meta")
        tried = self._state(group, parameter.shape, dtype, attributes)
        existing = optimizer.state.get(parameter, {})
        if existing and self._run_mode.stacks and not same(_shapes(tried), _shapes(existing)):
            raise ConfigError(
                f"{named(optimizer)} has the state of several parameters in one stacked tensor, which offload() cannot "
                "split: make a new optimizer to start without this state"
            )
        for name, value in {**tried, **existing}.items():
            # For a tensor subclass, the layout describes the trial's value: the existing value may have the parameter's
            # 16-bit dtype.
            described = tried[name] if parts_of(value) and name in tried else value
            _add(layout, optimizer, parameter.dtype, name, described)
        return layout

    def _state(
        self, group: int, shape: torch.Size, dtype: torch.dtype, attributes: Mapping[str, Any]
    ) -> dict[str, Any]:
        after = functools.partial(self._after, group, dtype, attributes)
        if attributes:
            # The user set attributes on this parameter, so other parameters cannot share the result of its trial.
            return self._tried(shape, after)
        kind = group, shape, dtype
        if kind not in self._found:
            self._found[kind] = self._tried(shape, after)
        return self._found[kind]

    def _tried(self, shape: torch.Size, after: Callable[[_Way], dict[str, Any]]) -> dict[str, Any]:
        """Returns the state after a trial, with the shapes that its tensors have for a parameter of `shape`."""
        small = torch.Size(1 if dim == 1 else unlike for dim, unlike in zip(shape, _SMALL_DIMS, strict=False))
        ways = [_Way(small), _Way(small, sparse=True)]
        if not known(self._optimizer):
            # State may depend on the size, so try a parameter of true size: first on meta, then in memory.
            ways = [_Way(shape, "meta"), _Way(shape, steps=_TRUE_STEPS), ways[1]]
            self._refuse_kinds_by_value(small, after)
        failed: Exception | None = None
        for way in ways:
            if len(way.size) != len(shape) or (way.sparse and not shape):
                continue
            try:
                state = after(way)
                # For tensors with values, a step may make state of another kind than for tensors on meta.
                if way.device == "meta" and not _same_kinds(state, after(_Way(small))):
                    continue
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - the next kind of tensor may work
                failed = failed or error
                continue
            return {name: _scaled(self._optimizer, name, value, way.size, shape) for name, value in state.items()}
        why = "no trial fits this shape" if failed is None else f"its step failed ({type(failed).__name__}: {failed})"
        raise ConfigError(
            f"memascend could not find out which state {named(self._optimizer)} keeps for a parameter of shape "
            f"{list(shape)}: {why}. Use an optimizer listed in docs/optimizers.md"
        ) from failed

    def _refuse_kinds_by_value(self, small: torch.Size, after: Callable[[_Way], dict[str, Any]]) -> None:
        """Rejects state whose kinds depend on the parameter's values, which are unknown when the store is created."""
        try:
            one, other = after(_Way(small)), after(_Way(small, fill=0.0))
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - another kind of tensor, which is tried next, may work
            return
        differs = next((name for name in one if _kind(one[name]) != _kind(other.get(name))), None)
        if differs is not None:
            raise ConfigError(
                f"{named(self._optimizer)} keeps {differs!r} as another kind of value where the parameter is zero; "
                "memascend can stream a state of one kind only. Use an optimizer listed in docs/optimizers.md"
            )

    def _after(self, group: int, dtype: torch.dtype, attributes: Mapping[str, Any], way: _Way) -> dict[str, Any]:
        values = torch.full(way.size, way.fill, dtype=dtype, device=way.device)
        ones = torch.ones_like(values)
        gradients = (_sparse(ones) if way.sparse else ones.clone() for _ in range(way.steps))
        # foreach and fused have no kernels for meta. torch's own classes keep the same state without these options.
        plain = known(self._optimizer) or way.device == "meta"
        off = {"foreach": False, "fused": False} if plain else {}
        parameter = plain_parameter(values, attributes)
        states = self._stepping(group, parameter, gradients, off)
        with on_trial(self._optimizer, meta=way.device == "meta"):
            return _steady(self._optimizer, states)

    def _stepping(
        self, group: int, parameter: torch.Tensor, gradients: Iterator[torch.Tensor], options: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Steps a copy of the optimizer on `parameter`; yields the parameter's state after each step.

        The steps change `parameter`. `group` is the number of the parameter's group. `options` replace the options of
        the same names in every group.
        """
        shared = SharedValues.of(self._optimizer).copy(deep=True)
        for made in shared.groups:
            made.update({name: value for name, value in options.items() if name in made})
        copy = copy_of_one(self._optimizer, shared, group, parameter, {}, self._run_mode)
        if callable(getattr(type(self._optimizer), "train", None)):
            run(copy, "train")
        for gradient in gradients:
            give_gradient(parameter, gradient)
            run(copy)
            yield dict(copy.state.get(parameter, {}))


def _same_kinds(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two parameters of different sizes have state of the same kinds; False if a value is a tensor subclass."""
    if any(parts_of(value) is not None for value in state.values()):
        # The structure of a subclass may depend on the device.
        return False
    return {name: _kind(value) for name, value in state.items()} == {name: _kind(of) for name, of in other.items()}


def _kind(value: Any) -> Any:
    """Returns the kind of a value, which does not depend on sizes."""
    return (type(value), value.dtype, value.dim()) if isinstance(value, torch.Tensor) else type(value)


def _sparse(values: torch.Tensor) -> torch.Tensor:
    # torch would warn if `check_invariants` were not set explicitly.
    indices = torch.zeros((1, 1), dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, torch.ones_like(values[:1]), values.shape, check_invariants=False)


def _steady(optimizer: torch.optim.Optimizer, states: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Returns the state after the first step.

    Raises ConfigError if a later step changes the names, shapes or dtypes of the state. Does not check torch's own
    classes.
    """
    first = next(states)
    if known(optimizer):
        return first
    shapes = _shapes(first)
    for number, later in enumerate(states, 2):
        if not same(shapes, _shapes(later)):
            raise ConfigError(
                f"{named(optimizer)} keeps other state after step {number} than after step 1; memascend can stream "
                "only state whose names, shapes and dtypes stay the same. Use an optimizer listed in docs/optimizers.md"
            )
    return first


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [value.shape, value.dtype] if isinstance(value, torch.Tensor) else type(value)
        for name, value in state.items()
    }


def _scaled(optimizer: torch.optim.Optimizer, name: str, value: Any, size: Sequence[int], shape: torch.Size) -> Any:
    """Returns a value of a small parameter's state, with the shape that the value has for a parameter of `shape`."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or tuple(size) == tuple(shape):
        return value
    dims = {1: 1, torch.Size(size).numel(): shape.numel(), **dict(zip(size, shape, strict=True))}
    if parts_of(value) is not None or any(dim not in dims for dim in value.shape):
        raise ConfigError(
            f"the shape of the state {name!r} of {named(optimizer)} does not follow from the parameter's shape, so "
            "memascend cannot plan memory for this state: use an optimizer listed in docs/optimizers.md"
        )
    return torch.empty([dims[dim] for dim in value.shape], dtype=value.dtype, device="meta")


# Python's numbers in a state, and the dtype in which the store holds each.
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_MASTER = "master"


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """The state that an optimizer keeps for one parameter, as tensors for the store."""

    # The tensors of the state by torch's names, on "meta". Tensors of the parameter's shape have the parameter's
    # strides. Python's numbers are 0-dim tensors. memascend adds "master".
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    # The types of the Python numbers in torch's state, by name; `tensors` has the numbers, too.
    numbers: dict[str, type] = field(default_factory=dict)
    # The composition of tensor subclasses in torch's state, by name; `tensors` has their plain tensors.
    parted: dict[str, TensorParts] = field(default_factory=dict)
    shape: torch.Size  # the shape of the parameter
    stride: tuple[int, ...]  # the strides in which the parameter is stored, in elements
    dtype: torch.dtype  # the dtype in which an update computes: the dtype of the master, if there is a master
    master: bool  # whether the parameter has a master, from which its values are rounded
    whole: bool  # whether an update needs the whole parameter at once
    attributes: Mapping[str, Any] = field(default_factory=dict)  # attributes that users set
    run_mode: RunMode = PLAIN  # how the optimizer is run for one parameter

    @property
    def names(self) -> list[str]:
        """The names in torch's state."""
        parts = {part for name, parted in self.parted.items() for part in parted.names(name)}
        return [*(name for name in self.tensors if name != _MASTER and name not in parts), *self.parted]

    def state_from(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Returns the state in torch's form, with numbers and tensor subclasses, on the memory of `tensors`."""
        state: dict[str, Any] = {}
        for name in self.names:
            if name in self.parted:
                # Quantised blocks divide a tensor row by row, so the parts of a tensor must be contiguous.
                plain = {part: tensors[part].contiguous() for part in self.parted[name].names(name)}
                state[name] = self.parted[name].together(name, plain)
            else:
                state[name] = self.numbers[name](tensors[name].item()) if name in self.numbers else tensors[name]
        return state

    @property
    def whole_bytes(self) -> int:
        """The bytes in memory while a parameter is updated whole, without tensors that the step allocates."""
        # With a master, the gradient is also converted to the master's dtype, in another buffer.
        return self.stored_bytes + (self.shape.numel() * self.dtype.itemsize if self.master else 0)

    @property
    def stored_bytes(self) -> int:
        """The part of `whole_bytes` that is read or written: values, state, and the gradient as it arrived."""
        values = self.shape.numel() * (2 if self.master else self.dtype.itemsize)
        return sum(tensor.nbytes for tensor in self.tensors.values()) + 2 * values


def _add(layout: StateLayout, optimizer: torch.optim.Optimizer, narrow: torch.dtype, name: Any, value: Any) -> None:
    """Adds one value of the state to `layout`; tensors of the parameter's dtype, `narrow`, get the master's dtype."""
    if value is None:
        return
    if not isinstance(name, str) or name == _MASTER or name in layout.tensors:
        raise ConfigError(
            f"{named(optimizer)} keeps state under {name!r}, a name that cannot be stored: use another string as "
            "the name"
        )
    if type(value) in _NUMBERS:
        layout.numbers[name] = type(value)
        layout.tensors[name] = torch.empty((), dtype=_NUMBERS[type(value)], device="meta")
        return
    parts = parts_of(value)
    if parts is not None:
        layout.parted[name] = parts
    for part, tensor in ({name: value} if parts is None else parts.apart(name, value)).items():
        plain = type(tensor) in {torch.Tensor, torch.nn.Parameter}
        if not plain or tensor.layout != torch.strided or part in layout.tensors:
            kind = f"a {type(tensor).__qualname__}" if not plain else "a sparse tensor"
            if part in layout.tensors:
                kind = "two tensors"
            raise ConfigError(
                f"{named(optimizer)} keeps {kind} as {part!r}; memascend can stream only dense tensors and numbers. "
                "Use an optimizer listed in docs/optimizers.md"
            )
        dtype = layout.dtype if parts is None and tensor.dtype == narrow else tensor.dtype
        made = torch.empty(tensor.shape, dtype=dtype, device="meta")
        # State of the parameter's shape gets the parameter's strides.
        layout.tensors[part] = made.as_strided(made.shape, layout.stride) if made.shape == layout.shape else made


_16_BITS = frozenset({torch.bfloat16, torch.float16})


def engine_kind(optimizer: torch.optim.Optimizer) -> Literal["adam", "momentum"] | None:
    """Returns the engine's arithmetic that can keep the optimizer's state in a format; None if there is none."""
    if type(optimizer) in {torch.optim.AdamW, torch.optim.Adam}:
        return "adam"
    if type(optimizer) is torch.optim.SGD and all(group["momentum"] for group in optimizer.param_groups):
        return "momentum"
    return None


def compact_format(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, layout: StateLayout) -> str | None:
    """Returns "compact fp32" for a bfloat16 parameter that is updated whole, with a master and a momentum as state.

    Returns None for other parameters and for other state. "compact fp32" saves bytes and loses no bits: the store has
    only those bits of the master weights that are lost when they are rounded to the values.
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


def options_of_formats(formats: Iterable[str | None]) -> str:
    """Returns the options of `offload()` that select these formats of the engine, as a user writes the options."""
    words = {word for given in formats for word in (given or "").split()}
    state = next((f"state={width!r}" for width in ("bf16", "8bit") if width in words), "state=None")
    return f"{state}, master_dtype=None, rounding='stochastic'" if "stochastic" in words else state


@dataclass(frozen=True, kw_only=True)
class StateFormats:
    """The state formats that the options of `offload()` select."""

    # The format of moments; None selects the optimizer's own format.
    state: Literal["fp32", "bf16", "8bit"] | None = None
    stochastic: bool = False  # True if 16-bit parameters have no master weights, and are rounded stochastically
    seed: int = 0  # the seed of stochastic rounding
    whole: frozenset[int] = frozenset()  # ids of parameters that keep 32-bit moments with "8bit": embeddings
    # For a parameter of which this rank has only some rows, by its id: the number of elements of the whole parameter.
    elements: Mapping[int, int] = field(default_factory=dict)

    def of(self, optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None) -> dict[int, str]:
        """Returns the engine's format of each parameter, by id.

        A parameter without a format keeps the optimizer's state.
        """
        if self.state in (None, "fp32") and not self.stochastic:
            self._require_fp32(optimizer, master_dtype)
            return {}
        if not self._narrows_momentum(optimizer):
            self._require_rule(optimizer)
        found = {}
        for group in optimizer.param_groups:
            if group.get("amsgrad"):
                raise ConfigError(
                    f"amsgrad keeps a third moment, which {self._asked} does not support: set amsgrad=False, or remove "
                    f"{self._asked}"
                )
            for parameter in filter(torch.is_floating_point, group["params"]):
                found[id(parameter)] = self._format(parameter, self._width(parameter), master_dtype)
        if self.stochastic and not any(given.startswith("stochastic") for given in found.values()):
            raise ConfigError(
                "rounding='stochastic' is for parameters of bfloat16 and float16, but the optimizer has none: remove "
                "this option"
            )
        return found

    def of_each(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[StateFormats]:
        """Returns the formats for each of several optimizers.

        If only some of the optimizers support a format, the others keep their own state.
        """
        capable = [engine_kind(one) is not None or self._narrows_momentum(one) for one in optimizers]
        asked = self.stochastic or self.state is not None
        if not asked or len(optimizers) == 1 or not any(capable):
            return [self] * len(optimizers)
        others = [named(optimizer) for optimizer, can in zip(optimizers, capable, strict=True) if not can]
        if others and (self.stochastic or self.state != "fp32"):
            _log.warning("%s has no effect on the state of %s", self._asked, " and ".join(others))
        narrow = [
            any(one.dtype in _16_BITS for group in optimizer.param_groups for one in group["params"])
            for optimizer in optimizers
        ]
        if not any(has and can for has, can in zip(narrow, capable, strict=True)):
            # No capable optimizer has 16-bit parameters. With rounding='stochastic', `of` raises the error for the
            # first of them.
            narrow = [True] * len(optimizers)
        return [
            replace(self, state=self.state if can else None, stochastic=self.stochastic and can and has)
            for can, has in zip(capable, narrow, strict=True)
        ]

    @property
    def _asked(self) -> str:
        if self.stochastic and self.state in (None, "fp32"):
            return "rounding='stochastic'"
        return f"state={self.state!r}"

    def _narrows_momentum(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the optimizer is Muon, and its own code runs on a momentum that is stored in bfloat16."""
        return self.state == "bf16" and not self.stochastic and type(optimizer) is torch.optim.Muon

    def _require_fp32(self, optimizer: torch.optim.Optimizer, master_dtype: torch.dtype | None) -> None:
        """Rejects state="fp32" for optimizers without `engine_kind()`, and for 16-bit parameters without masters."""
        if self.state is None:
            return
        self._require_rule(optimizer)
        if master_dtype is None and any(
            parameter.dtype in _16_BITS for group in optimizer.param_groups for parameter in group["params"]
        ):
            raise ConfigError(
                "state='fp32' with master_dtype=None: without fp32 master weights, torch keeps 16-bit moments for "
                "16-bit parameters. Pass rounding='stochastic' for 32-bit moments, or remove master_dtype"
            )

    def _require_rule(self, optimizer: torch.optim.Optimizer) -> None:
        if engine_kind(optimizer) is None:
            what = "SGD without momentum" if type(optimizer) is torch.optim.SGD else named(optimizer)
            raise ConfigError(
                f"the option {self._asked} is for torch's Adam, AdamW and SGD with momentum, not for {what}: "
                "remove this option"
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
                f"a parameter has the dtype {dtype}, but {self._asked} supports only float32, bfloat16 and float16: "
                f"freeze this parameter and make the optimizer without it, or remove {self._asked}"
            )
        if dtype == torch.float32:
            return width
        if self.stochastic:
            return f"stochastic {width}".strip()
        if master_dtype is None:
            raise ConfigError(
                f"{self._asked} with master_dtype=None: 16-bit parameters without fp32 master weights need "
                "rounding='stochastic'. Pass rounding='stochastic', or remove master_dtype"
            )
        # A compact record stores only those bits of the master that are lost when the master is rounded to bfloat16.
        return f"compact {width}" if width and dtype == torch.bfloat16 else width
