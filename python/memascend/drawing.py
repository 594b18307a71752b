"""Opens matplotlib for pictures, and defines the colours that they share."""

from __future__ import annotations

from typing import Any

from memascend.errors import ConfigError

# In every picture: what memascend has, and what the same training has in memory.
OURS, IN_MEMORY = "#0b6bcb", "#57606a"


def open_pyplot() -> Any:
    """`matplotlib.pyplot`, which draws into files and opens no window.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install 'memascend[plot]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
