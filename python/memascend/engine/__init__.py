"""Re-exports `memascend.storage` under its public name `memascend.engine`."""

from memascend.storage import *  # noqa: F403
