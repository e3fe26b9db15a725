"""Does this installation train what it says? Its matrix, as one JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from study.engines import extensions
from study.engines.conformance import releases, start_probe
from study.engines.conformance.cells import Cell
from study.engines.conformance.judge import References, judge

PACKAGES = ("torch", "deepspeed", "accelerate")

# DeepSpeed's extensions, and the word in the names of the engines that load them.
NEEDED = {"deepspeed_shm_comm": "zero", "cpu_adam": "offload", "async_io": "nvme"}

# An engine that cannot do something and says so, in the words of Python; anything else is a crash.
REFUSALS = ("AssertionError", "NotImplementedError", "NotOffered", "ValueError", "DeepSpeedConfigError")
MESSAGE_LENGTH = 300


def examine(
    cells: Sequence[Cell], say: Callable[[str], None] = print, *, chosen: Mapping[str, str] | None = None, **how: Any
) -> dict[str, Any]:
    """Train every cell and judge it: same, wrong, refused (the engine said that it cannot) or crashed.

    `chosen`: releases to take in place of those installed, by package. `how` is passed on to `start_probe.train`.
    """
    chosen = chosen or {}
    how.setdefault("environment", _environment(cells, chosen))
    began = time.monotonic()
    references = References()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        failures = start_probe.train(cells, Path(scratch), say=say, **how)
        trained = time.monotonic()
        say("holding them against the reference ...")
        for number, cell in enumerate(cells):
            if cell in failures:
                found[cell.name] = failed(failures[cell])
            else:
                paths = start_probe.traces(Path(scratch), number, cell.num_ranks)
                left = [torch.load(path, weights_only=True) for path in paths]
                found[cell.name] = judge(cell, references.of(cell), left)
    return {
        "versions": {**installed(), **chosen},
        "python": platform.python_version(),
        "num_cores": os.cpu_count(),
        "examined_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": {"training": round(trained - began), "judging": round(time.monotonic() - trained)},
        "cells": found,
    }


def _environment(cells: Sequence[Cell], chosen: Mapping[str, str]) -> dict[str, str]:
    """What the processes that train are started with. Raises Refusal where a release or an extension is missing."""
    engines = {cell.engine for cell in cells}
    if not {"torch", "deepspeed"} & set(chosen):  # whose extensions are their own
        extensions.use_own_folder()
        extensions.check({name for name, word in NEEDED.items() if any(word in engine for engine in engines)})
    return releases.environment(chosen, engines) if chosen else dict(os.environ)


def failed(failure: start_probe.Failure) -> dict[str, Any]:
    """The verdict on a cell that was not trained to its end."""
    kind, _, message = failure.message.partition(": ")
    refused = failure.stage != "ended" and kind in REFUSALS and bool(message)
    return {
        "verdict": "refused" if refused else "crashed",
        "stage": failure.stage,
        "message": failure.message[:MESSAGE_LENGTH],
    }


def installed() -> dict[str, str]:
    """The versions of the engines, of those that are there."""
    there = {}
    for name in PACKAGES:
        try:
            there[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return there
