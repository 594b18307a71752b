"""Offloads a model that ms-swift trains: `--optimizer memascend --optim_args storage=run.store,host_memory=48GiB`.

`--external_plugins` takes the path of this file. ms-swift puts the folder of this file first in `sys.path`. So this
file must not be named swift.py: worker processes would import it in place of ms-swift's package `swift`.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from swift.optimizers import OptimizerCallback, optimizers_map

from memascend.errors import ConfigError
from memascend.integrations import offload, options_of

__all__ = ["MemascendOptimizer"]


class MemascendOptimizer(OptimizerCallback):  # type: ignore[misc]
    """Offloads model and optimizer of ms-swift's Trainer when it begins to train."""

    def __init__(self, args: Any, trainer: Any) -> None:
        """Reads the options. Replaces `trainer.train` by `_train`, because the Trainer is not complete yet.

        `_train` offloads first, and then trains.
        """
        super().__init__(args, trainer)
        self._options = _options(args.optim_args)
        trainer.train = self._train

    def _train(self, *given: Any, **named: Any) -> Any:
        trainer = self.trainer
        # Remove the replacement, so that offload() below finds and replaces the Trainer's own train().
        del trainer.train
        # Remove memascend's options from the Trainer's arguments: otherwise a resume would compare them as arguments of
        # the run.
        trainer.args.optim_args = None
        optimizer = offload(trainer, **self._options)
        if optimizer is not None:
            # ms-swift's create_optimizer() would replace the optimizer's list of groups.
            trainer.create_optimizer = lambda **_: optimizer
        return trainer.train(*given, **named)


def _options(text: str | None) -> dict[str, Any]:
    """Parses `name=value,name=value`, with YAML values, and checks the options."""
    try:
        found = yaml.safe_load("{" + re.sub(r"(^|,)\s*(\w+)\s*=", r"\1\2: ", text or "") + "}")
    except yaml.YAMLError as error:
        raise ConfigError(
            f"memascend cannot read optim_args {text!r}: pass name=value,name=value, where each value is valid YAML"
        ) from error
    return options_of(found)


optimizers_map["memascend"] = MemascendOptimizer
