"""The table of the simulated GPUs, which the stand-ins of torch and of NVML read from an environment variable."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

# The study records this variable, and refuses to merge records that have it.
VARIABLE = "ZERO_STUDY_SIMULATED_GPUS"

CONTEXT_BYTES = 500 << 20  # what a CUDA context takes of a GPU beside the allocator
WATTS = 400.0


@dataclass(frozen=True)
class SimulatedGpu:
    """The properties of one simulated GPU."""

    index: int
    name: str
    total_memory: int  # bytes
    capability: tuple[int, int]

    @property
    def uuid(self) -> str:
        return f"5eed0000-0000-4000-8000-{self.index:012d}"


def table() -> list[SimulatedGpu]:
    """Return the GPUs of this machine in the driver's order."""
    content = json.loads(os.environ[VARIABLE])
    name, memory, capability = content["name"], content["memory_bytes"], tuple(content.get("capability", (9, 0)))
    return [SimulatedGpu(index, name, memory, capability) for index in range(content.get("count", 1))]


def visible() -> list[SimulatedGpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows, in its order, as CUDA does."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = table()
    if allowed is None:
        return gpus
    chosen = []
    for word in (word.strip() for word in allowed.split(",")):
        matching = [gpu for gpu in gpus if word == str(gpu.index) or (word and f"GPU-{gpu.uuid}".startswith(word))]
        if not matching:
            break
        chosen.append(matching[0])
    return chosen
