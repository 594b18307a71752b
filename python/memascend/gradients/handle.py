"""Stands in `p.grad` for a gradient that is on storage or already used; supports what torch does to gradients.

A handle has the gradient's shape, dtype and strides and none of its memory. What torch does to gradients works on it
and gives torch's bits: accumulation goes to the keeper, arithmetic by scalars is recorded and replayed by step(),
any other read gets a copy. What would need the memory itself, a view for one, raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memascend.gradients.deferred_gradient import Backing, DeferredGradient
from memascend.gradients.operations import UNSCALE, Operation, is_recordable
from memascend.tensors import strides_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

# These look at shape and dtype alone.
SHAPE_ONLY = frozenset(
    {
        "empty_like",
        "full_like",
        "is_pinned",
        "is_same_size",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "rand_like",
        "randint_like",
        "randn_like",
        "zeros_like",
    }
)


def _refusing(what: str) -> Any:
    """A method that needs the memory, which is not there."""

    def refuse(self: GradientHandle, *_: Any, **__: Any) -> NoReturn:
        self.gradient.refuse_memory(what)

    return refuse


class GradientHandle(torch.Tensor):
    """A gradient without its bytes.

    Args:
        backing: where they are.
        strides: of the gradient; None: row-major.
        device: that the parameter reports.
    """

    gradient: DeferredGradient

    @staticmethod
    def __new__(
        cls: type[Self],
        backing: Backing,
        *,
        strides: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Make a tensor that has all of a tensor but its memory."""
        handle: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls,
            backing.shape,
            strides=strides_of(backing.shape) if strides is None else tuple(strides),
            dtype=backing.dtype,
            device=torch.device(device),
        )
        return handle

    def __init__(
        self, backing: Backing, *, strides: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> None:
        del strides, device
        self.gradient = DeferredGradient(backing, self.stride(), self.device)

    # Results are plain tensors; torch's default would make handles of them.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001

    @property
    def backing(self) -> Backing:
        """Where the gradient is."""
        return self.gradient.backing

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What was done to the gradient since it was stored, and is not in the stored bytes."""
        return tuple(self.gradient.operations)

    def factors(self) -> tuple[float, ...] | None:
        """The operations as fp32 numbers: multiply in fp32 by each, in order, and round to the gradient's dtype.

        None where that would not be what torch computes: then the update takes materialize(), or replay().
        """
        return self.gradient.factors()

    def replay(self, tensor: Tensor) -> Tensor:
        """Do the operations to a tensor, in place, and return it."""
        return self.gradient.replay(tensor)

    def materialize(self) -> Tensor:
        """The gradient as it is now, in new memory. Not reported to noticed()."""
        return self.gradient.materialize()

    # --- what torch does to it ----------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Every operation of torch that gets a handle comes through here."""
        if torch.is_inference_mode_enabled():
            # What is made under it could not be written to outside it.
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        options = kwargs or {}
        name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
        if name == "detach":
            return _alias(args[0])
        if name in SHAPE_ONLY:
            return func(*tree_map(_without_values, args), **tree_map(_without_values, options))
        # Under inference_mode also those arrive that are made of others.
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):  # noqa: SLF001
            return func.decompose(*args, **options)
        special = _SPECIAL.get(name)
        return special(func, args, options) if special is not None else _through_memory(func, args, options)

    # --- what does not come through the dispatcher --------------------------------

    @property
    def data(self) -> Tensor:
        """The same gradient, as torch's `.data` is; what is set is what the gradient becomes."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.detach().copy_(value)

    def tolist(self) -> Any:
        """Read the numbers."""
        return self.gradient.read().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor: a copy is nobody's gradient yet."""
        if id(self) not in memo:
            memo[id(self)] = self.gradient.read()
        copy: Tensor = memo[id(self)]
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        if self.backing.fused:
            return f"GradientHandle({self.backing.name}, shape={tuple(self.shape)}, dtype={self.dtype}, already used)"
        return f"GradientHandle({self.backing.name}, {self.gradient.read()!r})"

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if self.dim() == 0 else object.__format__(self, format_spec)

    # A file or another process has no store behind it; and there is no memory to share, to point to, or to walk over.
    __reduce_ex__ = _refusing("pickling")
    __array__ = _refusing("numpy")
    __dlpack__ = _refusing("dlpack")
    numpy = _refusing("numpy()")
    data_ptr = _refusing("data_ptr()")
    untyped_storage = _refusing("untyped_storage()")
    storage = _refusing("storage()")
    _typed_storage = _refusing("storage()")
    share_memory_ = _refusing("share_memory_()")
    apply_ = _refusing("apply_()")
    map_ = _refusing("map_()")


def _alias(handle: GradientHandle) -> GradientHandle:
    """Another tensor that is the same gradient, as what detach() returns is."""
    alias = GradientHandle(handle.backing, strides=handle.stride(), device=handle.device)
    alias.gradient = handle.gradient
    return alias


def _handles(values: Any) -> Iterator[GradientHandle]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, GradientHandle))


def _handles_first(args: tuple[Any, ...]) -> bool:
    """Whether the first argument, or a list of them, is what is worked on."""
    return bool(args) and any(True for _ in _handles(args[0]))


