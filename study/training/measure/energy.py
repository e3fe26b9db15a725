"""How much energy has a GPU used?"""

from __future__ import annotations

import torch

from study.training.measure.memory import nvml_handle


def energy_joules(device: torch.device) -> float | None:
    """Joules that the whole GPU has used since its driver was loaded (NVML); None where there is no such counter.

    To be read before and after what is measured. Other processes on the same GPU count too.
    """
    if device.type != "cuda":
        return None
    import pynvml

    try:
        millijoules: int = pynvml.nvmlDeviceGetTotalEnergyConsumption(nvml_handle(device))
        return millijoules / 1000
    except pynvml.NVMLError:  # not on this GPU, or not permitted: unknown
        return None
