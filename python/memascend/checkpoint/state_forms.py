"""Converts optimizer state between the formats that checkpoints hold and the one that a run keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memascend.engine import decode_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Of a compact master: what is not written, since the master is.
_MASTER_PARTS = frozenset({"rest", "rounded_up"})
_ABSMAX = "_absmax"
_KINDS = (frozenset({"exp_avg", "exp_avg_sq"}), frozenset({"momentum_buffer"}))
_WIDTHS = {torch.float32: "", torch.bfloat16: "bf16", torch.uint8: "8bit"}
_WORDS = {"": "32 bits", "bf16": "bfloat16", "8bit": "8 bits"}
_BLOCK = 256


@dataclass(frozen=True)
class StateForm:
    """How a checkpoint holds the state of one parameter."""

    moments: frozenset[str]  # the names of its moments
    width: str  # "" for float32, "bf16" or "8bit"
    master: bool  # whether a float32 master stands beside them

    def decoded(self, values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same state in float32; without a master where there is none."""
        if not self.width:
            return dict(state)
        given = self.width if self.master or values.dtype == torch.float32 else f"stochastic {self.width}"
        whole = decode_state(values, state, given)
        return {of: tensor for of, tensor in whole.items() if of != "master" or self.master}

    def lost_in(self, other: StateForm) -> list[str]:
        """What a conversion into another form loses, in words."""
        lost = []
        if other.width and other.width != self.width:
            lost.append(f"moments are rounded from {_WORDS[self.width]} to {_WORDS[other.width]}")
        if self.master and not other.master:
            lost.append("masters go, and the values that are their roundings stay")
        return lost


def form_of(tensors: Mapping[str, torch.Tensor], shape: torch.Size) -> StateForm | None:
    """The form of state that can be converted, from its tensors, which may be on meta; None where it is another."""
    names = {of for of in tensors if of != "master" and not of.endswith(_ABSMAX)}
    widths = {_WIDTHS.get(tensors[of].dtype) for of in names}
    if names not in _KINDS or len(widths) != 1 or None in widths:
        return None
    width = str(widths.pop())
    wanted = dict.fromkeys(names, shape)
    if width == "8bit":
        wanted |= {of + _ABSMAX: torch.Size([-(-shape.numel() // _BLOCK)]) for of in names}
    if "master" in tensors:
        wanted["master"] = shape
    wide = [of for of in wanted if of not in names]
    if {of: tensor.shape for of, tensor in tensors.items()} != wanted:
        return None
    if any(tensors[of].dtype != torch.float32 for of in wide):
        return None
    return StateForm(frozenset(names), width, "master" in tensors)


def plain_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state tensors of an entry as a checkpoint has them, on meta: a master in place of a compact entry's parts."""
    found = {}
    for of, tensor in state.items():
        if of == "rest":
            found["master"] = torch.empty(tensor.shape, dtype=torch.float32, device="meta")
        elif of not in _MASTER_PARTS:
            found[of] = tensor
    return found


def plain_parts(values: torch.Tensor, state: Mapping[str, torch.Tensor], given: str) -> dict[str, torch.Tensor]:
    """The state of an entry of that format, or of a part of it, as a checkpoint has it: moments as they are."""
    plain = {of: tensor for of, tensor in state.items() if of not in _MASTER_PARTS}
    if "rest" in state:
        plain["master"] = decode_state(values, state, given)["master"]
        if "exp_avg_sq" in plain and plain["exp_avg_sq"].is_floating_point():
            # Its sign was the master's.
            plain["exp_avg_sq"] = plain["exp_avg_sq"].abs()
    return plain


def conversion_warning(where: object, pairs: Iterable[tuple[StateForm, StateForm]]) -> str | None:
    """What is said of a start from a checkpoint of other formats; None where nothing is converted."""
    changed = [(one, other) for one, other in pairs if one != other]
    if not changed:
        return None
    lost = list(dict.fromkeys(words for one, other in changed for words in one.lost_in(other)))
    end = "; ".join(lost) if lost else "nothing is lost"
    return (
        f"the state in the checkpoint {where} is in another format than this run's, and is converted for "
        f"{len(changed)} parameters: {end}"
    )
