"""Reads what is said of a machine: its GPU, its drive; the figures that are assumed of its memory stand here."""

from __future__ import annotations

import re

from memascend.cli.plan.cards import CARDS, DRIVES, Gpu
from memascend.errors import ConfigError
from memascend.planning.costs import Drive

_GB = 10**9

# Python, torch and transformers in host memory, before there is a model.
IMPORTS = 740 << 20
# Terabytes written that consumer drives are warranted for, for each terabyte of size; those of servers have 2 to 10
# times as much.
ENDURANCE_PER_TB = 600


def parse_gpu(text: str) -> Gpu:
    """A name, or TFLOPS,GB,PCIE_GB_S: the peak of dense 16-bit products, the memory, the link's speed one way.

    Raises:
        ConfigError: it is neither.
    """
    plain = re.sub(r"^(nvidia|geforce|amd|instinct|rtx|\s|-)*", "", text.lower())
    known = CARDS.get(plain) or CARDS.get(plain.replace(" ", "").replace("-", ""))
    if known is not None:
        return known
    try:
        tflops, memory, link = _positive(text, 3)
    except ValueError as error:
        raise ConfigError(
            f"--gpu is one of {', '.join(CARDS)}, or TFLOPS,GB,PCIE_GB_S as 165,24,25, and not {text!r}"
        ) from error
    return Gpu(f"GPU of {tflops:g} TFLOPS and {memory:g} GB", tflops, int(memory * _GB), link * _GB)


def parse_drive(text: str) -> Drive:
    """READ,WRITE in GB/s, of all devices together, as they last: not a cache's speed; or a kind of drive by name.

    Raises:
        ConfigError: it is not that.
    """
    known = DRIVES.get(text.lower().replace(" ", ""))
    if known is not None:
        return known
    try:
        read, write = _positive(text, 2)
    except ValueError as error:
        raise ConfigError(f"--drive is {', '.join(DRIVES)}, or READ,WRITE in GB/s, as 5,4, and not {text!r}") from error
    return Drive(read=read * _GB, write=write * _GB)


def _positive(text: str, count: int) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if len(values) != count or not all(0 < value < float("inf") for value in values):
        raise ValueError(text)
    return values
