"""What does a file of results begin with? What was run, when and where; no path of the machine."""

from __future__ import annotations

import datetime
from typing import Any

from study.records import machine


def header(benchmark: str, command: str) -> dict[str, Any]:
    """The first keys of a file of results. Imports torch, for the machine."""
    return {
        "benchmark": benchmark,
        "command": command,
        "finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
    }
