"""Converts optimizer state into the formats that records are stored in, and back to float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from memascend import _core
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch


Rule = Literal["adam", "momentum"]
_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buffer",)}
# The formats of state. The first word says how the master is stored, the second how the moments are.
FORMATS = (
    "",
    "bf16",
    "8bit",
    "compact",
    "compact fp32",
    "compact bf16",
    "compact 8bit",
    "stochastic",
    "stochastic bf16",
    "stochastic 8bit",
)


def _rule_of(names: Iterable[str]) -> Rule:
    """The rule that has state of these names."""
    return "momentum" if "momentum_buffer" in names else "adam"


def order_of_strides(values: torch.Tensor) -> list[int]:
    """Dimensions from the largest stride to the smallest: what the kernels see is memory in a row."""
    strides = values.stride()
    return sorted(range(values.dim()), key=lambda dim: -strides[dim])


def rows(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Elements in the order of memory; a copy where they are not."""
    return tensor.permute(order).contiguous()


def back(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """What `rows` undoes."""
    return tensor.permute([order.index(dim) for dim in range(len(order))])


# Parameters with fewer elements keep moments of 32 bits where others have 8.
MIN_8BIT_SIZE = 4096


def described_state(
    dtype: str, shape: Sequence[int], form: str, rule: Rule = "adam"
) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of each state tensor of a parameter in a form; see `state_tensors`."""
    return _core.store_state_in(dtype, list(shape), form, rule == "momentum")


def state_tensors(values: torch.Tensor, form: str, rule: Rule = "adam") -> dict[str, torch.Tensor]:
    """The state tensors that a parameter has in a form, on the meta device, in the order of `Record.state`.

    Only dtype, shape and strides of `values` count. `form` is one of `FORMATS`; `rule` is "adam" with two moments, or
    "momentum" (SGD, Muon) with one.

    Raises:
        ConfigError: values of this dtype have no such state.
    """
    import torch

    made = {}
    for name, dtype, shape in described_state(_name(values.dtype), values.shape, form, rule):
        of = getattr(torch, dtype)
        made[name] = (
            torch.empty_strided(shape, values.stride(), dtype=of, device="meta")
            if _is_own(name)
            else torch.empty(shape, dtype=of, device="meta")
        )
    return made


def encode_state(values: torch.Tensor, state: Mapping[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """State in a format, one of `FORMATS`, from float32 tensors or such as are in it already.

    Everything is rounded to nearest: a conversion draws no random bits. A moment that is missing is zeros, a missing
    master is the values, which are as they are in that format: 16-bit values are their master, rounded. `state` has
    "master", "exp_avg", "exp_avg_sq" or "momentum_buffer" in float32, and the format's own. Moments that were not given
    in float32 keep their bits.

    Raises:
        ConfigError: a tensor does not fit, a second moment is negative, or the values are not the master, rounded.
    """
    rule = _rule_of(state)
    described = state_tensors(values, form, rule)
    if values.device.type == "meta":
        return described
    if form == "compact" and "rest" not in state and "exp_avg_sq" in state:
        _require_squares(state["exp_avg_sq"])
        # Its sign bit says which way the master was rounded: -0.0 would be read as rounded up.
        state = {**state, "exp_avg_sq": state["exp_avg_sq"].abs()}
    order = order_of_strides(values)
    left = dict(state)
    wide: dict[str, torch.Tensor | None] = {}
    for name, tensor in _taken(described, left, rule).items():
        if tensor is not None:
            _require_wide(name, tensor, values)
        wide[name] = None if tensor is None else rows(tensor, order)
    made = {name: _begun(name, like, left.pop(name, None), values, order) for name, like in described.items()}
    if left:
        raise ConfigError(f"a parameter has no state called {next(iter(left))!r} in the format {form!r}")
    if wide["master"] is not None:
        second = wide.get("exp_avg_sq")
        second = made.get("exp_avg_sq") if second is None else second
        if second is not None and second.is_floating_point():
            _require_squares(second)
    if any(tensor is not None for tensor in wide.values()):
        kept = rows(values, order)
        rounded = kept.clone()
        _convert(form, rule, rounded, made, wide, back=False)
        if wide["master"] is not None:
            _require_rounded(rounded, kept)
    return {name: back(tensor, order) if _is_own(name) else tensor for name, tensor in made.items()}


def _begun(
    name: str, like: torch.Tensor, given: torch.Tensor | None, values: torch.Tensor, order: list[int]
) -> torch.Tensor:
    """The tensor that a conversion writes to, in the order of memory: a copy of the given one, else its default."""
    import torch

    if given is None:
        if name == "master":
            return rows(values, order).float().clone()
        shape = [like.shape[dim] for dim in order] if like.dim() == len(order) else list(like.shape)
        return torch.zeros(shape, dtype=like.dtype, device=values.device)
    if given.dtype != like.dtype or given.shape != like.shape:
        raise ConfigError(
            f"{name!r} is {given.dtype} of shape {list(given.shape)}, not {like.dtype} of {list(like.shape)}"
        )
    return (rows(given, order) if _is_own(name) else given.contiguous()).clone()


def decode_state(values: torch.Tensor, state: Mapping[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """State in float32, from a format: "master" and "exp_avg", "exp_avg_sq" or "momentum_buffer", in new tensors.

    Where there is no master, it is the values. It also takes the parts of one chunk that `Store.scan` shows.

    Raises:
        ConfigError: the state is not in that format.
    """
    import torch

    rule = _rule_of(state)
    described = state_tensors(values, form, rule)
    if {name: (tensor.dtype, tensor.shape) for name, tensor in described.items()} != {
        name: (tensor.dtype, tensor.shape) for name, tensor in state.items()
    }:
        raise ConfigError(f"state of {list(state)} beside values of {values.dtype} is not in the format {form!r}")
    order = order_of_strides(values)
    kept = rows(values, order)
    given = {name: state[name] for name in described}
    # The extension borrows these for writing, and leaves them unchanged.
    tensors = {name: rows(tensor, order) if _is_own(name) else tensor.contiguous() for name, tensor in given.items()}
    wide = {
        name: torch.empty(kept.shape, dtype=torch.float32, device=kept.device) for name in ("master", *_MOMENTS[rule])
    }
    _convert(form, rule, kept, tensors, wide, back=True)
    return {name: back(tensor, order) for name, tensor in wide.items()}


def _convert(
    form: str,
    rule: Rule,
    values: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    wide: Mapping[str, torch.Tensor | None],
    *,
    back: bool,
) -> None:
    """Convert float32 tensors (`wide`) into a format, or with `back` from it; all elements in the order of memory."""
    import torch

    # Momentum has no second moment.
    places = [None if tensor is None else tensor.data_ptr() for tensor in (*wide.values(), None)][:3]
    addresses = [tensor.data_ptr() for tensor in state.values()]
    _core.state_convert(
        form,
        _name(values.dtype),
        rule == "momentum",
        values.data_ptr(),
        addresses,
        places,
        back,
        values.numel(),
        torch.get_num_threads(),
    )


def wide_parts(
    record: Mapping[str, Any], state: dict[str, torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Takes float32 tensors out of `state` that a record's format has otherwise: master, first and second moment."""
    import torch

    if not record["format"]:
        return None, None, None
    described = {name: getattr(torch, dtype) for name, dtype, _ in record["state"]}
    master, first, second = (*_taken(described, state, _rule_of(described)).values(), None)[:3]
    return master, first, second


def is_widened(record: Mapping[str, Any]) -> bool:
    """Whether a whole record's state is given in float32: its format is one of its own, and it has a master."""
    return bool(record["format"]) and not record["compact"] and not record["format"].startswith("stochastic")


def wide_state(record: Mapping[str, Any]) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of the tensors that it is given as."""
    moments = _MOMENTS[_rule_of([name for name, _, _ in record["state"]])]
    wide = moments if record["dtype"] == "float32" else ("master", *moments)
    return [(name, "float32", record["shape"]) for name in wide]


def _taken(described: Mapping[str, Any], state: dict[str, torch.Tensor], rule: Rule) -> dict[str, torch.Tensor | None]:
    """Take float32 tensors out of `state` that the format has otherwise: the master and each moment, by name."""
    import torch

    # A master takes the place of the rest. Where there is neither, the values are the master.
    has_master = "rest" in described and "rest" not in state
    taken = {"master": state.pop("master", None) if has_master else None}
    for name in _MOMENTS[rule]:
        of = described.get(name)
        own = getattr(of, "dtype", of)
        narrow = name in state and own != torch.float32 and state[name].dtype == torch.float32
        taken[name] = state.pop(name) if narrow else None
    return taken


def _require_wide(name: str, tensor: torch.Tensor, values: torch.Tensor) -> None:
    import torch

    if tensor.dtype != torch.float32 or tensor.shape != values.shape or tensor.device != values.device:
        raise ConfigError(
            f"{name!r} is {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}, not torch.float32 of "
            f"{list(values.shape)} on {values.device}"
        )


def _require_squares(second: torch.Tensor) -> None:
    if bool((second < 0).any()):
        raise ConfigError("a second moment is negative: exp_avg_sq is a mean of squares")


def _require_rounded(rounded: torch.Tensor, values: torch.Tensor) -> None:
    import torch

    bits = torch.int16 if values.element_size() == 2 else torch.int32
    differ = (rounded.view(bits) != values.view(bits)) & ~(rounded.isnan() & values.isnan())
    if bool(differ.any()):
        dtype = _name(values.dtype)
        raise ConfigError(
            f"{int(differ.sum())} of {values.numel()} values are not their master rounded to {dtype}; "
            f"give master.to(torch.{dtype}) as values, or no master"
        )


def _is_own(name: str) -> bool:
    """Whether a tensor of a format has an item for each element."""
    return name != "rounded_up" and not name.endswith("_absmax")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
