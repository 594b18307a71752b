"""Turns a parameter into a placeholder. Operations that need its values read them from storage, or raise an error."""

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
    """Returns the attributes and functions of torch that use a tensor's metadata, but not its values."""
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


# The attributes and functions that work on placeholders without values.
METADATA = _metadata()
# The end of each error that rejects access to an offloaded parameter's memory.
_HOW = f"outside of the model's forward and backward, use memascend.materialized(model) to read them; {DOORS}"
# Methods that return a parameter's memory, or write to the memory, without increasing the parameter's `_version`. While
# a module computes, its parameters may have their plain class. `session.process_hooks` replaces these methods of the
# plain class by methods that use a copy of the values.
MEMORY_METHODS = (
    "__array__", "__dlpack__", "_typed_storage", "apply_", "detach", "map_", "map2_", "numpy", "storage",
    "untyped_storage",
)  # fmt: skip


class Placeholder:
    """Mixin for the class that a parameter has while the parameter is offloaded."""

    _memascend: Place

    # Compiled code calls `__torch_function__` after a graph break. Without `disable`, Dynamo would trace this method,
    # too.
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
            # This thread has materialized these parameters: `func` treats them as plain parameters.
            if func == _GET_DATA or getattr(func, "__name__", "") in MEMORY_METHODS:
                return _call_on_copies(func, places, args, kwargs)
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

    # The following methods override the methods of torch, so that `__torch_function__` is not called.

    def set_(self, *_: Any, **__: Any) -> Any:
        """Raises UsageError: only `Place` gives a parameter other memory."""
        raise UsageError(
            f"{self._memascend.name!r} is offloaded and cannot be given other memory by set_(). To change its values, "
            "use optimizer.edit(parameter). If a parametrization calls set_(), parametrize before offload(). To do so "
            "now, call save(), load the weights into a plain model, parametrize that model, and call offload() on it"
        )

    def as_subclass(self, _: type) -> Any:
        """Raises UsageError: a placeholder has no memory that another class could view."""
        raise _refused(self._memascend, "viewed as another class (view p.detach() instead)")

    def is_shared(self) -> bool:
        """Returns False: a placeholder has no memory that other processes could share."""
        return False

    def __reduce_ex__(self, protocol: Any) -> Any:
        place = self._memascend
        _require_outside(place, "pickled")
        return place.source.copies.plain_copy(place).__reduce_ex__(protocol)


# `session.process_hooks` replaces these methods of `nn.Parameter`. Placeholders keep torch's own methods, which call
# `__torch_function__`.
for _name in MEMORY_METHODS:
    setattr(Placeholder, _name, getattr(torch.Tensor, _name))


@functools.cache
def placeholder_class(kind: type) -> type:
    """Returns the class that parameters of class `kind` have while they are offloaded."""
    return type(kind.__name__, (Placeholder, kind), {"__module__": kind.__module__})


def placeholders_in(*trees: Any) -> list[Place]:
    """Returns the `Place` of each placeholder in `trees`."""
    return [leaf._memascend for leaf in tree_leaves(trees) if isinstance(leaf, Placeholder)]  # noqa: SLF001


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides in which a tensor is stored: its own strides if it is dense, else row-major strides."""
    if isinstance(tensor, Placeholder):
        return tensor._memascend.stride  # noqa: SLF001
    if torch.ops.aten.is_non_overlapping_and_dense(tensor) and tensor.numel() > 1:
        return tuple(tensor.stride())
    return strides_of(tensor.shape)


def access_error_text(whose: str, how: str) -> str:
    """Returns the message of an error: the values of `whose` cannot be `how`, a participle such as "pickled"."""
    return f"the values of {whose} are on storage and cannot be {how} here: {_HOW}"


def _refused(place: Place, how: str) -> UsageError:
    return UsageError(access_error_text(repr(place.name), how))


def _require_outside(place: Place, how: str) -> None:
    if place.source.copies.computes:
        raise _refused(place, how)


def refused_write(name: str, how: str) -> UsageError:
    """Returns the error for a write to the offloaded parameter `name`; `how` is words like "written to by x()"."""
    return UsageError(f"{name!r} is offloaded and cannot be {how}: {DOORS}")


# --- functions on offloaded parameters -------------------------------------------------


def _apply(func: Callable[..., Any], places: list[Place], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `func`, whose arguments contain placeholders; raises UsageError if `func` writes to one of them.

    Inside a forward or a backward, `func` computes with the units' bytes in memory, and functions that return a
    parameter's memory raise UsageError. Elsewhere, this function returns the result of `_borrow`, if there is one.
    Otherwise `func` gets copies of the values.
    """
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
            # The result may be a view that requires a gradient. Its graph must lead to the parameter itself, so `func`
            # gets the parameter. During the call, the data of the parameter is a copy of the values.
            with source.copies.materialized(places):
                return func(*args, **kwargs)
    return _call_on_copies(func, places, args, kwargs)


