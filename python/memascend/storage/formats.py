"""Describes the formats in which optimizer state is stored, and converts state from them to float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from memascend import _core
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch


Rule = Literal["adam", "momentum"]
_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buffer",)}


def _rule_of(names: Iterable[str]) -> Rule:
    """Returns the rule whose state tensors have these names."""
    return "momentum" if "momentum_buffer" in names else "adam"


# Under `state="8bit"`, parameters with fewer elements keep float32 moments.
MIN_8BIT_SIZE = 4096


def described_state(
    dtype: str, shape: Sequence[int], form: str, rule: Rule = "adam"
) -> list[tuple[str, str, list[int]]]:
    """Returns name, dtype and shape of each state tensor that `form` stores for a parameter; see `state_tensors`."""
    return _core.store_state_in(dtype, list(shape), form, rule == "momentum")


def state_tensors(values: torch.Tensor, form: str, rule: Rule = "adam") -> dict[str, torch.Tensor]:
    """Returns the state tensors that `form` stores for a parameter, on the meta device, in the order of `Record.state`.

    Of `values`, only dtype, shape and strides matter. `form` names the format of the master and then the format of the
    moments: "compact 8bit", for example. With "compact", the store has only those bits of the master that are lost when
    the master is rounded to the values. With "stochastic", no master is stored. Otherwise 16-bit values have a float32
    master. The moments are "bf16", "8bit" or otherwise float32. `rule` is "adam" with two moments, or "momentum" (SGD,
    Muon) with one.

    Raises:
        ConfigError: `form` is not a format, or values of this dtype cannot have state in this format.
    """
    import torch

    from memascend.tensors import strides_of

    made = {}
    for name, dtype, shape in described_state(_name(values.dtype), values.shape, form, rule):
        strides = values.stride() if _is_own(name) else strides_of(shape)
        made[name] = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="meta")
    return made


def decode_state(values: torch.Tensor, state: Mapping[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """Decodes state from the format `form`; returns new float32 tensors.

    The result has "master", and the same moments as `state`: "exp_avg" and "exp_avg_sq", or "momentum_buffer". "master"
    is a copy of `values` if the format stores no master. `values` and `state` may also be the parts of one chunk, as
    `Store.scan` passes them. `values` must have no gaps.

    Raises:
        ConfigError: the state is not in that format, or the values have gaps.
    """
    import torch

    from memascend.tensors import laid_out

    if not torch.ops.aten.is_non_overlapping_and_dense(values):
        raise ConfigError("values must not have gaps or overlapping elements: pass values.contiguous()")

    rule = _rule_of(state)
    described = state_tensors(values, form, rule)
    if {name: (tensor.dtype, tensor.shape) for name, tensor in described.items()} != {
        name: (tensor.dtype, tensor.shape) for name, tensor in state.items()
    }:
        raise ConfigError(
            f"the state tensors {list(state)} of values of {values.dtype} are not in the format {form!r}: pass the "
            "format in which the state was stored"
        )
    strides = values.stride()
    # The extension takes mutable pointers to these tensors, but does not change them.
    given = {of: laid_out(state[of], strides) if _is_own(of) else state[of].contiguous() for of in described}
    wide = {
        of: torch.empty_strided(values.shape, strides, dtype=torch.float32, device=values.device)
        for of in ("master", *_MOMENTS[rule])
    }
    # The extension takes the addresses of master, first moment and second moment. Momentum has no second moment, so the
    # third address is None.
    places = [*(tensor.data_ptr() for tensor in wide.values()), None][:3]
    _core.state_decode(
        form,
        _name(values.dtype),
        rule == "momentum",
        values.data_ptr(),
        [tensor.data_ptr() for tensor in given.values()],
        places,
        values.numel(),
        torch.get_num_threads(),
    )
    return wide


def wide_parts(
    record: Mapping[str, Any], state: dict[str, torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Removes from `state` the float32 tensors that the record's format stores in fewer bits.

    Returns (master, first moment, second moment). An item is None if `state` does not have this tensor, or has it in
    the stored format.
    """
    import torch

    if not record["format"]:
        return None, None, None
    described = {name: getattr(torch, dtype) for name, dtype, _ in record["state"]}
    # A given "master" replaces "rest". If `state` has neither, the values are the master.
    has_master = "rest" in described and "rest" not in state
    taken = [state.pop("master", None) if has_master else None]
    for name in _MOMENTS[_rule_of(described)]:
        narrow = name in state and described.get(name) != torch.float32 and state[name].dtype == torch.float32
        taken.append(state.pop(name) if narrow else None)
    master, first, second = (*taken, None)[:3]
    return master, first, second


def is_widened(record: Mapping[str, Any]) -> bool:
    """True if `Engine.apply(whole=True)` passes the record's state in float32.

    `apply` passes three kinds of state as they are stored: state without a format, state of the format "compact", and
    state of the "stochastic" formats, which have no master.
    """
    return bool(record["format"]) and not record["compact"] and not record["format"].startswith("stochastic")


def wide_state(record: Mapping[str, Any]) -> list[tuple[str, str, list[int]]]:
    """Returns name, dtype and shape of the float32 tensors that `Engine.apply(whole=True)` passes for the record."""
    moments = _MOMENTS[_rule_of([name for name, _, _ in record["state"]])]
    wide = moments if record["dtype"] == "float32" else ("master", *moments)
    return [(name, "float32", record["shape"]) for name in wide]


def _is_own(name: str) -> bool:
    """True if a state tensor has one item for each element of the record, not one item for 8 or 256 elements."""
    return name != "rounded_up" and not name.endswith("_absmax")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
