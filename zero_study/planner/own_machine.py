"""Describe the machine on which the planner runs, as options of `zero-study advise`: GPUs, host memory and cores."""

from __future__ import annotations

import importlib.util
from typing import Any

from zero_study.command_line import given
from zero_study.engines import this_machine
from zero_study.engines.this_machine import Machine
from zero_study.errors import Refusal
from zero_study.theory import hardware

# NVIDIA's driver reports the memory of a whole GPU within this share of it. Some cards are sold with more memory.
SAME_MEMORY = 0.1


def options(requested: dict[str, Any]) -> dict[str, Any]:
    """Return the user's options, completed with those that describe this machine.

    The options are those of `Request`. Raises Refusal if the package that finds GPUs is missing, if this machine has no
    GPU, or if the planner does not know its GPU and the options do not describe it.
    """
    if importlib.util.find_spec("pynvml") is None:
        raise Refusal(
            "--this-machine needs the package nvidia-ml-py, which is not installed. Run "
            "`pip install nvidia-ml-py`. Or name a GPU with --gpu, and say how many with --gpus."
        )
    machine = this_machine.find()
    found = len(machine.gpu_memory_bytes)
    if not found:
        raise Refusal(
            "--this-machine: no GPU was found here. NVIDIA's driver may be missing, or CUDA_VISIBLE_DEVICES may hide "
            "the GPUs. Name a GPU with --gpu instead, and say how many with --gpus."
        )
    cores = this_machine.usable_cores()
    of_machine = {
        "host_memory": machine.host_memory_bytes / 2**30,
        "host_cores": None if cores is None else max(1, int(cores)),
        **_gpu(machine, requested),
        "num_gpus": found,
    }
    if (requested["num_gpus"] or found) > found:  # several machines such as this one
        of_machine["gpus_per_node"] = found
    return {**requested, **of_machine, **given(requested)}


def _gpu(machine: Machine, requested: dict[str, Any]) -> dict[str, Any]:
    """Return the options that describe a GPU of this machine."""
    if requested["gpu"] is not None:
        return {}
    if machine.gpu_name is None:
        raise Refusal(
            "--this-machine: the GPUs of this machine are of several kinds, and the planner knows only machines with "
            "GPUs of one kind. Choose GPUs of one kind with CUDA_VISIBLE_DEVICES, or name one with --gpu."
        )
    gibibytes = min(machine.gpu_memory_bytes) / 2**30
    known = hardware.find(machine.gpu_name)
    if known is None:
        if requested["gpu_tflops"] is None or requested["gpu_bandwidth"] is None:
            raise Refusal(
                f"--this-machine: the planner does not know the GPU {machine.gpu_name}. It has {gibibytes:.1f} GiB. "
                "Add its rates with --gpu-tflops and --gpu-bandwidth, or name a similar GPU with --gpu."
            )
        return {"gpu_memory": gibibytes}
    is_usual = abs(gibibytes * 2**30 / known.memory_bytes - 1) <= SAME_MEMORY
    return {"gpu": known.name, **({} if is_usual else {"gpu_memory": gibibytes})}
