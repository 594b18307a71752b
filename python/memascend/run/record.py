"""Collects what a commit records besides parameters: buffers, group options, loss scale and user_state."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError
from memascend.optimizers.group_options import options_of

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from memascend.checkpoint.buffers import Buffers
    from memascend.engine import Store
    from memascend.gradients.loss_scale import LossScale
    from memascend.optimizers.update_rule import Arithmetic
    from memascend.run.position import Position

_USER_BYTES_MAX = 64 << 10


class Record:
    """What is committed with a step, and where the run stands."""

    def __init__(
        self, store: Store, position: Position, buffers: Buffers, arithmetic: Arithmetic, scale: LossScale
    ) -> None:
        self._store = store
        self.position = position
        self.buffers = buffers
        # The optimizer's own, which a scheduler changes.
        self.groups = arithmetic.optimizer.param_groups
        self.shared = arithmetic.shared
        self._seed = arithmetic.seeded()
        self.scale = scale
        self.user_state: Any = store.user_state

    def hyperparameters(self) -> dict[str, Any]:
        """The groups' options, attributes of the optimizer that its steps change, and the loss scale, as JSON."""
        found = {"groups": [options_of(group) for group in self.groups], "loss_scale": self.scale.state()}
        attributes = self.shared.attributes()
        line = self.position.line
        return {
            **found,
            **({"attributes": attributes} if attributes else {}),
            **self._seed,
            **({} if line is None else {"line": line}),
        }

    def set_user_state(self, value: Any) -> None:
        """Keep a JSON value for the next commit."""
        try:
            size = len(json.dumps(value).encode())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"user_state must be a JSON value: {error}") from error
        if size > _USER_BYTES_MAX:
            raise ConfigError(f"user_state has {size} bytes as JSON, at most {_USER_BYTES_MAX} are kept")
        self.user_state = value

    def find(self, state_dict: Mapping[str, Any]) -> str | os.PathLike[str] | None:
        """The checkpoint to go back to for an optimizer's state dict; None where the store holds its step.

        Raises:
            UsageError: it is of another step, and no checkpoint of that is at hand.
            ValueError: it has other groups.
        """
        found = self.position.find(state_dict.get("memascend"))
        lengths = [len(group["params"]) for group in self.groups]
        if [len(group["params"]) for group in state_dict["param_groups"]] != lengths:
            raise ValueError("loaded state dict has other parameter groups than the optimizer")
        return found

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says of the run."""
        optimizer = self._store.info()["optimizer"]
        return {
            **self.position.identity(),
            **self.hyperparameters(),
            "user_state": self.user_state,
            "optimizer": optimizer,
        }
