"""Records scalar arithmetic on a gradient that is not in memory; replays it bit-exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from torch import Tensor


# In-place operations that give the same result if they run later. They are not random, and each element of the result
# depends only on the same element of the gradient.
_RECORDABLE = frozenset((
    "abs_", "add_", "clamp_", "clamp_max_", "clamp_min_", "copysign_", "div_", "fill_", "mul_", "nan_to_num_", "neg_",
    "pow_", "sgn_", "sign_", "sub_", "zero_",
))  # fmt: skip
# Operations whose result does not depend on the old values.
_OVERWRITING = frozenset({"zero_", "fill_"})
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


def _is_scalar(value: object) -> bool:
    """True if `value` is a number, a tensor without dimensions, None, or a string, such as a rounding mode."""
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.dim() == 0
    return value is None or isinstance(value, bool | int | float | complex | str)


def is_recordable(name: str, arguments: list[Any]) -> bool:
    """True if `_RECORDABLE` has `name` (without a "_foreach_" prefix), and all arguments are scalars."""
    return name in _RECORDABLE and all(_is_scalar(argument) for argument in arguments)


@dataclass(frozen=True)
class Operation:
    """One in-place operation or norm of torch on a gradient, with all arguments except the gradient."""

    function: Any
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    listed: bool = False

    def owned(self) -> Operation:
        """Returns a copy with cloned tensors: the caller may change its own tensors before the replay."""
        arguments, options = tree_map_only(torch.Tensor, torch.clone, (self.arguments, self.options))
        return replace(self, arguments=arguments, options=options)

    def apply(self, tensor: Tensor) -> Any:
        """Applies the operation to `tensor` with torch; returns torch's result."""
        # On a GPU, torch has different kernels for a tensor and for a list of tensors. So pass a list if the training
        # loop passed a list.
        if not self.listed:
            return self.function(tensor, *self.arguments, **self.options)
        results = self.function([tensor], *self.arguments, **self.options)
        return results[0] if results else None

    @property
    def is_on_gpu(self) -> bool:
        """True if an argument is a tensor on a GPU."""
        return any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in self.arguments)

    @property
    def overwrites(self) -> bool:
        """True if the result does not depend on the gradient."""
        return self.name in _OVERWRITING

    @property
    def is_of_all(self) -> bool:
        """For a norm: true if the norm is over all elements, with a single number as its result."""
        return self.listed or len(self.arguments) <= 1

    def changes_nothing(self) -> bool:
        """True if the operation is known to change no gradient; waits for the GPU if an argument is on the GPU."""
        numbers = [*self.arguments, *self.options.values()]
        values = [value.item() if isinstance(value, torch.Tensor) else value for value in numbers]
        if self.name == UNSCALE:
            return bool(values[-1] == 1)
        if self.name in {"mul_", "div_"}:
            return len(values) == 1 and values[0] == 1
        if self.name in {"clamp_", "clamp_min_", "clamp_max_"}:
            low, high = self._bounds(values)
            return low in {None, -math.inf} and high in {None, math.inf}
        return False

    def _bounds(self, values: list[Any]) -> tuple[Any, Any]:
        if self.name == "clamp_min_":
            return values[0], None
        if self.name == "clamp_max_":
            return None, values[0]
        named = dict(zip(self.options, values[len(self.arguments) :], strict=True))
        low, high, *_ = [*values[: len(self.arguments)], None, None]
        return named.get("min", low), named.get("max", high)

    def factor(self, dtype: torch.dtype, dimensions: int, device: torch.device) -> float | None:  # noqa: PLR0911
        """Returns the fp32 number by which the operation multiplies the gradient; None if there is no such number.

        torch multiplies a 16-bit gradient by the scalar in fp32, and rounds once. There is one exception: if the
        gradient has no dimensions and the scalar is a tensor of doubles, torch multiplies in double.
        """
        if dtype not in {torch.float32, torch.bfloat16, torch.float16} or self.options:
            return None
        if self.name == UNSCALE:
            scale: Tensor = self.arguments[1]
            return scale.item()
        if self.name not in {"mul_", "div_"} or len(self.arguments) != 1:
            return None
        (number,) = self.arguments
        if isinstance(number, list | tuple):
            (number,) = number
        if isinstance(number, torch.Tensor):
            if number.is_complex() or (dimensions == 0 and number.dtype == torch.float64):
                return None
            scalar = number
        else:
            kind = torch.int64 if isinstance(number, bool | int) else torch.float64
            scalar = torch.tensor(number, dtype=kind, device="cpu")
        rounded = scalar.to(dtype).to(torch.float32).item()
        value = scalar.to(torch.float32).item()
        if self.function._overloadname in {"Scalar", "ScalarList"} and device.type == "cpu":  # noqa: SLF001
            # torch's CPU code rounds the scalar to the gradient's dtype in `_foreach_mul_`, but not in `mul_`.
            value = rounded
        elif (self.listed or scalar.device.type != "cpu" or device.type != "cpu") and rounded != value:
            # On a GPU, some kernels round the scalar to the gradient's dtype first, and other kernels do not.
            return None
        if self.name == "mul_":
            return value
        # A multiplication by the inverse gives the bits of a division only if the divisor is a power of two.
        inverse = 1.0 / value if value else math.inf
        is_power = math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5
        return inverse if is_power and 2.0**-126 <= abs(inverse) <= 2.0**126 else None
