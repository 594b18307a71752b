"""Stands in for parameters whose values are on storage; loads or refuses when they are touched.

A parameter that is away has a shape and no memory, and is of a class that brings the values in when they are touched.
While it is bound it is of its own class again, so that being bound costs nothing; but where other threads may touch it,
it keeps the class that asks, and only the threads that bound it have it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from memascend.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

__all__ = ["Place", "Source", "dense_strides", "find_away", "laid_out"]

_CPU = torch.device("cpu")

# Raised where a parameter that is away is asked for its memory, or written to.
_HOW = "use memascend.materialized(model) to read it, and materialized(model, modify=True) to change it"
# A model has some tens of kinds of parameters; where it has more than this, further ones have a tensor each.
_KINDS_MAX = 1024


class Source(Protocol):
    """Where the values of parameters come from."""

    def holds(self, place: Place) -> bool:
        """Whether this thread has bound the parameter."""

    def borrowed(self, places: Iterable[Place]) -> AbstractContextManager[None]:
        """Bind what holds these parameters for one operation."""

    def looked_up(self, place: Place, indices: torch.Tensor, padding: int | None) -> torch.Tensor | None:
        """What an embedding gives for some indices, where that takes no more than their rows; None elsewhere."""

    def detached(self, place: Place) -> torch.Tensor | None:
        """A private copy of a parameter's values where a state dict is being made; None elsewhere."""

    def assigned(self, place: Place, values: torch.Tensor) -> bool:
        """Write values through to storage where a state dict is being loaded; False elsewhere."""


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
    )

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        name: str,
        offset: int,
        source: Source,
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
        self.away = _away_class(self.kind)
        self.nothing = _nothing(self.shape, self.stride, self.dtype, device)
        self.bound_version: int | None = None

    def unbind(self) -> None:
        """Take the values away."""
        parameter = self.parameter
        parameter._memascend = self  # type: ignore[attr-defined] # noqa: SLF001
        parameter.__class__ = self.away
        _set_data(parameter, self.nothing)
        self.bound_version = None

    def bind(self, values: torch.Tensor, *, guarded: bool = False) -> None:
        """Let the parameter have its values; `values` is of its shape and strides.

        Args:
            values: what it has from now on.
            guarded: it keeps the class that asks `Source.holds` at each use.
        """
        parameter = self.parameter
        # In this order another thread never finds a plain parameter without its values.
        _set_data(parameter, values)
        if not guarded:
            parameter.__class__ = self.kind
        self.bound_version = parameter._version  # noqa: SLF001

    def release(self, values: torch.Tensor) -> None:
        """Make the parameter a plain one, which knows nothing of this, until `unbind`."""
        self.bind(values)
        self.parameter.__dict__.pop("_memascend", None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refused(self, "pickled or copied")

    @property
    def written(self) -> bool:
        """Whether somebody wrote to the parameter in place since it was bound."""
        return self.bound_version is not None and self.parameter._version != self.bound_version  # noqa: SLF001


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
        torch._C._set_storage_access_error_msg(nothing, _said(whose, "read past the parameter's class"))  # noqa: SLF001
    return nothing


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides with which a tensor is stored: its own where it is dense, else row-major ones."""
    if torch.ops.aten.is_non_overlapping_and_dense(tensor) and tensor.numel() > 1:
        return tuple(tensor.stride())
    return _row_major(tuple(tensor.shape))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for dimension in reversed(range(len(shape))):
        strides[dimension] = step
        step *= max(1, shape[dimension])
    return tuple(strides)


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    # The stride of a dimension of one element says nothing.
    wanted = _row_major(shape)
    return all(length == 1 or got == want for length, got, want in zip(shape, stride, wanted, strict=True))


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps: itself, or a copy."""
    strides = dense_strides(tensor)
    if tuple(tensor.stride()) == strides or tensor.numel() <= 1:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def find_away(*trees: Any) -> list[Place]:
    """The parameters in `trees` that are away."""
    return [leaf._memascend for leaf in tree_leaves(trees) if isinstance(leaf, _Away)]  # noqa: SLF001


class _Away:
    """Mixed into a parameter's class while it is away."""

    _memascend: Place

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                return func(*args, **kwargs)
        places = find_away(args, kwargs)
        if all(place.source.holds(place) for place in places):
            # Of this thread, and real: as a plain parameter does it.
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, *args, **kwargs)
        _refuse_writes(func, args, kwargs)
        with places[0].source.borrowed(places):
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _refused(self._memascend, "copied deeply")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refused(self._memascend, "pickled")


_CLASSES: dict[type, type] = {}


def _away_class(kind: type) -> type:
    if kind not in _CLASSES:
        _CLASSES[kind] = type(kind.__name__, (_Away, kind), {"__module__": kind.__module__})
    return _CLASSES[kind]


