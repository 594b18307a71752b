"""Defines the handle that `p.grad` holds for a gradient that is on storage or used up, and records arithmetic."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memascend.errors import UsageError
from memascend.grads.norms import norm_of
from memascend.grads.operations import UNSCALE, Operation, is_recordable

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from memascend.grads.gradient import Gradient


_CHANGE = "a change of gradients, as by clipping"
# The maximum number of recorded operations of a gradient. If there are more, all of them are applied to the stored
# gradient. The bound is needed because a training loop may scale gradients any number of times without a step.
OPERATIONS_MAX = 64
# Operations that read only the shape and dtype of their arguments.
_SHAPE_ONLY = frozenset((
    "empty_like", "full_like", "is_pinned", "is_same_size", "new_empty", "new_empty_strided", "new_full", "new_ones",
    "new_zeros", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
))  # fmt: skip


def _refuse_memory(handle: GradientHandle, what: str) -> NoReturn:
    raise UsageError(
        f"{what} needs the memory of {handle.gradient.name}'s gradient, which is not in memory: "
        "use p.grad.clone(), or pass gradients='ram' to offload()"
    )


def _refusing(what: str) -> Any:
    def refuse(self: GradientHandle, *_: Any, **__: Any) -> NoReturn:
        _refuse_memory(self, what)

    return refuse


class GradientHandle(torch.Tensor):
    """A tensor in `p.grad` that stands for a gradient; the gradient's bytes are not in memory."""

    # The gradient; the number of gradients of the parameter that were dropped before this handle was made; the
    # parameter's name.
    of: tuple[weakref.ref[Gradient], int, str]

    @staticmethod
    def __new__(  # noqa: D102 - makes a tensor with shape, strides, dtype and device, without memory
        cls: type[Self],
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        of: tuple[weakref.ref[Gradient], int, str],
    ) -> Self:
        handle: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, shape, strides=strides, dtype=dtype, device=device
        )
        handle.of = of
        return handle

    def is_of(self, gradient: Gradient) -> bool:
        """True if this is a handle of `gradient`, which was not dropped since the handle was made."""
        return self.of[0]() is gradient and self.of[1] == gradient.dropped

    @property
    def gradient(self) -> Gradient:
        """The handle's gradient; raises UsageError if the gradient was dropped."""
        gradient = self.of[0]()
        if gradient is None or not self.is_of(gradient):
            raise UsageError(
                f"this gradient of {self.of[2]} was dropped, for example by zero_grad() or because p.grad was "
                "replaced: to keep its values, call p.grad.clone() before that"
            )
        return gradient

    # Makes results plain tensors: torch's default would make them handles.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001

    # --- calls of torch -----------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Executes each operation of torch that has a handle among its arguments."""
        if torch.is_inference_mode_enabled():
            # Leave inference mode, because later code outside of it cannot write to a tensor that was made inside.
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        options = kwargs or {}
        name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
        if name == "detach":
            # Return another handle of the same gradient.
            handle: GradientHandle = args[0]
            return GradientHandle(handle.shape, handle.stride(), handle.dtype, handle.device, handle.of)
        if name in _SHAPE_ONLY:
            return func(*tree_map(_without_values, args), **tree_map(_without_values, options))
        # In inference mode, composite operations arrive here, too.
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):  # noqa: SLF001
            return func.decompose(*args, **options)
        special = _SPECIAL.get(name)
        return special(func, args, options) if special is not None else _through_memory(func, args, options)

    # --- calls outside of the dispatcher ------------------------------------------

    @property
    def data(self) -> Tensor:
        """Another handle of the same gradient, like torch's `.data`. Assigning to `.data` changes the gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.detach().copy_(value)

    def tolist(self) -> Any:
        """Returns the gradient's values as nested lists."""
        return self.gradient.read().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Returns a plain tensor, because a copy is not the gradient of a parameter."""
        if id(self) not in memo:
            memo[id(self)] = self.gradient.read()
        copy: Tensor = memo[id(self)]
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        gradient = self.gradient
        if gradient.fused:
            return f"GradientHandle({gradient.name}, shape={tuple(self.shape)}, dtype={self.dtype}, already used)"
        return f"GradientHandle({gradient.name}, {gradient.read()!r})"

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if self.dim() == 0 else object.__format__(self, format_spec)

    # These calls raise an error. A pickled handle would have no store. All other calls need memory, and a handle has no
    # memory.
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


def _handles(values: Any) -> Iterator[GradientHandle]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, GradientHandle))


def _without_values(value: object) -> object:
    if not isinstance(value, GradientHandle):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns  # noqa: SLF001
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _written(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[GradientHandle]:
    arguments = func._schema.arguments  # noqa: SLF001
    given = {one.name: value for one, value in zip(arguments, args, strict=False)} | options
    return [*_handles([given.get(one.name) for one in arguments if one.alias_info and one.alias_info.is_write])]


def _through_copies(func: Any, args: tuple[Any, ...], options: dict[str, Any], written: list[GradientHandle]) -> Any:
    """Runs `func` on copies of the gradients, then assigns each changed copy to its gradient."""
    # Two handles of one gradient get the same copy.
    copies: dict[Gradient, Tensor] = {}
    changed = {handle.gradient: handle for handle in written}

    def copy(value: object) -> object:
        if not isinstance(value, GradientHandle):
            return value
        if value.gradient not in copies:
            gradient = value.gradient
            copies[gradient] = gradient.read(_CHANGE) if gradient in changed else gradient.read()
        return copies[value.gradient]

    result = func(*tree_map(copy, args), **tree_map(copy, options))
    back: dict[int, GradientHandle] = {}
    for gradient, handle in changed.items():
        tensor = copies[gradient]
        if tensor.shape != handle.shape:
            _refuse_memory(handle, f"{func}")
        gradient.assign(tensor)
        back[id(tensor)] = handle
    return tree_map(lambda value: back.get(id(value), value), result) if back else result


def _through_memory(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Runs an operation that reads or changes values."""
    written = _written(func, args, options)
    name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
    if torch.Tag.inplace_view in func.tags if written else _is_view(func):
        _refuse_memory(next(_handles((args, options))), f"{name}()")
    if written and any(True for _ in _handles(args[:1])):
        return _each(func, args, options, _change)
    return _through_copies(func, args, options, written)


