"""A parameter whose values are on storage: its placeholder reads them for each operation, or raises an error."""

from __future__ import annotations

import functools
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.exc import Unsupported
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves, tree_map

from memascend.errors import ConfigError, UsageError
from memascend.params.weight_access import DOORS
from memascend.tensors import strides_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memascend.params.residency import Residency


def _metadata() -> frozenset[Any]:
    attributes = (
        "shape", "dtype", "device", "layout", "ndim", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta", "is_cpu",
        "is_cuda", "is_xpu", "is_mps", "is_mkldnn", "is_nested", "is_leaf", "requires_grad", "grad", "grad_fn",
        "output_nr", "names", "itemsize", "nbytes", "_backward_hooks", "_version", "_grad", "_base", "name",
        "retains_grad", "_post_accumulate_grad_hooks", "is_mtia", "is_ipu", "is_vulkan", "is_ort", "is_maia",
        "volatile", "_has_symbolic_sizes_strides",
    )  # fmt: skip
    methods = (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
        "is_signed", "get_device", "is_same_size", "is_coalesced", "requires_grad_", "register_hook",
        "register_post_accumulate_grad_hook", "retain_grad", "__len__", "__hash__", "is_inference", "is_conj", "is_neg",
        "has_names", "_is_view", "dim_order", "is_distributed", "is_shared",
    )  # fmt: skip
    of_torch = (
        "is_floating_point", "is_complex", "numel", "is_conj", "is_neg", "is_signed", "is_inference", "is_same_size",
        "_has_compatible_shallow_copy_type",
    )  # fmt: skip
    found = {getattr(torch.Tensor, name) for name in methods if hasattr(torch.Tensor, name)}
    found |= {getattr(torch, name) for name in of_torch}
    for attribute in (getattr(torch.Tensor, name) for name in attributes if hasattr(torch.Tensor, name)):
        found |= {getattr(attribute, of) for of in ("__get__", "__set__", "__delete__") if hasattr(attribute, of)}
    return frozenset(found)


METADATA = _metadata()
# Part of errors where an offloaded parameter has no memory to be reached.
_HOW = f"use memascend.materialized(model) to read it; {DOORS}"
# Methods that hand out a parameter's memory, or write to it, past torch's counters. On a parameter that is real while
# a module computes, they give a copy: its class is a plain one then, see `session.process_hooks`.
HANDED_OUT = (
    "__array__", "__dlpack__", "_typed_storage", "apply_", "detach", "map_", "map2_", "numpy", "storage",
    "untyped_storage",
)  # fmt: skip


