"""Measures DeepSpeed's NVMe optimizer swapper beside our update, with the fewest buffers that work."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks.peers.environment import Peer
from memascend.errors import ConfigError
from memascend.text import Closing

if TYPE_CHECKING:
    from pathlib import Path

    import torch

# The numbers of swap buffers to try. A parameter's Adam state and gradient take four buffers. The pipeline also reads
# the state and gradient of the next parameter, and writes those of the previous parameter. With eight buffers the
# swapper was seen to fail.
_BUFFERS = range(9, 17)
# The largest permitted mean difference of the swapper's sample from ours, relative to our sample's mean magnitude. Even
# with the same arithmetic, a few values are rounded to a neighbour in bf16. A missing step makes ten times this
# difference or more.
DIFFERENCE_MAX = 1e-4


class Swapper(Closing):
    """Runs DeepSpeed's swapper on the parameters of `bag`.

    Raises:
        ConfigError: the swapper works with none of the numbers of buffers that were tried.
    """

    def __init__(self, python: Path, folder: Path, numel: int) -> None:
        self._last: dict[str, Any] = {}
        error = "nothing was tried"
        for buffers in _BUFFERS:
            peer = None
            try:
                peer = Peer(python, "benchmarks.peers.nvme_update", folder, numel, buffers)
                # Two steps show whether the swapper works: the first creates its state, the second reads it.
                self._early = [json.loads(peer.ask("step"))["seconds"] for _ in range(2)]
            except ConfigError as failed:
                error = str(failed)
                if peer is None:
                    break
                peer.close()
                continue
            self._peer, self.buffers = peer, buffers
            return
        raise ConfigError(f"{error} (with up to {buffers} swap buffers)")

    def step(self) -> float:
        """Makes a step and returns its seconds. The first two calls return the seconds of the steps in `__init__`."""
        if self._early:
            return float(self._early.pop(0))
        self._last = json.loads(self._peer.ask("step"))
        return float(self._last["seconds"])

    def compared(self, sample: torch.Tensor) -> dict[str, Any]:
        """Returns the swapper's memory, or an error if its parameters differ from ours.

        `sample` has the first values of our parameters after as many steps.
        """
        import torch

        theirs = torch.tensor(self._last["sample"])
        difference = ((theirs - sample).abs().mean() / sample.abs().mean()).item()
        if not difference <= DIFFERENCE_MAX:
            return {"error": f"its parameters differ from ours by {difference:.1e}, relative to their mean"}
        return {
            "buffers": self.buffers,
            "swap_buffer_bytes": self._last["swap_buffer_bytes"],
            "added_bytes": self._last["added_bytes"],
            "difference": difference,
        }

    def close(self) -> None:
        """Ends the process."""
        self._peer.close()
