"""Finds embeddings that can be read row by row, as a batch needs them, and not whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from memascend.planning.units import Unit

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def find_row_embeddings(model: nn.Module, units: Sequence[Unit], whole: Collection[int] = ()) -> tuple[str, ...]:
    """The units that are one embedding each, which is used for look-ups alone as far as its modules tell.

    What else a program does with such a weight is exact, too, and slower: all of it is then brought into a file.

    Args:
        model: whose units they are.
        units: in the order of the forward.
        whole: the ids of parameters whose optimizer wants all of the gradient at once.
    """
    if any(_is_compiled(module) for module in model.modules()):
        # A compiled forward takes real tensors.
        return ()
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():  # noqa: SLF001
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(module)
    parameters = dict(model.named_parameters())
    found = []
    for unit in units:
        if len(unit.parameters) != 1 or unit.pinned or unit.again or unit.around:
            continue
        weight = parameters[unit.parameters[0]]
        if id(weight) not in whole and _is_table(weight) and all(map(_looks_up, owners[id(weight)])):
            found += [unit.name] if len(owners[id(weight)]) == 1 else []
    # A model of nothing else has nothing else to hold.
    return tuple(found) if len(found) < len(units) else ()


def _is_table(weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and weight.dtype in _DTYPES and weight.numel() > 0 and weight.is_contiguous()


def _looks_up(module: nn.Module) -> bool:
    """Whether a module does with its weight what torch's embedding does, which gives exact gradients by rows."""
    if not isinstance(module, nn.Embedding) or module.sparse or module.scale_grad_by_freq:
        return False
    return module.max_norm is None and _calls_torch(type(module))


def _calls_torch(kind: type[nn.Embedding]) -> bool:
    """Whether the forward is torch's, or one that calls it (and scales what it gives, say)."""
    if kind.forward is nn.Embedding.forward:
        return True
    code = getattr(kind.forward, "__code__", None)
    return code is not None and "super" in code.co_names and "forward" in code.co_names


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"  # noqa: SLF001