def _each(
    func: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
    one: Callable[[GradientHandle, Operation], Any],
) -> Any:
    """Calls `one` for each handle in the first argument, so that only one gradient at a time is in memory.

    The first argument is a handle or a list. Runs `func` on the tensors in the list that are not handles. If another
    argument is a tensor with dimensions, runs `func` on copies of all gradients in the list at once.
    """
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
        # Use `_through_copies()`, because other lists of the call may contain handles.
        done = _through_copies(func, ([first[index] for index in plain], *part(plain)), options, [])
        for index, result in zip(plain, done or [], strict=False):
            results[index] = result
    short = name.removeprefix("_foreach_")
    for index in range(count):
        if isinstance(first[index], GradientHandle):
            results[index] = one(first[index], Operation(func, short, part([index]), options, listed=True))
    return results if func._schema.returns else None  # noqa: SLF001


# --- one operation on one gradient -----------------------------------------------------------


def _norm(handle: GradientHandle, operation: Operation) -> Tensor:
    """Returns the norm that torch computes, bit for bit.

    If the gradient is `fused`, returns the 2-norm from the gradient's measure instead. Its bits may differ from the
    bits of torch's norm.
    """
    gradient = handle.gradient
    gradient.noticed("a norm of gradients")
    if not gradient.fused:
        taken = None if gradient.operations or not operation.is_of_all else gradient.norm_by(operation)
        result: Tensor = operation.apply(gradient.materialize()) if taken is None else taken
        return result
    order, dimensions, keep = (*operation.arguments, *(2, None, False)[len(operation.arguments) :])[:3]
    dtype = operation.options.get("dtype")
    if operation.listed:
        dimensions, keep, dtype = None, False, operation.arguments[1] if len(operation.arguments) > 1 else dtype
    if order != 2 or dimensions or keep:
        raise UsageError(
            f"only the 2-norm of the gradient of {gradient.name} is left, because the update already used it: "
            "pass gradients='ssd' to offload() for other norms"
        )
    norm = torch.tensor(norm_of(gradient.numbers()[1]), dtype=torch.float64, device="cpu")
    return norm.to(handle.device, dtype or handle.dtype)


def _overwrite(handle: GradientHandle, source: Tensor) -> None:
    """Replaces the gradient by `source`; converts `source` as torch's `copy_` does."""
    gradient = handle.gradient
    gradient.noticed(_CHANGE)
    if gradient.fused:
        _refuse_change(gradient, "copy_")
    gradient.assign(gradient.empty().copy_(source))


