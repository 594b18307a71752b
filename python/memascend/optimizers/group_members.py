"""Refuses parameter groups that have other parameters than when the run began."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class GroupMembers:
    """Which parameters each group has. By that it was decided what is updated, and with which options."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        """They are those of `groups` now."""
        self._groups = groups
        self._members: list[list[torch.Tensor]] = [list(group["params"]) for group in groups]

    def require_same(self, groups: Sequence[dict[str, Any]]) -> None:
        """Look at the groups that an optimizer has now.

        Raises:
            UsageError: they are others, or have other parameters.
        """
        found = [group["params"] for group in groups]
        if groups is self._groups and len(found) == len(self._members) and all(map(_are_same, found, self._members)):
            return
        had = ", ".join(str(len(members)) for members in self._members)
        has = ", ".join(str(len(params)) for params in found) or "no"
        raise UsageError(
            "optimizer.param_groups has other groups, or other parameters in them, than at offload() "
            f"({has} parameters, and had {had}), by which updates go: put "
            "them back and call zero_grad(); freeze parameters with requires_grad_(False), set the options of a group "
            "in place, and for other groups save() and offload() anew"
        )


def _are_same(params: Sequence[torch.Tensor], members: Sequence[torch.Tensor]) -> bool:
    return len(params) == len(members) and all(one is other for one, other in zip(params, members, strict=True))