class Placeholder:
    """Mixed into a parameter's class while it is offloaded."""

    _memascend: Place

    # Compiled code calls this where a graph ends, and a compiler would go on with the code here.
    @classmethod
    @torch._dynamo.disable  # type: ignore[untyped-decorator] # noqa: SLF001
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                return func(*args, **kwargs)
        places = placeholders_in(args, kwargs)
        if all(place.source.holds(place) for place in places):
            # Of this thread, and real: as a plain parameter does it.
            if func == _GET_DATA or getattr(func, "__name__", "") in HANDED_OUT:
                return _stand_in(func, places, args, kwargs)
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, *args, **kwargs)
        return _apply(func, places, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        place = self._memascend
        if id(self) not in memo:
            _require_outside(place, "copied deeply")
            memo[id(self)] = place.source.copies.duplicate(place)
        return memo[id(self)]

    # torch asks no class before it does these.

    def set_(self, *_: Any, **__: Any) -> Any:
        """Refused: other memory would be another parameter's."""
        raise UsageError(
            f"{self._memascend.name!r} is offloaded and cannot be given other memory by set_(), as a parametrization "
            "does it: parametrize before offload() (now save(), do it in a plain model with those weights, and "
            "offload() anew); optimizer.edit(parameter) changes its values"
        )

    def as_subclass(self, _: type) -> Any:
        """Refused: there is no memory to be seen."""
        raise _refused(self._memascend, "seen as another class; p.detach() can")

    def is_shared(self) -> bool:
        """Whether other processes see the memory."""
        return False

    def __reduce_ex__(self, protocol: Any) -> Any:
        place = self._memascend
        _require_outside(place, "pickled")
        return place.source.copies.stand_in(place).__reduce_ex__(protocol)


# Not the methods of plain parameters, which watch materialized ones: here each comes through __torch_function__.
for _name in HANDED_OUT:
    setattr(Placeholder, _name, getattr(torch.Tensor, _name))


@functools.cache
def placeholder_class(kind: type) -> type:
    """The class that parameters of a class have while they are offloaded."""
    return type(kind.__name__, (Placeholder, kind), {"__module__": kind.__module__})


def placeholders_in(*trees: Any) -> list[Place]:
    """The offloaded parameters in `trees`."""
    return [leaf._memascend for leaf in tree_leaves(trees) if isinstance(leaf, Placeholder)]  # noqa: SLF001


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides with which a tensor is stored: its own where it is dense, else row-major ones."""
    if isinstance(tensor, Placeholder):
        return tensor._memascend.stride  # noqa: SLF001
    if torch.ops.aten.is_non_overlapping_and_dense(tensor) and tensor.numel() > 1:
        return tuple(tensor.stride())
    return strides_of(tensor.shape)


def said(whose: str, how: str) -> str:
    """The words for an error about values that are not there."""
    return f"the values of {whose} are on storage and cannot be {how} here: {_HOW}"


def _refused(place: Place, how: str) -> UsageError:
    return UsageError(said(repr(place.name), how))


def _require_outside(place: Place, how: str) -> None:
    if place.source.copies.computes:
        raise _refused(place, how)


def refused_write(name: str, how: str) -> UsageError:
    """The error for a write to an offloaded parameter."""
    return UsageError(f"{name!r} is offloaded, and is not {how}: {DOORS}")


# --- functions on offloaded parameters -------------------------------------------------


def _apply(func: Callable[..., Any], places: list[Place], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on offloaded parameters."""
    source = places[0].source
    written = _written(func, args, kwargs)
    if written:
        source.units.require_open()
        raise refused_write(written[0].name, f"written to by {func.__name__}()")
    if source.copies.computes:
        if func in _MEMORY:
            raise _refused(places[0], _MEMORY[func])
        with source.borrowed(places):
            return func(*args, **kwargs)
    if func not in _MEMORY:
        tracked = torch.is_grad_enabled() and any(place.parameter.requires_grad for place in places)
        found = _borrow(func, places, args, kwargs, tracked=tracked)
        if found is not _NOTHING:
            return found
        if tracked:
            # A view in a graph: its gradient is the parameter's own.
            with source.copies.materialized(places):
                return func(*args, **kwargs)
    return _stand_in(func, places, args, kwargs)


# A value that no function returns.
_NOTHING = object()


def _borrow(
    func: Callable[..., Any], places: list[Place], args: tuple[Any, ...], kwargs: dict[str, Any], *, tracked: bool
) -> Any:
    """The result of a function on values in the arena; `_NOTHING` where it would hand out their memory."""
    source = places[0].source
    if not source.fits(places):
        return _NOTHING
    before = set(source.units.written)
    with source.borrowed(places):
        found = func(*args, **kwargs)
        own = {id(place.parameter) for place in places}
        given = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor) and id(leaf) not in own]
        if any(source.hooks.note_of(tensor) is not None for tensor in given):
            # A device has no memory for a second copy of values that a graph needs.
            found = found if tracked and places[0].device.type != "cpu" else _NOTHING
    # Such as relu(inplace=True), whose name does not say so; the bytes were dropped.
    written = source.units.forget_written(before)
    if written:
        raise refused_write(min(written), f"written to by {getattr(func, '__name__', 'a function')}()")
    return found


