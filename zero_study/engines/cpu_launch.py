"""Suggest how to start a script that failed because it was started in the wrong way.

This happens mostly on CPUs. accelerate selects the backend of communication by the GPUs that it finds. Without a GPU, a
program under DeepSpeed has to select gloo itself, and the distributed type MULTI_CPU starts several processes only with
mpirun.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence

GLOO = (
    'kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] to Accelerator. A script with transformers\' Trainer '
    'has to call accelerate.PartialState(backend="gloo") first, and pass '
    'accelerator_config={"use_configured_state": True} to TrainingArguments'
)
DEEPSPEED = (
    "There is no GPU, and accelerate does not select gloo by itself under DeepSpeed, so the processes "
    f"cannot connect. In the script, pass {GLOO}."
)
OF_FILE = f"This machine has no GPU. To train with this file on its CPU, the script has to pass {GLOO}."
MULTI_CPU = (
    "Without mpirun, MULTI_CPU starts only one process. To start several processes on CPUs, write "
    "distributed_type: MULTI_GPU in the accelerate file and Accelerator(cpu=True) in the script."
)


_OF_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # variables that every launcher sets for its processes


def lacks_launcher(error: BaseException, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a script failed because no launcher started it, so that environment variables are missing."""
    if "RANK" in environment:
        return False
    return (
        "environment variable RANK expected" in str(error)  # torch.distributed
        or (isinstance(error, KeyError) and error.args[:1] in [(name,) for name in _OF_LAUNCHER])
        # DeepSpeed, which would learn the ranks from MPI.
        or (isinstance(error, ModuleNotFoundError) and error.name == "mpi4py")
    )


def launch_advice(words: Sequence[str]) -> str:
    """Return sentences that say how to start a script with a launcher.

    `words` are what Python was started with: a module, its options and a script.
    """
    import torch

    number = torch.accelerator.device_count() if torch.accelerator.is_available() else 2
    command = shlex.join(["torchrun", "--standalone", "--nproc-per-node", str(number), *words])
    return f"The script creates a process group, so it needs a launcher. Start it with `{command}`."


def remedy(error: BaseException, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return how to start a script that failed because of how it was started. None if it failed for another reason.

    The processes do not find each other if accelerate's launcher started several of them for DeepSpeed, no GPU is
    visible, and accelerate has not found the others.
    """
    is_deepspeed = environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    size = environment.get("WORLD_SIZE", "1")
    if not (is_deepspeed and size.isdigit() and int(size) > 1):
        return None
    import torch

    return None if torch.accelerator.is_available() or _num_processes() == int(size) else DEEPSPEED


def _num_processes() -> int:
    """Return the number of processes of the training that accelerate sees, or else of the process group.

    DeepSpeed may have created the group after accelerate had found no other process.
    """
    import torch.distributed as dist

    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    known = getattr(state, "_shared_state", {}).get("num_processes")
    if isinstance(known, int):
        return known
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
