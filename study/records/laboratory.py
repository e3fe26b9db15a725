"""Read the network rate of a laboratory: machines simulated on one computer (tools/measure/laboratory.py)."""

from __future__ import annotations

import math
import re

# A laboratory sets this variable for everything that runs on its machines: the rate of their network.
LABORATORY = "ZERO_STUDY_LABORATORY"
UNLIMITED = "unlimited"

_RATE = re.compile(r"([1-9]\d{0,9})(kbit|mbit|gbit)")
_BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def bits_per_second(rate: str) -> float | None:
    """Convert a rate such as "200mbit" to bits per second: infinity for "unlimited", None for any other text."""
    if match := _RATE.fullmatch(rate):
        return float(int(match[1]) * _BITS[match[2]])
    return math.inf if rate == UNLIMITED else None
