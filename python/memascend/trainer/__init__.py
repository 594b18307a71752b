"""Offloads any Trainer of transformers, TRL or sentence-transformers with one call; a killed run resumes exactly."""

from memascend.trainer.callback import Callback  # first: its ImportError names the packages to install

from memascend.trainer.attach import offload  # isort: skip
from memascend.trainer.loading import loading  # isort: skip

__all__ = ["Callback", "loading", "offload"]
