"""Offloads a Trainer of transformers, TRL or sentence-transformers with one call. Resumes a killed run exactly."""

from memascend.trainer.callback import Callback  # keep this import first: its ImportError names the packages to install

from memascend.trainer.attach import offload  # isort: skip
from memascend.trainer.loading import loading  # isort: skip

__all__ = ["Callback", "loading", "offload"]