def _without_values(value: object) -> object:
    return value.gradient.empty() if isinstance(value, GradientHandle) else value


def _is_view(func: Any) -> bool:
    returns = func._schema.returns  # noqa: SLF001
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _written(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[GradientHandle]:
    """The handles among the arguments that the operation writes to."""
    written: list[GradientHandle] = []
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) and not argument.kwarg_only else options.get(argument.name)
        written.extend(_handles(value))
    return written


def _through_copies(func: Any, args: tuple[Any, ...], options: dict[str, Any], written: list[GradientHandle]) -> Any:
    """Do anything by copies of the gradients, and put back those that it changed."""
    # Two handles of one gradient are one tensor to the operation.
    copies: dict[DeferredGradient, Tensor] = {}
    changed = {handle.gradient: handle for handle in written}

    def copy(value: object) -> object:
        if not isinstance(value, GradientHandle):
            return value
        if value.gradient not in copies:
            copies[value.gradient] = value.gradient.read("change" if value.gradient in changed else "read")
        return copies[value.gradient]

    result = func(*tree_map(copy, args), **tree_map(copy, options))
    back: dict[int, GradientHandle] = {}
    for gradient, handle in changed.items():
        tensor = copies[gradient]
        if tensor.shape != handle.shape:
            gradient.refuse_memory(f"{func}")
        gradient.assign(tensor)
        back[id(tensor)] = handle
    return tree_map(lambda value: back.get(id(value), value), result) if back else result


def _through_memory(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Do what looks at values, or changes them."""
    written = _written(func, args, options)
    name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
    if torch.Tag.inplace_view in func.tags if written else _is_view(func):
        next(_handles((args, options))).gradient.refuse_memory(f"{name}()")
    if written and _handles_first(args):
        return _each(func, args, options, _change)
    return _through_copies(func, args, options, written)


def _each(
    func: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
    one: Callable[[GradientHandle, Operation], Any],
) -> Any:
    """Do one gradient of a list after the other, so that one at a time is in memory; plain tensors go together."""
    first, rest = args[0], args[1:]
    name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
    if isinstance(first, GradientHandle):
        return one(first, Operation(func, name, rest, options))
    count = len(first)
    if any(isinstance(value, torch.Tensor) and value.dim() for value in rest):
        return _through_copies(func, args, options, _written(func, args, options))

    def part(indices: list[int]) -> tuple[Any, ...]:
        return tuple(
            [value[index] for index in indices] if isinstance(value, list | tuple) and len(value) == count else value
            for value in rest
        )

    plain = [index for index in range(count) if not isinstance(first[index], GradientHandle)]
    results: list[Any] = [None] * count
    if plain:
        # A handle may still stand in another list of the call.
        done = _through_copies(func, ([first[index] for index in plain], *part(plain)), options, [])
        for index, result in zip(plain, done or [], strict=False):
            results[index] = result
    short = name.removeprefix("_foreach_")
    for index in range(count):
        if isinstance(first[index], GradientHandle):
            results[index] = one(first[index], Operation(func, short, part([index]), options, listed=True))
    return results if func._schema.returns else None  # noqa: SLF001


def _norm(handle: GradientHandle, operation: Operation) -> Tensor:
    return handle.gradient.norm(operation)


def _norms(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return _each(func, args, options, _norm)


def _unscale(func: Any, args: tuple[list[Tensor], Tensor, Tensor], options: dict[str, Any]) -> None:
    del options
    tensors, found, inverse = args
    plain = [tensor for tensor in tensors if not isinstance(tensor, GradientHandle)]
    if plain:
        func(plain, found, inverse)
    for handle in _handles(tensors):
        handle.gradient.unscale(Operation(func, UNSCALE, (found, inverse), listed=True))


def _change(handle: GradientHandle, operation: Operation) -> GradientHandle:
    """Change one gradient in place: with its keeper, in the record, or by way of a copy."""
    name, arguments, options = operation.name, operation.arguments, operation.options
    values = [value[0] if isinstance(value, list | tuple) and len(value) == 1 else value for value in arguments]
    if name == "add_" and not options and len(values) == 1 and _is_gradient_of(handle, values[0]):
        gradient = _plain(values[0])
        argument = [gradient] if operation.listed else gradient
        addition = Operation(operation.function, name, (argument,), listed=operation.listed)
        handle.gradient.accumulate(addition, gradient)
    elif name == "copy_" and isinstance(values[0], GradientHandle) and values[0].gradient is handle.gradient:
        # On itself, as a module's `.cpu()` does where nothing moves: it may be of a gradient that was used.
        pass
    elif name == "copy_":
        handle.gradient.overwrite(_plain(values[0]), name)
    elif is_recordable(name, [*values, *options.values()]):
        handle.gradient.record(operation)
    else:
        first = [handle] if operation.listed else handle
        _through_copies(operation.function, (first, *arguments), options, [handle])
    return handle


def _plain(value: Tensor) -> Tensor:
    return value.gradient.read() if isinstance(value, GradientHandle) else value


def _is_gradient_of(handle: GradientHandle, value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.shape == handle.shape
        and value.dtype == handle.dtype
    )


# Operations that need less than the values.
_SPECIAL: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    UNSCALE: _unscale,
    "linalg_vector_norm": _norms,
    "_foreach_norm": _norms,
}
