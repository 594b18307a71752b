"""Re-exports `memascend.storage` under its public name, as `memascend.engine.Store` and `memascend.engine.Engine`."""

from memascend.storage import *  # noqa: F403