def _record(handle: GradientHandle, operation: Operation) -> None:
    """Records an elementwise operation with scalar arguments, to be applied later."""
    gradient = handle.gradient
    gradient.noticed("zero_grad(set_to_none=False)" if operation.name == "zero_" else _CHANGE)
    # First run the operation on as few elements as possible: torch raises its own error for wrong arguments.
    operation.apply(torch.zeros((0,) if handle.shape else (), dtype=handle.dtype, device=handle.device))
    _append(gradient, operation)


def _unscale(handle: GradientHandle, operation: Operation) -> None:
    """Implements GradScaler's unscaling: checks for non-finite values at once, records the product for step()."""
    gradient = handle.gradient
    gradient.noticed("a GradScaler")
    if gradient.fused:
        raise UsageError(
            f"GradScaler comes too late for the gradient of {gradient.name}, because the update already used it: "
            "pass loss_scale= to offload() and call optimizer.backward(loss), or pass gradients='ssd'"
        )
    found: Tensor = operation.arguments[0]
    if gradient.operations:
        operation.apply(gradient.materialize())
    elif gradient.numbers()[0]:
        found.fill_(1.0)
    # `found` already has the result. So the replay of this operation gets another flag to set, which no code reads.
    own = (torch.zeros_like(found), *operation.arguments[1:])
    _append(gradient, Operation(operation.function, UNSCALE, own, operation.options, listed=True))


def _append(gradient: Gradient, operation: Operation) -> None:
    # If an argument is on the GPU, `changes_nothing()` waits for the GPU. Then call `changes_nothing()` only if the
    # operation would otherwise be rejected, so that clipping does not always wait.
    if (gradient.fused or not operation.is_on_gpu) and operation.changes_nothing():
        return
    if gradient.fused:
        _refuse_change(gradient, operation.name)
    if operation.overwrites:
        gradient.operations.clear()
    gradient.operations.append(operation.owned())
    if len(gradient.operations) > OPERATIONS_MAX:
        gradient.assign(gradient.materialize())


def _refuse_change(gradient: Gradient, name: str) -> NoReturn:
    if name == "zero_":
        raise UsageError(
            f"zero_() or zero_grad(set_to_none=False) comes too late for the gradient of {gradient.name}, because the "
            "update already used it: call zero_grad(), or pass gradients='ssd' to offload()"
        )
    raise UsageError(
        f"{name}() comes too late for the gradient of {gradient.name}, because the update already used it: "  # noqa: S608
        "to clip, pass max_grad_norm= to offload() (and set max_grad_norm of a Trainer to 0); for other changes, pass "
        "gradients='ssd'"
    )


def _change(handle: GradientHandle, operation: Operation) -> GradientHandle:
    """Changes one gradient in place: adds to it, overwrites it, records `operation`, or runs `operation` on a copy."""
    name, arguments, options = operation.name, operation.arguments, operation.options
    values = [value[0] if isinstance(value, list | tuple) and len(value) == 1 else value for value in arguments]
    if name == "add_" and not options and len(values) == 1 and _is_gradient_of(handle, values[0]):
        gradient = _plain(values[0])
        argument = [gradient] if operation.listed else gradient
        addition = Operation(operation.function, name, (argument,), listed=operation.listed)
        handle.gradient.accumulate(addition, gradient)
    elif name == "copy_" and isinstance(values[0], GradientHandle) and values[0].of == handle.of:
        # A copy of the gradient onto itself, for example by a module's `.cpu()` that moves nothing. Such a copy is also
        # allowed if an update has used the gradient.
        pass
    elif name == "copy_":
        _overwrite(handle, _plain(values[0]))
    elif is_recordable(name, [*values, *options.values()]):
        _record(handle, operation)
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


def _unscale_all(func: Any, args: tuple[list[Tensor], Tensor, Tensor], options: dict[str, Any]) -> None:
    del options
    tensors, found, inverse = args
    plain = [tensor for tensor in tensors if not isinstance(tensor, GradientHandle)]
    if plain:
        func(plain, found, inverse)
    for handle in _handles(tensors):
        _unscale(handle, Operation(func, UNSCALE, (found, inverse), listed=True))


# Operations that this file implements, so that not all gradients of a list are in memory at once.
_SPECIAL: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    UNSCALE: _unscale_all,
    **dict.fromkeys(("linalg_vector_norm", "_foreach_norm"), functools.partial(_each, one=_norm)),
}
