"""Converts optimizer state into the formats that entries are stored in, and back to float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from memascend import _core
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


# The state tensors of a compact entry: int16, float32, float32.
NAMES = ("rest", "exp_avg", "exp_avg_sq")


_ADAM = ("master", "exp_avg", "exp_avg_sq")


def is_compact(values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> bool:
    """Whether this is a compact entry: bfloat16 values with an int16 "rest" and float32 moments, all of one shape."""
    import torch

    wanted = dict(zip(NAMES, (torch.int16, torch.float32, torch.float32), strict=True))
    return (
        values.dtype == torch.bfloat16
        and set(state) == set(NAMES)
        and all(state[name].dtype == dtype and state[name].shape == values.shape for name, dtype in wanted.items())
    )


def master_of(values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adam's state as torch knows it, from an entry of any layout: "master", "exp_avg" and "exp_avg_sq", float32.

    Of a compact entry the master is put together and the signs of the second moment are cleared, in new tensors; of
    another one the tensors are what was given, float32 values being their own master.

    Raises:
        ConfigError: the state is not Adam's.
    """
    import torch

    if not is_compact(values, state):
        moments = {name: state[name] for name in _ADAM[1:] if name in state}
        master = state.get("master", values)
        if len(moments) != len(_ADAM[1:]) or master.dtype != torch.float32:
            raise ConfigError(f"state of {list(state)} beside values of {values.dtype} is not Adam's: it has no master")
        return {"master": master, **moments}
    order = order_of_strides(values)
    kept, rest = rows(values, order), rows(state["rest"], order)
    exp_avg_sq = rows(state["exp_avg_sq"], order).clone()
    master = torch.empty(kept.shape, dtype=torch.float32, device=values.device)
    _core.kernel_join_master(
        kept.data_ptr(),
        rest.data_ptr(),
        exp_avg_sq.data_ptr(),
        master.data_ptr(),
        kept.numel(),
        torch.get_num_threads(),
    )
    return {
        "master": back(master, order),
        "exp_avg": state["exp_avg"].clone(),
        "exp_avg_sq": back(exp_avg_sq, order),
    }


