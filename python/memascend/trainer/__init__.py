"""Any Trainer of transformers, TRL or sentence-transformers in one line, which goes on after a kill at any moment."""

from memascend.trainer.callback import Callback  # first: it says what to install

from memascend.trainer.attach import offload  # isort: skip
from memascend.trainer.loading import loading  # isort: skip

__all__ = ["Callback", "loading", "offload"]
