"""Recognize the records and outcomes of runs whose GPUs were simulated on a CPU (tests/simulated_gpu)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

# The variable that makes the tests' Python simulate GPUs. Its value describes them.
SIMULATED_GPUS = "ZERO_STUDY_SIMULATED_GPUS"
SIMULATED = "simulated "  # comes before the names of simulated GPUs


def is_simulated(machine: Mapping[str, Any]) -> bool:
    """Return whether a recorded machine had simulated GPUs, so that its runs measured no real GPU."""
    return SIMULATED_GPUS in machine.get("environment", {})


def simulates_gpus() -> bool:
    """Return whether this process, and therefore every run that it starts, simulates GPUs."""
    return SIMULATED_GPUS in os.environ
