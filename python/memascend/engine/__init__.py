"""The public name of `memascend.storage`: `memascend.engine.Store`, `Engine` and what belongs to them."""

from memascend.storage import *  # noqa: F403
