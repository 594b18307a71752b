"""An optimizer callback for ms-swift: `--optimizer memascend --optim_args storage=run.store,host_memory=48GiB`.

`--external_plugins` takes the path of this file. It is not named swift.py, since ms-swift puts its folder in front of
the path of modules, where worker processes look for `swift` itself.
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
    """Offloads what ms-swift's Trainer trains, with the optimizer that its arguments name."""

    def __init__(self, args: Any, trainer: Any) -> None:
        """Read the options; the Trainer is only being made, and is whole when it begins to train."""
        super().__init__(args, trainer)
        self._options = _options(args.optim_args)
        trainer.train = self._train

    def _train(self, *given: Any, **named: Any) -> Any:
        trainer = self.trainer
        # From here on the method is the Trainer's own, which offload() stands in for.
        del trainer.train
        # They are our options, and say nothing of the run.
        trainer.args.optim_args = None
        optimizer = offload(trainer, **self._options)
        if optimizer is not None:
            # The Trainer's own would give it another list of groups.
            trainer.create_optimizer = lambda **_: optimizer
        return trainer.train(*given, **named)


def _options(text: str | None) -> dict[str, Any]:
    """`name=value,name=value`, with values as YAML has them."""
    try:
        found = yaml.safe_load("{" + re.sub(r"(^|,)\s*(\w+)\s*=", r"\1\2: ", text or "") + "}")
    except yaml.YAMLError as error:
        raise ConfigError(f"optim_args is name=value,name=value for memascend, not {text!r}") from error
    return options_of(found)


optimizers_map["memascend"] = MemascendOptimizer
