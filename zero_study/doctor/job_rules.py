"""Judge how many processes a line of a job file starts, and whether they find each other.

We measured the effects with accelerate 1.15 and PyTorch 2.13, in two shells that stood for two pods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..engines.keys.patterns import ABSENT
from .config_files import AccelerateFile
from .findings import Effect, Finding
from .job_files import Launch, number

# The flags of accelerate in a pod of Kubeflow Trainer.
IN_POD = (
    '--num_machines "$PET_NNODES" --num_processes $((PET_NNODES * PET_NPROC_PER_NODE)) '
    '--machine_rank "$PET_NODE_RANK" --main_process_ip "$PET_MASTER_ADDR" --main_process_port "$PET_MASTER_PORT"'
)
_ACCELERATE = (
    "--num_machines {nodes} --num_processes (processes on all nodes together) --machine_rank (number of the node) "
    "--main_process_ip (address of the first node) --main_process_port 29500"
)
# The keys of accelerate that are judged although flags set them. accelerate reads flags by other rules than its file.
OF_NODES = frozenset({
    "num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port",
    "deepspeed_config.deepspeed_multinode_launcher",
})  # fmt: skip
# The options that make one training of several nodes: the number of nodes, and the number of the node.
_OPTIONS = {
    "accelerate": ("num_machines", "machine_rank", f"Pass {_ACCELERATE}."),
    "torchrun": (
        "nnodes", "node_rank",
        "Pass --nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint (address of the first node):29500.",
    ),
    "deepspeed": (
        "hostfile", "node_rank",
        "Start this line on one node with --hostfile, or pass --no_ssh --node_rank (number of the node) --master_addr "
        "(address of the first node) --hostfile on every node.",
    ),
}  # fmt: skip
_RANKS = (
    "Pass $PET_NODE_RANK, $SKYPILOT_NODE_RANK or $SLURM_NODEID. For Slurm, write srun bash -c '...', because the first "
    "node fills in the variables that are not in single quotes before srun starts the line."
)


def findings(path: str, launch: Launch, content: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is wrong with a line, also if it is correct on one node.

    `content` has the settings of accelerate, from its file and its flags. What only the running job knows is not
    judged.
    """
    if not launch.is_complete:
        return
    flags, settings = launch.flags, AccelerateFile(content)
    is_accelerate, processes = launch.program == "accelerate", content.get("num_processes")
    of_nodes, of_rank, remedy = _OPTIONS[launch.program]
    pet = {name[4:].lower(): value for name, value in launch.variables.items() if name.startswith("PET_")}
    pods = number(pet.get("nnodes")) or 1
    given = {**(content if is_accelerate else pet), **flags}
    machines, rank = (number(given.get(name, 0)) for name in (of_nodes, of_rank))
    if "standalone" in flags or machines == 0:
        machines = 1
    # Without an engine, accelerate starts one process, unless it finds several GPUs.
    is_single = is_accelerate and settings.kind == "NO" and (number(pet.get("nproc_per_node")) or 1) == 1
    key, nodes = of_nodes, max(launch.nodes, pods)
    effect: Effect = "means something else"
    remedy = f"Pass {IN_POD}." if is_accelerate and pods > 1 else remedy.format(nodes=nodes)
    if nodes > 1 and machines == 1 and (is_single or not is_accelerate or pods == 1):
        message = (
            f"{nodes} nodes run this line, and on each of them it starts a training of its own. The trainings do not "
            "exchange gradients, and every launch ends with exit status 0."
        )
    elif pods > 1 and machines == 1 and is_accelerate and settings.kind != "NO":
        # accelerate leaves the number of nodes to torchrun, which reads PET_NNODES.
        if not isinstance(processes, int) or str(processes) == pet.get("nproc_per_node"):
            return
        key = "num_processes"
        message = (
            f"PET_NNODES is {pods}, and torchrun reads it. Each of the {pods} nodes starts {processes} processes, so "
            f"{processes * pods} processes train together instead of {processes}."
        )
    elif (
        (machines or 0) > 1
        and launch.nodes > 1
        and rank is not None
        and given.get("rdzv_backend", "static") == "static"
    ):
        if settings.has_pdsh:
            return
        key, effect, remedy = of_rank, "crashes", _RANKS
        message = f"All {nodes} nodes have the number {rank}, so they wait for each other until they time out."
    else:
        return
    yield Finding(
        file=path, key=key, value=given.get(key, ABSENT), effect=effect, message=message, remedy=remedy, matters=True
    )