def compact_of(values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The compact state of a bfloat16 parameter, from "master", "exp_avg" and "exp_avg_sq": what `master_of` undoes.

    A moment that is missing is zeros, and a missing master is the values in float32. A state that is compact already is
    given back as it is.

    Raises:
        ConfigError: the master, rounded to bfloat16, is not the values; a second moment is negative; a tensor does not
            fit.
    """
    import torch

    if is_compact(values, state):
        return dict(state)
    if values.dtype != torch.bfloat16 or not set(state) <= set(_ADAM):
        raise ConfigError(f"state of {list(state)} beside values of {values.dtype} is not that of a bfloat16 parameter")
    for name, tensor in state.items():
        if tensor.dtype != torch.float32 or tensor.shape != values.shape or tensor.device != values.device:
            raise ConfigError(
                f"{name!r} is {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}, not torch.float32 of "
                f"{list(values.shape)} on {values.device}"
            )
    order = order_of_strides(values)
    kept = rows(values, order)
    zeros = torch.zeros(kept.shape, dtype=torch.float32, device=values.device)
    exp_avg_sq = rows(state["exp_avg_sq"], order).clone() if "exp_avg_sq" in state else zeros.clone()
    rest = torch.zeros(kept.shape, dtype=torch.int16, device=values.device)
    if values.device.type != "meta":
        if bool((exp_avg_sq < 0).any()):
            raise ConfigError("a second moment is negative: exp_avg_sq is a mean of squares")
        exp_avg_sq.abs_()
        if "master" in state:
            _split(rows(state["master"], order), kept, rest, exp_avg_sq)
    return {
        "rest": back(rest, order),
        "exp_avg": state["exp_avg"] if "exp_avg" in state else back(zeros, order),
        "exp_avg_sq": back(exp_avg_sq, order),
    }


def _split(master: torch.Tensor, values: torch.Tensor, rest: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    import torch

    rounded = torch.empty_like(values)
    _core.kernel_split_master(
        master.data_ptr(),
        rounded.data_ptr(),
        rest.data_ptr(),
        exp_avg_sq.data_ptr(),
        values.numel(),
        torch.get_num_threads(),
    )
    differ = (rounded.view(torch.int16) != values.view(torch.int16)) & ~(rounded.isnan() & values.isnan())
    if bool(differ.any()):
        raise ConfigError(
            f"{int(differ.sum())} of {values.numel()} values are not their master rounded to bfloat16; "
            "give master.bfloat16() as values, or no master"
        )


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


# By the first word and the second.
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


_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buffer",)}


Rule = Literal["adam", "momentum"]


def state_tensors(values: torch.Tensor, form: str, rule: Rule = "adam") -> dict[str, torch.Tensor]:
    """The state tensors that a parameter has in a form, on the meta device, in the order of `Entry.state`.

    Args:
        values: the parameter; only its dtype, shape and strides count.
        form: one of `FORMATS`.
        rule: "adam" has two moments, "momentum" (SGD, Muon) one.

    Raises:
        ConfigError: values of this dtype have no such state.
    """
    import torch

    described = _core.store_state_in(_name(values.dtype), list(values.shape), form, rule == "momentum")
    made = {}
    for name, dtype, shape in described:
        own = _is_own(name)
        strides = values.stride() if own else None
        of = getattr(torch, dtype)
        made[name] = (
            torch.empty(shape, dtype=of, device="meta")
            if strides is None
            else torch.empty_strided(shape, strides, dtype=of, device="meta")
        )
    return made


def encode_state(values: torch.Tensor, state: Mapping[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """State in a format, from float32 tensors or such as are in it already.

    Everything is rounded to nearest: a conversion draws no random bits. A moment that is missing is zeros, a missing
    master is the values. Moments that were not given in float32 keep their bits.

    Args:
        values: the parameter, as it is in that format: 16-bit values are their master, rounded.
        state: by name: of "master", "exp_avg", "exp_avg_sq" or "momentum_buffer" in float32, and of the format's own.
        form: one of `FORMATS`.

    Raises:
        ConfigError: a tensor does not fit, a second moment is negative, or the values are not the master, rounded.
    """
    rule: Rule = "momentum" if "momentum_buffer" in state else "adam"
    if form == "compact":
        return compact_of(values, state)
    described = state_tensors(values, form, rule)
    if values.device.type == "meta":
        return described
    order = order_of_strides(values)
    left = dict(state)
    wide = [None if tensor is None else _wide(tensor, values, order) for tensor in _taken(described, left, rule)]
    made = {}
    for name, like in described.items():
        given = left.pop(name, None)
        if given is not None and (given.dtype != like.dtype or given.shape != like.shape):
            raise ConfigError(
                f"{name!r} is {given.dtype} of shape {list(given.shape)}, not {like.dtype} of {list(like.shape)}"
            )
        if given is None:
            widened = name == "master"
            made[name] = rows(values, order).float().clone() if widened else _zeros(like, order)
        else:
            made[name] = (rows(given, order) if _is_own(name) else given.contiguous()).clone()
    if left:
        raise ConfigError(f"a parameter has no state called {next(iter(left))!r} in the format {form!r}")
    kept = rows(values, order)
    second = wide[2] if wide[2] is not None else made.get("exp_avg_sq")
    if second is not None and second.is_floating_point() and wide[0] is not None and bool((second < 0).any()):
        raise ConfigError("a second moment is negative: exp_avg_sq is a mean of squares")
    if any(tensor is not None for tensor in wide):
        rounded = kept.clone()
        of = _form(values, form, rule)
        _core.state_convert(*of, rounded.data_ptr(), _addresses(made), _places(wide), False, *_size(values))
        if wide[0] is not None:
            _require_rounded(rounded, kept)
    return {name: back(tensor, order) if _is_own(name) else tensor for name, tensor in made.items()}


def decode_state(values: torch.Tensor, state: Mapping[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """State in float32, from a format: "master" and "exp_avg", "exp_avg_sq" or "momentum_buffer", in new tensors.

    Where there is no master, it is the values. It also takes the parts of one chunk that `Store.scan` shows.

    Raises:
        ConfigError: the state is not in that format.
    """
    import torch

    rule: Rule = "momentum" if "momentum_buffer" in state else "adam"
    if form == "compact":
        return master_of(values, state)
    described = state_tensors(values, form, rule)
    if {name: (tensor.dtype, tensor.shape) for name, tensor in described.items()} != {
        name: (tensor.dtype, tensor.shape) for name, tensor in state.items()
    }:
        raise ConfigError(f"state of {list(state)} beside values of {values.dtype} is not in the format {form!r}")
    order = order_of_strides(values)
    kept = rows(values, order)
    # They are lent for writing, and stay as they are.
    tensors = {name: rows(state[name], order) if _is_own(name) else state[name].contiguous() for name in described}
    names = ("master", *_MOMENTS[rule])
    wide = {name: torch.empty(kept.shape, dtype=torch.float32) for name in names}
    # Of momentum there is no second one.
    places = _places([*(wide[name] for name in names), None][:3])
    of = _form(values, form, rule)
    _core.state_convert(*of, kept.data_ptr(), _addresses(tensors), places, True, *_size(values))
    return {name: back(tensor, order) for name, tensor in wide.items()}


def wide_parts(
    entry: Mapping[str, Any], state: dict[str, torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Takes float32 tensors out of `state` that an entry's format has otherwise: master, first and second moment."""
    import torch

    if not entry["format"]:
        return None, None, None
    described = {name: getattr(torch, dtype) for name, dtype, _ in entry["state"]}
    rule: Rule = "momentum" if "momentum_buffer" in described else "adam"
    master, first, second = _taken(described, state, rule)
    return master, first, second


def is_widened(entry: Mapping[str, Any]) -> bool:
    """Whether a whole entry's state is given in float32: its format is one of its own, and it has a master."""
    return bool(entry["format"]) and not entry["compact"] and not entry["format"].startswith("stochastic")


def wide_state(entry: Mapping[str, Any]) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of the tensors that it is given as."""
    names = {name for name, _, _ in entry["state"]}
    moments = _MOMENTS["momentum" if "momentum_buffer" in names else "adam"]
    wide = moments if entry["dtype"] == "float32" else ("master", *moments)
    return [(name, "float32", entry["shape"]) for name in wide]


def _taken(described: Mapping[str, Any], state: dict[str, torch.Tensor], rule: Rule) -> list[torch.Tensor | None]:
    """Takes what is given in float32 and has another form: the master, the first moment, the second one."""
    import torch

    taken: list[torch.Tensor | None] = []
    # In place of the rest; where there is neither, the values are all.
    has_master = "rest" in described and "rest" not in state
    taken.append(state.pop("master", None) if has_master else None)
    for name in _MOMENTS[rule]:
        of = described.get(name)
        own = getattr(of, "dtype", of)
        narrow = name in state and own != torch.float32 and state[name].dtype == torch.float32
        taken.append(state.pop(name) if narrow else None)
    return [*taken, None][:3]


def _wide(tensor: torch.Tensor, values: torch.Tensor, order: list[int]) -> torch.Tensor:
    import torch

    if tensor.dtype != torch.float32 or tensor.shape != values.shape or tensor.device != values.device:
        raise ConfigError(
            f"a tensor of the state is {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}, not "
            f"torch.float32 of {list(values.shape)} on {values.device}"
        )
    return rows(tensor, order)


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


def _zeros(like: torch.Tensor, order: list[int]) -> torch.Tensor:
    import torch

    shape = [like.shape[dim] for dim in order] if like.dim() == len(order) else list(like.shape)
    return torch.zeros(shape, dtype=like.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _form(values: torch.Tensor, form: str, rule: Rule) -> tuple[str, str, bool]:
    return form, _name(values.dtype), rule == "momentum"


def _size(values: torch.Tensor) -> tuple[int, int]:
    import torch

    return values.numel(), torch.get_num_threads()


def _addresses(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors.values()]


def _places(wide: list[torch.Tensor | None]) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in wide]
