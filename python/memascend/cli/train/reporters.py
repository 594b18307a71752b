"""Passes the figures of a run on to TensorBoard and Weights & Biases, where these are installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Reporter(Protocol):
    """One of them."""

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of a step."""

    def close(self) -> None:
        """Nothing more comes."""


def require_reporters(names: Sequence[str]) -> None:
    """Refuse those that are not installed, before anything is done.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        try:
            if name == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter  # noqa: F401
            else:
                import wandb  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--report {name} needs it: pip install {name}") from error


def open_reporters(names: Sequence[str], folder: Path, run: str, options: Mapping[str, Any]) -> list[Reporter]:
    """Those that were asked for, which write to `folder`; a run that goes on has the same name in `run`."""
    found: list[Reporter] = []
    if "tensorboard" in names:
        found.append(_TensorBoard(folder))
    if "wandb" in names:
        found.append(_Wandb(folder, run, options))
    return found


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"train/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, run: str, options: Mapping[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(dir=str(folder), id=run, resume="allow", config=dict(options))

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()