# `_borrow` returns this object if it has no result.
_NOTHING = object()


def _borrow(
    func: Callable[..., Any], places: list[Place], args: tuple[Any, ...], kwargs: dict[str, Any], *, tracked: bool
) -> Any:
    """Returns the result of `func` on the units' bytes in memory.

    Returns `_NOTHING` if the units do not fit into the arena together. Also returns `_NOTHING` if the result shares
    memory with the units, except on a device if `tracked`. Raises UsageError if `func` wrote to a parameter. `tracked`
    is True if the result may have a graph.
    """
    source = places[0].source
    if not source.fits(places):
        return _NOTHING
    before = set(source.units.written)
    with source.borrowed(places):
        found = func(*args, **kwargs)
        own = {id(place.parameter) for place in places}
        given = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor) and id(leaf) not in own]
        if any(source.hooks.note_of(tensor) is not None for tensor in given):
            # On a device, a result with a graph may share the units' memory: the device may have no room for a copy of
            # the values.
            found = found if tracked and places[0].device.type != "cpu" else _NOTHING
    # `func` may have written in place although `_written` did not expect a write, as a custom operator may do.
    # `find_written` has then evicted the bytes, and the error below names the parameter.
    written = source.units.forget_written(before)
    if written:
        raise refused_write(min(written), f"written to by {getattr(func, '__name__', 'a function')}()")
    return found


