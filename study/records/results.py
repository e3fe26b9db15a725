"""What does a file of results begin with? What was run, when and where; no path of the machine."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
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


def command_line(program: str, options: Mapping[str, Any]) -> str:
    """A program with its options, without its output, its slots and the machine's folders."""
    words = [program]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif name not in ("output", "minutes") and value not in (None, False):
            words += [flag, "DIR" if isinstance(value, Path) else str(value)]
    return " ".join(words)