def _stand_in(func: Callable[..., Any], places: list[Place], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on copies of the parameters."""
    instead = {place: place.source.copies.stand_in(place) for place in places}
    own = {id(copy): place.parameter for place, copy in instead.items()}
    given, options = tree_map(
        lambda leaf: instead[leaf._memascend] if isinstance(leaf, Placeholder) else leaf,  # noqa: SLF001
        (args, kwargs),
    )
    found = func(*given, **options)
    return tree_map(lambda leaf: own.get(id(leaf), leaf), found)


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Place]:
    """The parameters that a function writes to."""
    written = placeholders_in(kwargs.get("out"))
    if is_in_place(func):
        written += placeholders_in(args[0] if args else kwargs)
    return written


def is_in_place(func: Callable[..., Any]) -> bool:
    """Whether a function of torch writes to its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__index__", "__int__", "__invert__", "__iter__")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


# The code that calls detach() where a parameter is made of another.
_MAKES_PARAMETER = torch.nn.Parameter.__new__.__code__


# --- functions with an answer of their own -----------------------------------------------


def _refuse(how: str) -> Callable[..., Any]:
    def refuse(func: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        del func
        places = placeholders_in(tensor, args, kwargs)
        raise _refused(places[0], how)

    return refuse


def _of_storage(func: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse it; a compiler that traces a use of the parameter ends its graph before it, so that the use loads it."""
    if TracingContext.try_get() is not None:
        raise Unsupported(
            f"{tensor._memascend.name!r} is offloaded, and no part of a graph: code that names it is run as it is, "  # noqa: SLF001
            "which loads it; leave fullgraph=True out"
        )
    return _refuse("reached through its storage")(func, tensor, *args, **kwargs)


def _data_set(func: Callable[..., Any], tensor: Any, values: Any) -> None:
    del func
    if values is not tensor:
        tensor._memascend.source.units.require_open()  # noqa: SLF001
        raise refused_write(tensor._memascend.name, "given other memory through .data")  # noqa: SLF001


def _on_meta(place: Place) -> torch.Tensor:
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="meta")


def _of_layout(func: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return func(_on_meta(tensor._memascend), *args, **kwargs)  # noqa: SLF001


def _detach(func: Callable[..., Any], tensor: Any) -> Any:
    place: Place = tensor._memascend  # noqa: SLF001
    caller = sys._getframe(1).f_back  # noqa: SLF001
    while caller is not None and caller.f_globals.get("__name__", "").startswith("torch._dynamo"):
        # What keeps compilers out of `__torch_function__` calls it.
        caller = caller.f_back
    if caller is not None and caller.f_code is _MAKES_PARAMETER:
        # A parametrization does this, too; torch's own error speaks of detach().
        raise ConfigError(
            f"nn.Parameter({place.name}) would be a new trainable parameter on the values of one that is offloaded: "
            "save(), make it (or parametrize) in a plain model with those weights, and offload() anew; "
            "nn.Parameter(p.detach().clone()) is a plain copy"
        )
    return _stand_in(func, [place], (tensor,), {})


def _copy(func: Callable[..., Any], tensor: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, Placeholder) and tensor._memascend.source.loaded(tensor._memascend, values):  # noqa: SLF001
        return tensor
    return _apply(func, placeholders_in(tensor, values), (tensor, values, *args), kwargs)


def _cast(func: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of `to()` and similar methods: the parameter itself where nothing changes."""
    if not isinstance(tensor, Placeholder):
        # `other.to(parameter)` asks for its dtype and device alone.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return func(tensor, *args, **kwargs)
    place = tensor._memascend  # noqa: SLF001
    # A tensor of no elements shows the dtype and device of the result.
    sample = torch.empty(0, dtype=place.dtype, device=place.device)
    layout = kwargs.get("memory_format", torch.preserve_format)
    asked = func(sample, *args, **{key: value for key, value in kwargs.items() if key != "memory_format"})
    if isinstance(asked, str):
        return asked
    if asked.device == place.device:
        # It is itself where its elements lie as the memory format has them.
        meta = _on_meta(place)
        if asked is sample and meta.to(memory_format=layout) is meta:
            return tensor
        # A copy; a module that is cast assigns it to `.data`, which is refused.
        return _apply(func, [place], (tensor, *args), kwargs)
    raise UsageError(
        f"the values of {place.name!r} are on storage and cannot be moved to {asked.device} here: give offload() "
        "device=, or move a copy of the parameter, p.clone()"
    )


_T = torch.Tensor
_GET_DATA: Any = _T.data.__get__  # type: ignore[attr-defined]


def _named(names: dict[str, Any]) -> dict[Any, Any]:
    """By the methods of these names that this torch has."""
    return {getattr(_T, name): value for name, value in names.items() if hasattr(_T, name)}


# Functions that hand out memory that is not seen in the result, with the words of the error while the model computes.
_MEMORY: dict[Any, str] = {
    _GET_DATA: "reached through .data",
    **_named(
        {
            "numpy": "shared with numpy",
            "__array__": "shared with numpy",
            "__dlpack__": "exported",
            "__iter__": "iterated over",
        }
    ),
}


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _T.data.__set__: _data_set,  # type: ignore[attr-defined]
    **dict.fromkeys((_T.stride, _T.is_contiguous, _T.storage_offset), _of_layout),
    _T.detach: _detach,
    torch.detach: _detach,
    _T.copy_: _copy,
    # Addresses outlive the memory, and another shape would not be the one that is stored.
    **_named(
        dict.fromkeys(("data_ptr",), _refuse("reached by data_ptr()"))
        | dict.fromkeys(("untyped_storage", "storage", "_typed_storage"), _of_storage)
        | {
            name: _refuse(f"changed by {name}()")
            for name in (
                *("share_memory_", "set_", "detach_", "resize_", "resize_as_", "t_", "transpose_", "squeeze_"),
                *("unsqueeze_", "swapaxes_", "swapdims_", "as_strided_"),
            )
        }
    ),
    **_named(dict.fromkeys(("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type"), _cast)),
}


_CPU = torch.device("cpu")
# A model has some tens of kinds of parameters; where it has more than this, further ones have a tensor each.
_KINDS_MAX = 1024


@dataclass(eq=False, repr=False, slots=True)
class Place:
    """One parameter: where its bytes lie in its unit, and its placeholder while it is offloaded."""

    parameter: torch.nn.Parameter
    name: str
    offset: int
    source: Residency
    device: torch.device = _CPU  # the one that computes with it
    # As the parameter had them, and what it has for values while it is offloaded.
    shape: torch.Size = field(init=False)
    dtype: torch.dtype = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    kind: type[torch.nn.Parameter] = field(init=False)
    placeholder: type = field(init=False)
    nothing: torch.Tensor = field(init=False)
    # The version of the parameter up to which all writes to it are known.
    known_version: int = field(init=False, default=0)
    # `torch.utils.swap_tensors` rejects a tensor with a weak reference: a swapped parameter would be lost.
    unswapped: weakref.ref[torch.nn.Parameter] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.shape = self.parameter.shape
        self.dtype = self.parameter.dtype
        self.kind = type(self.parameter)
        self.stride = dense_strides(self.parameter)
        self.placeholder = placeholder_class(self.kind)
        self.nothing = _nothing(self.shape, self.stride, self.dtype, self.device)

    def plain(self, values: torch.Tensor) -> torch.nn.Parameter:
        """A plain parameter of its class, which has other memory."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            wanted = self.parameter.requires_grad
        with torch.inference_mode(mode=False), torch.no_grad():
            made: torch.nn.Parameter = torch.Tensor._make_subclass(self.kind, values, wanted)  # noqa: SLF001
            return made

    def offload(self) -> None:
        """Make the parameter a placeholder."""
        parameter = self.parameter
        if self.unswapped is None:
            self.unswapped = weakref.ref(parameter)
        parameter._memascend = self  # type: ignore[attr-defined] # noqa: SLF001
        parameter.__class__ = self.placeholder
        self._set_data(self.nothing)

    def materialize(self, values: torch.Tensor, *, guarded: bool = False) -> None:
        """Let the parameter have its values.

        Args:
            values: the values, of its shape and strides.
            guarded: it keeps the class that calls `Residency.holds` at each use.
        """
        # In this order another thread never finds a plain parameter without its values.
        self._set_data(values)
        if not guarded:
            self.parameter.__class__ = self.kind

    def _set_data(self, values: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            # Past the property that parameters have while any model is offloaded.
            torch.Tensor.data.__set__(self.parameter, values)  # type: ignore[attr-defined]
            self.known_version = self.parameter._version  # noqa: SLF001

    def release(self, values: torch.Tensor) -> None:
        """Make the parameter a plain one, which knows nothing of this, until `offload`."""
        self.materialize(values)
        self.parameter.__dict__.pop("_memascend", None)
        self.unswapped = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(said(repr(self.name), "pickled or copied"))

    def note_version(self) -> None:
        """All writes to the parameter up to here are known."""
        # Through the class of placeholders the query takes five times as long.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            self.known_version = self.parameter._version  # noqa: SLF001


@functools.lru_cache(maxsize=_KINDS_MAX)
def _nothing(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of this shape without memory, one for all parameters that are alike."""
    with torch.inference_mode(mode=False):
        nothing = torch.empty((), dtype=dtype, device=device).expand(shape)
        # The stride of a dimension of one element says nothing.
        differ = (
            length != 1 and got != want for length, got, want in zip(shape, stride, strides_of(shape), strict=True)
        )
        if device == _CPU and any(differ):
            # Autograd compares a gradient's strides with its parameter's, and warns. This takes addresses for a moment
            # and no memory, which it would take on a device.
            nothing = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            nothing.untyped_storage().resize_(0)
        # It has no memory from here on. What asks torch's core for it (DLPack, a custom kernel, a thread that found
        # the parameter materialized a moment ago) gets this error, and no number.
        whose = f"a parameter of {list(shape)} {str(dtype).removeprefix('torch.')}"
        torch._C._set_storage_access_error_msg(nothing, said(whose, "read past the parameter's class"))  # noqa: SLF001
    return nothing
