"""Measures DeepSpeed's NVMe optimizer swapper with the smallest number of buffers that works."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks.peers.environment import Peer
from memascend.errors import ConfigError
from memascend.text import Closing

if TYPE_CHECKING:
    from pathlib import Path

    import torch

# The numbers of swap buffers to try. The Adam state and the gradient of one parameter take four buffers. At the same
# time, the pipeline reads the state and gradient of the next parameter, and writes the state and gradient of the
# previous parameter. The swapper has failed with eight buffers.
_BUFFERS = range(9, 17)
# The largest allowed mean difference between the swapper's sample and memascend's sample, relative to the mean
# magnitude of memascend's sample. Even with equal arithmetic, a few values are rounded to another bf16 number. A
# swapper that misses a step differs by ten times this number or more.
DIFFERENCE_MAX = 1e-4


class Swapper(Closing):
    """Runs DeepSpeed's swapper on the parameters of `bag`, with the first number of `_BUFFERS` that works.

    Raises:
        ConfigError: DeepSpeed did not start, or the swapper failed with each number of buffers in `_BUFFERS`.
    """

    def __init__(self, python: Path, folder: Path, numel: int) -> None:
        self._last: dict[str, Any] = {}
        error = "the swapper was not started"
        for buffers in _BUFFERS:
            peer = None
            try:
                peer = Peer(python, "benchmarks.peers.nvme_update", folder, numel, buffers)
                # The swapper works if two steps succeed: the first step creates its state, and the second step reads
                # the state.
                self._early = [json.loads(peer.ask("step"))["seconds"] for _ in range(2)]
            except ConfigError as failed:
                error = str(failed)
                if peer is None:
                    break
                peer.close()
                continue
            self._peer, self.buffers = peer, buffers
            return
        raise ConfigError(f"DeepSpeed's swapper could not be measured with up to {buffers} swap buffers: {error}")

    def step(self) -> float:
        """Makes a step and returns its seconds.

        The first two calls return the seconds of the two steps in `__init__`.
        """
        if self._early:
            return float(self._early.pop(0))
        self._last = json.loads(self._peer.ask("step"))
        return float(self._last["seconds"])

    def compared(self, sample: torch.Tensor) -> dict[str, Any]:
        """Returns the swapper's memory; {"error": ...} if its parameters differ by more than `DIFFERENCE_MAX`.

        `sample` has the first values of memascend's first parameter after the same number of steps.
        """
        import torch

        theirs = torch.tensor(self._last["sample"])
        difference = ((theirs - sample).abs().mean() / sample.abs().mean()).item()
        if not difference <= DIFFERENCE_MAX:
            return {"error": f"its parameters differ from ours by {difference:.1e} of their mean, which is too much"}
        return {
            "buffers": self.buffers,
            "swap_buffer_bytes": self._last["swap_buffer_bytes"],
            "added_bytes": self._last["added_bytes"],
            "difference": difference,
        }

    def close(self) -> None:
        """Ends the swapper's process."""
        self._peer.close()
