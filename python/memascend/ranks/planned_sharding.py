"""Plans a run of several ranks from one process, with stand-ins for the others."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from memascend.errors import ConfigError
from memascend.planning.network import Network
from memascend.planning.units import find_units
from memascend.ranks.beginning import refuse_options
from memascend.ranks.rows import require_divisible
from memascend.ranks.units import units_of_gathers

if TYPE_CHECKING:
    from memascend.optimizers.update_rule import Arithmetic
    from memascend.planning.options import Options
    from memascend.planning.units import Unit


class PlannedSharding:
    """The rows of the first of some ranks, as `offload()` divides a model that nobody divided.

    It has the most, where rows cannot be divided evenly.

    Attributes:
        named: by the names of the model's parameters, on meta.
        network: what each rank sends and receives.
        world_size: the number of ranks.
    """

    # There is nobody to talk to.
    figures = None

    def __init__(self, model: torch.nn.Module, count: int, options: Options) -> None:
        """Divide a model on meta among `count` ranks; `options` are those of `offload()`.

        Raises:
            ConfigError: a parameter cannot be divided, or an option does not work with several ranks.
        """
        refuse_options(replace(options, units=None))
        self.world_size = count
        whole = dict(model.named_parameters())
        for name, parameter in whole.items():
            if not parameter.dim():
                raise ConfigError(f"{name} is a single number without rows, which fully_shard() does not divide")
        self.named = {name: _rows(parameter, count) for name, parameter in whole.items()}
        self._whole = {name: parameter.numel() for name, parameter in whole.items()}
        self._local = {id(parameter): self.named[name] for name, parameter in whole.items()}
        blocks = [unit for unit in find_units(model, units=options.unit_names) if unit.module and not unit.again]
        inside = {name for unit in blocks for name in unit.parameters}
        self._root = [name for name in whole if name not in inside]
        # In the order in which torch gathers.
        self._gathers = [("root", self._root), *((unit.name, unit.parameters) for unit in blocks)]
        self.network = self._network(count)

    def _network(self, count: int) -> Network:
        values = {name: self._nbytes(name) for name in self.named}
        gradients = {name: nbytes for name, nbytes in values.items() if self.named[name].requires_grad}
        of_blocks = [sum(values[name] for name in names) for name, names in self._gathers if name != "root"]
        of_gradients = [sum(gradients.get(name, 0) for name in names) for _, names in self._gathers]
        root = sum(values[name] for name in self._root)
        others = count - 1
        return Network(
            forward=others * sum(values.values()),
            backward=others * (sum(values.values()) - root),
            gradients=others * sum(gradients.values()),
            # Each rank has as many rows of what is gathered as the first.
            gathered=count * (root + 2 * max(of_blocks, default=0) + 2 * max(of_gradients, default=0)),
        )

    def _nbytes(self, name: str) -> int:
        return self.named[name].nbytes

    def stand_in(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """An optimizer like this one, of the rows."""
        made = copy.copy(optimizer)
        made.param_groups = [
            {**group, "params": [self._local[id(one)] for one in group["params"]]} for group in optimizer.param_groups
        ]
        return made

    def units(self) -> tuple[Unit, ...]:
        """What is gathered together."""
        return units_of_gathers(self._gathers, self.named)

    @property
    def first_elements(self) -> dict[str, int]:
        """Where in the whole parameters the rows begin, by name."""
        return dict.fromkeys(self.named, 0)

    def require_by_rows(self, arithmetic: Arithmetic) -> None:
        """Refuse what needs more than rows."""
        # The rank after the first begins where that one's rows end.
        firsts = {name: rows.numel() if rows.numel() < self._whole[name] else 0 for name, rows in self.named.items()}
        require_divisible(arithmetic, self.named, firsts)

    def elements(self) -> dict[int, int]:
        """How many elements the parameters have whose rows these are, by the rows' ids."""
        return {id(rows): self._whole[name] for name, rows in self.named.items()}

    def local_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The rows of a parameter of the model."""
        return self._local.get(id(parameter), parameter)


def _rows(parameter: torch.nn.Parameter, count: int) -> torch.nn.Parameter:
    shape = (-(-parameter.shape[0] // count), *parameter.shape[1:])
    rows = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return torch.nn.Parameter(rows, requires_grad=parameter.requires_grad)