def _set_data(parameter: torch.Tensor, values: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        parameter.data = values


def _said(whose: str, how: str) -> str:
    return f"the values of {whose} are on storage and cannot be {how} here: {_HOW}"


def _refused(place: Place, how: str) -> UsageError:
    return UsageError(_said(repr(place.name), how))


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__index__", "__int__", "__invert__")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _refuse_writes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    written = find_away(kwargs.get("out"))
    if args and _is_in_place(func):
        written += find_away(args[0])
    if written:
        raise _refused(written[0], f"written to by {func.__name__}()")


def _metadata() -> frozenset[Any]:
    attributes = [
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_meta",
        "is_cpu",
        "is_cuda",
        "is_xpu",
        "is_mps",
        "is_mkldnn",
        "is_nested",
        "is_leaf",
        "requires_grad",
        "grad",
        "grad_fn",
        "output_nr",
        "names",
        "itemsize",
        "nbytes",
        "_backward_hooks",
        "_version",
        "_grad",
        "_base",
        "name",
        "retains_grad",
        "_post_accumulate_grad_hooks",
        "is_mtia",
        "is_ipu",
        "is_vulkan",
        "is_ort",
        "is_maia",
        "volatile",
        "_has_symbolic_sizes_strides",
    ]
    methods = [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "get_device",
        "is_same_size",
        "is_coalesced",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "__len__",
        "__hash__",
        "is_inference",
        "is_conj",
        "is_neg",
        "has_names",
        "_is_view",
        "dim_order",
        "is_distributed",
        "is_shared",
    ]
    found: set[Any] = set()
    for name in attributes:
        attribute = getattr(torch.Tensor, name, None)
        if attribute is not None and hasattr(attribute, "__get__"):
            found.add(attribute.__get__)
    for name in ("requires_grad", "grad", "_grad", "names", "_backward_hooks", "_post_accumulate_grad_hooks"):
        attribute = getattr(torch.Tensor, name, None)
        for setter in ("__set__", "__delete__"):
            if hasattr(attribute, setter):
                found.add(getattr(attribute, setter))
    found |= {getattr(torch.Tensor, name) for name in methods if hasattr(torch.Tensor, name)}
    found |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_conj, torch.is_neg, torch.is_signed}
    found |= {torch.is_inference, torch.is_same_size}
    return frozenset(found)


def _memory(how: str) -> Callable[..., Any]:
    def refuse(func: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        del func, args, kwargs
        raise _refused(tensor._memascend, how)  # noqa: SLF001

    return refuse


def _data_set(func: Callable[..., Any], tensor: Any, values: Any) -> None:
    del func
    if values is not tensor:
        raise _refused(tensor._memascend, "replaced through .data")  # noqa: SLF001


def _stride(func: Callable[..., Any], tensor: Any, dim: int | None = None) -> Any:
    del func
    stride = tensor._memascend.stride  # noqa: SLF001
    return stride if dim is None else stride[dim]


def _is_contiguous(func: Callable[..., Any], tensor: Any, **kwargs: Any) -> bool:
    place = tensor._memascend  # noqa: SLF001
    meta = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="meta")
    return bool(func(meta, **kwargs))


def _storage_offset(func: Callable[..., Any], tensor: Any) -> int:
    del func, tensor
    return 0


def _detach(func: Callable[..., Any], tensor: Any) -> Any:
    place: Place = tensor._memascend  # noqa: SLF001
    copy = place.source.detached(place)
    if copy is not None:
        return copy
    with place.source.borrowed([place]):
        return func(tensor)


def _copy(func: Callable[..., Any], tensor: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, _Away):
        place = tensor._memascend  # noqa: SLF001
        if not place.source.assigned(place, values):
            raise _refused(place, "written to by copy_()")
        return tensor
    places = find_away(values)
    with places[0].source.borrowed(places):
        return func(tensor, values, *args, **kwargs)


def _embedding(  # noqa: PLR0913, PLR0917 - as torch calls it
    func: Callable[..., Any],
    input: Any,  # noqa: A002 - as torch calls it
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    # What changes the weight, or its gradient, is torch's.
    plain = max_norm is None and not (scale_grad_by_freq or sparse)
    if plain and isinstance(weight, _Away) and not isinstance(input, _Away):
        place: Place = weight._memascend  # noqa: SLF001
        found = place.source.looked_up(place, input, padding_idx)
        if found is not None:
            return found
    places = find_away(input, weight)
    with places[0].source.borrowed(places):
        return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


def _cast(func: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """What `to()` and its kin give: the parameter itself where nothing changes."""
    if not isinstance(tensor, _Away):
        # `other.to(parameter)` asks for its dtype and device alone.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return func(tensor, *args, **kwargs)
    place = tensor._memascend  # noqa: SLF001
    # A tensor of no elements tells what would come out.
    asked = func(
        torch.empty(0, dtype=place.dtype, device=place.device),
        *args,
        **{key: value for key, value in kwargs.items() if key != "copy"},
    )
    if isinstance(asked, str):
        return asked
    if asked.dtype == place.dtype and asked.device == place.device:
        if not kwargs.get("copy"):
            return tensor
        with place.source.borrowed([place]):
            return func(tensor, *args, **kwargs)
    raise UsageError(
        f"the values of {place.name!r} are on storage and cannot be moved or cast to {asked.device} {asked.dtype} "
        "here: cast the model before offload(), or a copy of the parameter, p.clone()"
    )


_METADATA = _metadata()
_T = torch.Tensor
_SPECIAL: dict[Any, Callable[..., Any]] = {
    _T.data.__get__: _memory("reached through .data"),  # type: ignore[attr-defined]
    _T.data.__set__: _data_set,  # type: ignore[attr-defined]
    _T.stride: _stride,
    _T.is_contiguous: _is_contiguous,
    _T.storage_offset: _storage_offset,
    _T.detach: _detach,
    torch.detach: _detach,
    _T.copy_: _copy,
    torch.nn.functional.embedding: _embedding,
    **{
        getattr(_T, name): _memory(how)
        for name, how in {
            "data_ptr": "reached by data_ptr()",
            "untyped_storage": "reached through its storage",
            "storage": "reached through its storage",
            "_typed_storage": "reached through its storage",
            "numpy": "shared with numpy",
            "__array__": "shared with numpy",
            "__dlpack__": "exported",
            "share_memory_": "shared",
            "set_": "replaced by set_()",
            "detach_": "changed by detach_()",
        }.items()
        if hasattr(_T, name)
    },
    **{getattr(_T, name): _cast for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type")},
}
