"""Gives a parameter its values and takes them away; knows where its bytes lie in its unit."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import UsageError
from memascend.residency.away import away_class, dense_strides, said
from memascend.tensors import strides_of

if TYPE_CHECKING:
    from memascend.residency.residency import Residency

_CPU = torch.device("cpu")
# A model has some tens of kinds of parameters; where it has more than this, further ones have a tensor each.
_KINDS_MAX = 1024


class Place:
    """One parameter: where its bytes lie in its unit, and what it is while they are away."""

    __slots__ = (
        "away",
        "bound_version",
        "device",
        "dtype",
        "kind",
        "name",
        "nothing",
        "offset",
        "parameter",
        "shape",
        "source",
        "stride",
        "unswapped",
    )

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        name: str,
        offset: int,
        source: Residency,
        device: torch.device = _CPU,
    ) -> None:
        """`device` is the one that computes with it."""
        self.parameter = parameter
        self.device = device
        self.name = name
        self.offset = offset
        self.source = source
        self.shape = tuple(parameter.shape)
        self.dtype = parameter.dtype
        self.stride = dense_strides(parameter)
        self.kind = type(parameter)
        self.away = away_class(self.kind)
        self.nothing = _nothing(self.shape, self.stride, self.dtype, device)
        self.bound_version: int | None = None
        # `torch.utils.swap_tensors` refuses what a weak reference is held of: what it swapped would be lost.
        self.unswapped: weakref.ref[torch.nn.Parameter] | None = None

    def unbind(self) -> None:
        """Take the values away."""
        parameter = self.parameter
        if self.unswapped is None:
            self.unswapped = weakref.ref(parameter)
        parameter._memascend = self  # type: ignore[attr-defined] # noqa: SLF001
        parameter.__class__ = self.away
        _set_data(parameter, self.nothing)
        self.note_version()

    def bind(self, values: torch.Tensor, *, guarded: bool = False) -> None:
        """Let the parameter have its values; `values` is of its shape and strides.

        Args:
            values: what it has from now on.
            guarded: it keeps the class that asks `Residency.holds` at each use.
        """
        parameter = self.parameter
        # In this order another thread never finds a plain parameter without its values.
        _set_data(parameter, values)
        if not guarded:
            parameter.__class__ = self.kind
        self.note_version()

    def release(self, values: torch.Tensor) -> None:
        """Make the parameter a plain one, which knows nothing of this, until `unbind`."""
        self.bind(values)
        self.parameter.__dict__.pop("_memascend", None)
        self.unswapped = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(said(repr(self.name), "pickled or copied"))

    def note_version(self) -> None:
        """What was written to the parameter up to here is known."""
        self.bound_version = _version_of(self.parameter)

    @property
    def written(self) -> bool:
        """Whether somebody wrote to the parameter in place since it was bound, or unbound: views outlive both."""
        return self.bound_version is not None and _version_of(self.parameter) != self.bound_version


def _version_of(parameter: torch.Tensor) -> int:
    # Each bind and unbind asks; by the class of what is away the answer takes five times as long.
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        version: int = parameter._version  # noqa: SLF001
        return version


@functools.lru_cache(maxsize=_KINDS_MAX)
def _nothing(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of this shape without memory, one for all parameters that are alike."""
    with torch.inference_mode(mode=False):
        nothing = torch.empty((), dtype=dtype, device=device).expand(shape)
        if device == _CPU and not _is_row_major(shape, stride):
            # Autograd compares a gradient's strides with its parameter's, and warns. This takes addresses for a moment
            # and no memory, which it would take on a device.
            nothing = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            nothing.untyped_storage().resize_(0)
        # It has no memory from here on. What asks torch's core for it (DLPack, a custom kernel, a thread that found
        # the parameter bound a moment ago) gets this error, and no number.
        whose = f"a parameter of {list(shape)} {str(dtype).removeprefix('torch.')}"
        torch._C._set_storage_access_error_msg(nothing, said(whose, "read past the parameter's class"))  # noqa: SLF001
    return nothing


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    # The stride of a dimension of one element says nothing.
    wanted = strides_of(shape)
    return all(length == 1 or got == want for length, got, want in zip(shape, stride, wanted, strict=True))


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps: itself, or a copy."""
    strides = dense_strides(tensor)
    if tuple(tensor.stride()) == strides or tensor.numel() <= 1:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _set_data(parameter: torch.Tensor, values: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        # Past the property that parameters have while any model is offloaded.
        torch.Tensor.data.__set__(parameter, values)  # type: ignore[attr-defined]
