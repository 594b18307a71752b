"""What stands in `p.grad` while the gradient itself is kept elsewhere, or is already used.

A handle has the gradient's shape, dtype and strides and none of its memory. What torch does to gradients works on it
and gives torch's bits: accumulation goes to the keeper, arithmetic by scalars is recorded and replayed by step(),
any other read gets a copy. What would need the memory itself, a view for one, raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, Self

import torch
import torch.utils._foreach_utils
from torch.utils._pytree import tree_leaves, tree_map

from memascend.errors import UsageError
from memascend.recorded import UNSCALE, Operation, factors_of, is_recordable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["GradientHandle", "Kept", "Notice", "strides_of"]

Notice = Literal["add", "change", "norm", "read", "scaler", "zero"]

# A loop that scales for ever without a step would grow the list for ever; then the gradient is rewritten once.
OPERATIONS_MAX = 64

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


class Kept(Protocol):
    """The gradient behind a handle: where it lies is the keeper's business.

    Tensors go in and out with the handle's shape, dtype and strides. One that comes in belongs to the keeper, which
    may hold it for as long as it likes; one that goes out belongs to the handle, which writes into it.
    """

    @property
    def name(self) -> str:
        """The parameter, for messages."""

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The gradient's dtype."""

    @property
    def fused(self) -> bool:
        """Whether the update already used the gradient, so that nothing but its norm is left. May change with time."""

    def read(self) -> Tensor:
        """A copy of the gradient. Not called once it is fused, as the others below but for norm() and noticed()."""

    def add(self, gradient: Tensor) -> None:
        """Add in the gradient's dtype, with the bits of torch's add_."""

    def assign(self, gradient: Tensor) -> None:
        """Replace the gradient."""

    def norm(self) -> float:
        """The 2-norm in double precision; asked for where the gradient is fused."""

    def nonfinite(self) -> bool | None:
        """Whether an infinity or a NaN is in there; None where that takes a read."""

    def noticed(self, what: Notice) -> None:
        """Something did more than pass the handle on; called before it happens, also where it then raises."""


def strides_of(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions, from the largest stride to the smallest, are `order`."""
    strides = [1] * len(shape)
    step = 1
    for dimension in reversed(range(len(shape)) if order is None else order):
        strides[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(strides)


class GradientHandle(torch.Tensor):
    """A gradient without its bytes.

    Args:
        kept: where they are.
        strides: of the gradient; None: row-major.
        device: that the parameter reports.
    """

    _kept: Kept
    # One list for a handle and what detach() makes of it: they are one gradient.
    _operations: list[Operation]

    @staticmethod
    def __new__(
        cls: type[Self],
        kept: Kept,
        *,
        strides: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Make a tensor that has all of a tensor but its memory."""
        handle: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls,
            kept.shape,
            strides=strides_of(kept.shape) if strides is None else tuple(strides),
            dtype=kept.dtype,
            device=torch.device(device),
        )
        return handle

    def __init__(self, kept: Kept, *, strides: Sequence[int] | None = None, device: torch.device | str = "cpu") -> None:
        del strides, device
        self._kept = kept
        self._operations = []

    # Results are plain tensors; torch's default would make handles of them.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001

    @property
    def kept(self) -> Kept:
        """Where the gradient is."""
        return self._kept

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What was done to the gradient since it was kept, and is not in the kept bytes."""
        return tuple(self._operations)

    def factors(self) -> tuple[float, ...] | None:
        """The operations as fp32 numbers: multiply in fp32 by each, in order, and round to the gradient's dtype.

        None where that would not be what torch computes: then the update takes materialize(), or replay().
        """
        return factors_of(self._operations, self)

    def replay(self, tensor: Tensor) -> Tensor:
        """Do the operations to a tensor, in place, and return it."""
        with torch.no_grad():
            for operation in self._operations:
                operation.apply(tensor)
        return tensor

    def materialize(self) -> Tensor:
        """The gradient as it is now, in new memory. Not reported to noticed()."""
        if self._kept.fused:
            raise UsageError(
                f"the gradient of {self._kept.name} is gone, the update already used it: "
                "pass gradients='ssd' to offload() to read gradients before step()"
            )
        # A tensor made under inference_mode could not be written to outside it.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.materialize()
        if self._operations and self._operations[0].overwrites:
            return self.replay(self._empty())
        return self.replay(self._kept.read().to(self.device))

    def _empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)

    def _assign(self, tensor: Tensor) -> None:
        self._kept.assign(tensor)
        self._operations.clear()

    def _read(self, what: Notice = "read") -> Tensor:
        self._kept.noticed(what)
        return self.materialize()

    def _alias(self) -> GradientHandle:
        alias = GradientHandle(self._kept, strides=self.stride(), device=self.device)
        alias._operations = self._operations
        return alias

    # --- what torch does to it ----------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # noqa: PLR0911
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
            return args[0]._alias()  # noqa: SLF001
        if name in SHAPE_ONLY:
            return func(*tree_map(_without_values, args), **tree_map(_without_values, options))
        # Under inference_mode also those arrive that are made of others.
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):  # noqa: SLF001
            return func.decompose(*args, **options)
        if name == UNSCALE:
            return _unscale(func, *args, **options)
        if name in {"linalg_vector_norm", "_foreach_norm"}:
            return _each(func, args, options, _norm)
        written = _written(func, args, options)
        if not written:
            if _is_view(func):
                _refuse(next(_handles((args, options))), f"{name}()")
            return _through_copies(func, args, options, [])
        if torch.Tag.inplace_view in func.tags:
            _refuse(written[0], f"{name}()")
        if _handles_first(args):
            return _each(func, args, options, _change)
        return _through_copies(func, args, options, written)

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
        return self._read().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor: a copy is nobody's gradient yet."""
        if id(self) not in memo:
            memo[id(self)] = self._read()
        copy: Tensor = memo[id(self)]
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        if self._kept.fused:
            return f"GradientHandle({self._kept.name}, shape={tuple(self.shape)}, dtype={self.dtype}, already used)"
        return f"GradientHandle({self._kept.name}, {self._read()!r})"

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if self.dim() == 0 else object.__format__(self, format_spec)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """A file or another process has no store behind it."""
        _refuse(self, "pickling")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self, "numpy")

    def __dlpack__(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self, "dlpack")

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: there is no memory to share."""
        _refuse(self, "numpy()")

    def data_ptr(self) -> NoReturn:
        """Refused: there is no memory to point to."""
        _refuse(self, "data_ptr()")

    def untyped_storage(self) -> NoReturn:
        """Refused: there is no memory to show."""
        _refuse(self, "untyped_storage()")

    def storage(self) -> NoReturn:
        """Refused: there is no memory to show."""
        _refuse(self, "storage()")

    def _typed_storage(self) -> NoReturn:
        _refuse(self, "storage()")

    def share_memory_(self) -> NoReturn:
        """Refused: there is no memory to share."""
        _refuse(self, "share_memory_()")

    def apply_(self, *_: Any) -> NoReturn:
        """Refused: torch's own would walk over memory that is not there."""
        _refuse(self, "apply_()")

    def map_(self, *_: Any) -> NoReturn:
        """Refused: torch's own would walk over memory that is not there."""
        _refuse(self, "map_()")