def _call_on_copies(
    func: Callable[..., Any], places: list[Place], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls `func` on copies of the parameters. In the result, replaces each copy by its parameter."""
    instead = {place: place.source.copies.plain_copy(place) for place in places}
    own = {id(copy): place.parameter for place, copy in instead.items()}
    given, options = tree_map(
        lambda leaf: instead[leaf._memascend] if isinstance(leaf, Placeholder) else leaf,  # noqa: SLF001
        (args, kwargs),
    )
    found = func(*given, **options)
    return tree_map(lambda leaf: own.get(id(leaf), leaf), found)


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Place]:
    """Returns the parameters that `func` writes to: in `out=`, and in its first argument if `func` works in place."""
    written = placeholders_in(kwargs.get("out"))
    if _is_in_place(func) or _is_asked_in_place(func, args, kwargs):
        written += placeholders_in(args[0] if args else kwargs)
    return written


def _is_in_place(func: Callable[..., Any]) -> bool:
    """True if a function of torch writes to its first argument, judged by its name."""
    # An operator's name has its overload, as in "add_.Tensor".
    name = getattr(func, "__name__", "").partition(".")[0]
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__index__", "__int__", "__invert__", "__iter__")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _is_asked_in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if `func` has the parameter `inplace`, as `torch.nn.functional.relu` does, and this call sets it."""
    code = getattr(func, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    if "inplace" not in names:
        return False
    position = names.index("inplace")
    return bool(args[position] if len(args) > position else kwargs.get("inplace"))


# The code of `nn.Parameter(p)`, which calls `p.detach()`.
_MAKES_PARAMETER = torch.nn.Parameter.__new__.__code__


# --- functions with a handler of their own -----------------------------------------------


def _refuse(how: str) -> Callable[..., Any]:
    """Returns a handler that raises UsageError: the values cannot be `how`, a participle such as "exported"."""

    def refuse(func: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        del func
        places = placeholders_in(tensor, args, kwargs)
        raise _refused(places[0], how)

    return refuse


def _of_storage(func: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Rejects access to the storage. Dynamo gets the error `Unsupported`, and then runs the code eagerly."""
    if TracingContext.try_get() is not None:
        raise Unsupported(
            f"{tensor._memascend.name!r} is offloaded and cannot be in a compiled graph. Code that "  # noqa: SLF001
            "uses it has to run eagerly: compile without fullgraph=True"
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
        # Skips the frames of `torch._dynamo.disable`, which wraps `__torch_function__`.
        caller = caller.f_back
    if caller is not None and caller.f_code is _MAKES_PARAMETER:
        # Parametrizations call `nn.Parameter(p)`, too. torch's own error would only mention detach().
        raise ConfigError(
            f"nn.Parameter({place.name}) would be a second parameter with the values of an offloaded parameter. To "
            "add or parametrize parameters, call save(), load the weights into a plain model, change that model, and "
            "call offload() on it. For a plain copy, use nn.Parameter(p.detach().clone())"
        )
    return _call_on_copies(func, [place], (tensor,), {})


def _copy(func: Callable[..., Any], tensor: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, Placeholder) and tensor._memascend.source.loaded(tensor._memascend, values):  # noqa: SLF001
        return tensor
    return _apply(func, placeholders_in(tensor, values), (tensor, values, *args), kwargs)


def _cast(func: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of `to()` and similar methods: the parameter itself if the call changes nothing."""
    if not isinstance(tensor, Placeholder):
        # `other.to(parameter)` reads only the parameter's dtype and device.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return func(tensor, *args, **kwargs)
    place = tensor._memascend  # noqa: SLF001
    # `func` on an empty tensor shows the dtype and device of the result.
    sample = torch.empty(0, dtype=place.dtype, device=place.device)
    layout = kwargs.get("memory_format", torch.preserve_format)
    asked = func(sample, *args, **{key: value for key, value in kwargs.items() if key != "memory_format"})
    if isinstance(asked, str):
        return asked
    if asked.device == place.device:
        # `to()` returns the tensor itself if its strides already have the memory format.
        meta = _on_meta(place)
        if asked is sample and meta.to(memory_format=layout) is meta:
            return tensor
        # `to()` returns a copy of the values. If `module.to()` assigns this copy to `.data`, `_data_set` rejects it.
        return _apply(func, [place], (tensor, *args), kwargs)
    raise UsageError(
        f"the values of {place.name!r} are on storage and cannot be moved to {asked.device} here: move a copy of "
        "the parameter, p.clone(), or, to compute on another device, pass device= to offload()"
    )


_T = torch.Tensor
_GET_DATA: Any = _T.data.__get__  # type: ignore[attr-defined]


def _named(names: dict[str, Any]) -> dict[Any, Any]:
    """Returns `names` with torch.Tensor's methods as keys; skips names that this version of torch does not have."""
    return {getattr(_T, name): value for name, value in names.items() if hasattr(_T, name)}


# Functions that return a parameter's memory, each with a participle for the error message. Inside a forward or a
# backward `_apply` rejects these functions. Elsewhere `_apply` calls them on copies of the values.
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
    # An address would become invalid when the unit is evicted. A new shape or layout would differ from the stored shape
    # or layout.
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
# The number of results that `_nothing` caches. A model has tens of combinations of shape, strides and dtype. If a model
# has more combinations than this limit, some parameters do not share their tensor.
_KINDS_MAX = 1024


@dataclass(eq=False, repr=False, slots=True)
class Place:
    """A parameter, the offset of its bytes in its unit, and its placeholder."""

    parameter: torch.nn.Parameter
    name: str
    offset: int  # the offset of the values in the unit's bytes
    source: Residency
    device: torch.device = _CPU  # the device that computes with the parameter
    # Shape, dtype, strides and class of the parameter before it was offloaded.
    shape: torch.Size = field(init=False)
    dtype: torch.dtype = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    kind: type[torch.nn.Parameter] = field(init=False)
    # Class and data of the parameter while it is offloaded; `nothing` has memory for one element at most.
    placeholder: type = field(init=False)
    nothing: torch.Tensor = field(init=False)
    # The parameter's `_version` after the last known write to the parameter; a higher `_version` means that code has
    # written in place.
    known_version: int = field(init=False, default=0)
    # A weak reference to the parameter, which makes `torch.utils.swap_tensors` reject the parameter. A swap would give
    # the parameter's attributes, `_memascend` among them, to another tensor.
    unswapped: weakref.ref[torch.nn.Parameter] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.shape = self.parameter.shape
        self.dtype = self.parameter.dtype
        self.kind = type(self.parameter)
        self.stride = dense_strides(self.parameter)
        self.placeholder = placeholder_class(self.kind)
        self.nothing = _nothing(self.shape, self.stride, self.dtype, self.device)

    def plain(self, values: torch.Tensor) -> torch.nn.Parameter:
        """Returns a plain parameter of the same class on `values`."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            wanted = self.parameter.requires_grad
        with torch.inference_mode(mode=False), torch.no_grad():
            made: torch.nn.Parameter = torch.Tensor._make_subclass(self.kind, values, wanted)  # noqa: SLF001
            return made

    def offload(self) -> None:
        """Makes the parameter a placeholder."""
        parameter = self.parameter
        if self.unswapped is None:
            self.unswapped = weakref.ref(parameter)
        parameter._memascend = self  # type: ignore[attr-defined] # noqa: SLF001
        parameter.__class__ = self.placeholder
        self._set_data(self.nothing)

    def materialize(self, values: torch.Tensor, *, guarded: bool = False) -> None:
        """Sets the parameter's data to `values`.

        Args:
            values: the values, in the parameter's shape and strides.
            guarded: True if the parameter keeps its placeholder class, which calls `Residency.holds` at each use.
        """
        # Set the data before the class, so that no other thread sees a plain parameter without its values.
        self._set_data(values)
        if not guarded:
            self.parameter.__class__ = self.kind

    def _set_data(self, values: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            # `torch.Tensor.data` bypasses the property that `session.process_hooks` puts on `nn.Parameter`.
            torch.Tensor.data.__set__(self.parameter, values)  # type: ignore[attr-defined]
            self.known_version = self.parameter._version  # noqa: SLF001

    def release(self, values: torch.Tensor) -> None:
        """Makes the parameter a plain parameter on `values`, without `_memascend`, until `offload` is called again."""
        self.materialize(values)
        self.parameter.__dict__.pop("_memascend", None)
        self.unswapped = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(access_error_text(repr(self.name), "pickled or copied"))

    def note_version(self) -> None:
        """Records that all writes to the parameter so far are known."""
        # Without this context, `__torch_function__` would run, and reading `_version` would take five times as long.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            self.known_version = self.parameter._version  # noqa: SLF001


@functools.lru_cache(maxsize=_KINDS_MAX)
def _nothing(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor with memory for one element at most.

    Parameters of the same shape, strides, dtype and device share this tensor.
    """
    with torch.inference_mode(mode=False):
        nothing = torch.empty((), dtype=dtype, device=device).expand(shape)
        # The stride of a dimension of length 1 does not matter.
        differ = (
            length != 1 and got != want for length, got, want in zip(shape, stride, strides_of(shape), strict=True)
        )
        if device == _CPU and any(differ):
            # Autograd warns if the strides of a gradient differ from the strides of its parameter, so `nothing` gets
            # the stored strides. On the CPU, empty_strided() only reserves addresses for a moment. On a device it would
            # take memory, so `nothing` keeps other strides there.
            nothing = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            nothing.untyped_storage().resize_(0)
        # Some code reads a tensor's memory without `__torch_function__`: DLPack, a custom kernel, or a thread that saw
        # the parameter materialized a moment ago. Such code gets this error instead of wrong values.
        whose = f"a parameter of {list(shape)} {str(dtype).removeprefix('torch.')}"
        torch._C._set_storage_access_error_msg(nothing, access_error_text(whose, "read directly"))  # noqa: SLF001
    return nothing
