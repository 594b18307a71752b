"""Defines one line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was looked at, what was found, and what to do about it."""

    subject: str
    found: str
    verdict: Literal["fine", "slower", "fails"] = "fine"
    advice: str = ""
