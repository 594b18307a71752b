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

# Adam's state and gradient of a parameter take four; pipelined it reads those of the next and writes those of the last
# one meanwhile. Eight were seen to fail.
_BUFFERS = range(9, 17)
# Mean difference of the sample, relative to its mean size. The same arithmetic rounds a few values to a neighbour in
# bf16; a step that is missing is ten times as much and more.
DIFFERENCE_MAX = 1e-4


class Swapper(Closing):
    """DeepSpeed at the same bag of parameters.

    Raises:
        ConfigError: it runs with no number of buffers.
    """

    def __init__(self, python: Path, folder: Path, numel: int) -> None:
        self._last: dict[str, Any] = {}
        error = "nothing was tried"
        for buffers in _BUFFERS:
            peer = None
            try:
                peer = Peer(python, "benchmarks.peers.nvme_update", folder, numel, buffers)
                # Two steps show whether it runs: the first makes its state, the second reads it.
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
        """Seconds of a step; the two that were made at the start count as the first two of ours."""
        if self._early:
            return float(self._early.pop(0))
        self._last = json.loads(self._peer.ask("step"))
        return float(self._last["seconds"])

    def compared(self, sample: torch.Tensor) -> dict[str, Any]:
        """What it took, if its parameters are ours after as many steps: else an error."""
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
        """End its process."""
        self._peer.close()