# torch picks list kernels by exact type, and on a GPU a list's norm has other bits than a tensor's.
torch.utils._foreach_utils._foreach_supported_types.append(GradientHandle)  # type: ignore[arg-type] # noqa: SLF001


def _refuse(handle: GradientHandle, what: str) -> NoReturn:
    raise UsageError(
        f"{what} needs the memory of {handle.kept.name}'s gradient, which is kept elsewhere: "
        "take p.grad.clone(), or pass gradients='ram' to offload()"
    )


def _handles(values: Any) -> Any:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, GradientHandle))


def _handles_first(args: tuple[Any, ...]) -> bool:
    """Whether the first argument, or a list of them, is what is worked on."""
    return bool(args) and any(True for _ in _handles(args[0]))


def _without_values(value: object) -> object:
    return value._empty() if isinstance(value, GradientHandle) else value  # noqa: SLF001


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
    copies: dict[int, Tensor] = {}
    handles: dict[int, GradientHandle] = {}

    def copy(value: object) -> object:
        if not isinstance(value, GradientHandle):
            return value
        # Two handles of one gradient are one tensor to the operation.
        key = id(value._operations)  # noqa: SLF001
        if key not in copies:
            what: Notice = "change" if any(value is handle for handle in written) else "read"
            copies[key] = value._read(what)  # noqa: SLF001
            handles[id(copies[key])] = value
        return copies[key]

    result = func(*tree_map(copy, args), **tree_map(copy, options))
    for handle in written:
        tensor = copies[id(handle._operations)]  # noqa: SLF001
        if tensor.shape != handle.shape:
            _refuse(handle, f"{func}")
        handle._assign(_laid_out(handle, tensor))  # noqa: SLF001
    if not written:
        return result
    return tree_map(lambda value: handles.get(id(value), value), result)


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
    kept = handle.kept
    kept.noticed("norm")
    if not kept.fused:
        tensor = handle.materialize()
        result = operation.function([tensor] if operation.listed else tensor, *operation.arguments, **operation.options)
        norm: Tensor = result[0] if operation.listed else result
        return norm
    order, dimensions, keep = (*operation.arguments, *(2, None, False)[len(operation.arguments) :])[:3]
    dtype = operation.options.get("dtype")
    if operation.listed:
        dimensions, keep, dtype = None, False, operation.arguments[1] if len(operation.arguments) > 1 else dtype
    if order != 2 or dimensions or keep:
        raise UsageError(
            f"of the gradient of {kept.name} only the 2-norm is left, the update already used it: "
            "pass gradients='ssd' to offload()"
        )
    return torch.tensor(kept.norm(), dtype=torch.float64).to(handle.device, dtype or handle.dtype)


def _unscale(func: Any, tensors: list[Tensor], found: Tensor, inverse: Tensor) -> None:
    """GradScaler's pass: whether anything is not finite is needed now, the product at step()."""
    plain = [tensor for tensor in tensors if not isinstance(tensor, GradientHandle)]
    if plain:
        func(plain, found, inverse)
    for handle in _handles(tensors):
        kept = handle.kept
        kept.noticed("scaler")
        if kept.fused:
            raise UsageError(
                f"GradScaler comes too late for the gradient of {kept.name}, the update already used it: "
                "pass loss_scale= to offload() and call optimizer.backward(loss), or gradients='ssd'"
            )
        operation = Operation(func, UNSCALE, (torch.zeros_like(found), inverse), listed=True)
        nonfinite = None if handle.operations else kept.nonfinite()
        if nonfinite is None:
            func([handle.materialize()], found, inverse)
        elif nonfinite:
            found.fill_(1.0)
        _append(handle, operation)


def _change(handle: GradientHandle, operation: Operation) -> Any:
    """Change one gradient in place: kept, recorded or by way of a copy."""
    name, arguments, options = operation.name, operation.arguments, operation.options
    numbers = [value[0] if isinstance(value, list | tuple) and len(value) == 1 else value for value in arguments]
    if name == "add_" and _is_gradient(handle, numbers, options):
        _accumulate(handle, operation, numbers[0])
    elif name == "copy_":
        _overwrite(handle, operation, numbers[0])
    elif is_recordable(name, [*numbers, *options.values()]):
        _record(handle, operation)
    else:
        if handle.kept.fused:
            handle.kept.noticed("change")
            _refuse_change(handle, name)
        first = [handle] if operation.listed else handle
        _through_copies(operation.function, (first, *arguments), options, [handle])
    return handle


def _is_gradient(handle: GradientHandle, numbers: list[Any], options: dict[str, Any]) -> bool:
    return (
        not options
        and len(numbers) == 1
        and isinstance(numbers[0], torch.Tensor)
        and numbers[0].layout == torch.strided
        and numbers[0].shape == handle.shape
        and numbers[0].dtype == handle.dtype
    )


def _accumulate(handle: GradientHandle, operation: Operation, gradient: Tensor) -> None:
    kept = handle.kept
    kept.noticed("add")
    if kept.fused:
        raise UsageError(
            f"a second gradient for {kept.name}, whose update already used the first: call step() and zero_grad() "
            "after each backward, or pass accumulation_steps= or gradients='ssd' to offload()"
        )
    if isinstance(gradient, GradientHandle):
        gradient = gradient._read()  # noqa: SLF001
    elif torch._C._current_graph_task_id() == -1:  # noqa: SLF001
        # Autograd leaves a gradient alone that someone holds; anyone else may write to it next.
        gradient = gradient.clone()
    if not handle.operations:
        kept.add(_laid_out(handle, gradient))
        return
    total = handle.materialize()
    operation.function([total] if operation.listed else total, [gradient] if operation.listed else gradient)
    handle._assign(total)  # noqa: SLF001


def _overwrite(handle: GradientHandle, operation: Operation, source: Tensor) -> None:
    kept = handle.kept
    kept.noticed("change")
    if kept.fused:
        _refuse_change(handle, operation.name)
    if isinstance(source, GradientHandle):
        source = source._read()  # noqa: SLF001
    tensor = handle._empty()  # noqa: SLF001
    tensor.copy_(source)
    handle._assign(tensor)  # noqa: SLF001


def _record(handle: GradientHandle, operation: Operation) -> None:
    kept = handle.kept
    kept.noticed("zero" if operation.name == "zero_" else "change")
    # torch's own complaint, if it has one, on as little as possible.
    shape = (0,) if handle.dim() else ()
    operation.apply(torch.zeros(shape, dtype=handle.dtype, device=handle.device))
    _append(handle, operation)


def _append(handle: GradientHandle, operation: Operation) -> None:
    fused = handle.kept.fused
    # Asking a GPU for the number would make every clip wait for it; only what is refused otherwise is worth that.
    here = all(not isinstance(value, torch.Tensor) or value.device.type == "cpu" for value in operation.arguments)
    if (fused or here) and operation.changes_nothing():
        return
    if fused:
        _refuse_change(handle, operation.name)
    operations = handle._operations  # noqa: SLF001
    if operation.overwrites:
        operations.clear()
    operations.append(operation.kept())
    if len(operations) > OPERATIONS_MAX:
        handle._assign(handle.materialize())  # noqa: SLF001


def _refuse_change(handle: GradientHandle, name: str) -> NoReturn:
    if name == "zero_":
        raise UsageError(
            f"zero_grad(set_to_none=False) would leave a zero gradient for {handle.kept.name} to the next step, but "
            "gradients='fused' keeps none: leave set_to_none=True, or pass gradients='ssd' to offload()"
        )
    raise UsageError(
        f"{name}() comes too late for the gradient of {handle.kept.name}, the update already used it: "
        "pass max_grad_norm= to offload() (and set the Trainer's to 0), or gradients='ssd'"
    )


def _laid_out(handle: GradientHandle, tensor: Tensor) -> Tensor:
    """The tensor with the handle's strides and no lazy conjugation or negation, itself where it has them."""
    if tensor.stride() == handle.stride() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    out = handle._empty()  # noqa: SLF001
    out.copy_(tensor)
    return out
