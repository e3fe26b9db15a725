"""Write what submits a study to a scheduler: a script for Slurm, or manifests for Kubernetes.

The script has one `sbatch --array` for all runs that need the same nodes.

Slurm queues, places and requeues the tasks. Each task of an array is one run (`zero-study job`). Finished runs are left
out, so that the same command submits only the missing runs after the queue is empty.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from study.run import Run
from study.running import plan
from study.running.studies import Study
from zero_study.errors import Refusal
from zero_study.strategy import train_job

# Added to --timeout, so that imports and the end of the ranks fit in. The run itself ends at --timeout, with an
# outcome.
SPARE_MINUTES = 5
# The port at which the machines of a run meet. It differs between two jobs on one node, and lies below the ports that
# Linux assigns by itself.
PORT = "$((20000 + SLURM_JOB_ID % 10000))"
# One process per machine, with all of its cores. If one machine fails, the others go on, so that the first can record
# the reason.
EVERYWHERE = "srun --ntasks={nodes} --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0"
OUTPUT = "slurm-%A_%a.out"
IN_POD = (
    '--num-machines "$PET_NNODES" --machine-rank "$PET_NODE_RANK" '
    '--main-process-ip "$PET_MASTER_ADDR" --main-process-port "$PET_MASTER_PORT"'
)

HEAD = """\
#!/bin/sh
# {study}: {num_runs} of {num_planned} runs are not finished. Submit them: sh SCRIPT [OPTIONS OF SBATCH FOR EACH]
set -e
cd {here}
mkdir -p {folder}
"""
ARRAY = """
sbatch {options} "$@" <<'ARRAY'
#!/bin/sh
set -- {run_ids}
shift "$SLURM_ARRAY_TASK_ID"
exec {command}
ARRAY
"""


class _Shape(NamedTuple):
    """The nodes, ranks and GPUs that a run takes of a cluster."""

    nodes: int
    ranks: int  # on each node
    gpus: int  # on each node


def script(study: Study, runs: Sequence[Run], folder: Path, timeout_seconds: float, command: Sequence[str]) -> str:
    """Return the shell script that submits the unfinished runs of a study.

    `folder` is the folder of the study. `command` has the words that run one run, without its id.

    Raises Refusal if all runs are finished, if a run directory holds the record of a run with other flags, or if a name
    contains a line break.
    """
    for text in (str(folder), str(Path.cwd()), *command):
        # A line break would end the script of a task, which is a part of the whole script.
        if "\n" in text or "\r" in text:
            raise Refusal(f"{text!r}: a Slurm script cannot contain a name with a line break. Use another name.")
    shapes: dict[_Shape, list[Run]] = {}
    for run in unfinished(study, runs, timeout_seconds):
        shapes.setdefault(_shape(run, study.device == "gpu"), []).append(run)
    num_runs = sum(map(len, shapes.values()))
    head = HEAD.format(
        study=study.name,
        num_runs=num_runs,
        num_planned=len(runs),
        here=shlex.quote(str(Path.cwd())),
        folder=shlex.quote(str(folder)),
    )
    minutes = math.ceil(timeout_seconds / 60) + SPARE_MINUTES
    arrays = [_array(study.name, shape, some, folder, minutes, command) for shape, some in shapes.items()]
    return "".join([head, *arrays])


def manifests(study: Study, runs: Sequence[Run], timeout_seconds: float, command: Sequence[str]) -> str:
    """Return the manifests of Kubeflow's TrainJob, one for each unfinished run of a study.

    Raises Refusal as `script` does.
    """
    texts: list[str] = []
    for run in unfinished(study, runs, timeout_seconds):
        shape, words = _shape(run, study.device == "gpu"), shlex.join([*command, run.run_id])
        name = train_job.name_of(f"{study.name}-{len(texts)}")
        texts.append(train_job.manifest(name, run.run_id, shape.nodes, shape.ranks, shape.gpus, f"{words} {IN_POD}"))
    return "---\n".join(texts)


def unfinished(study: Study, runs: Iterable[Run], timeout_seconds: float) -> list[Run]:
    """List the runs that still have to run.

    A run is left out if it has a result, or if another run already ran out of memory with a smaller batch. Whether a
    node lacks resources for a run is checked by its job. Raises Refusal if none is left, or if a run directory holds
    the record of a run with other flags.
    """
    kept = [(run, plan.finished(run, timeout_seconds)) for run in runs]
    exhausted = [run for run, status in kept if status == "out_of_memory"]
    remaining = [run for run, status in kept if status is None and plan.too_large_batch(run, exhausted) is None]
    if not remaining:
        raise Refusal(
            f"study {study.name!r}: every run is finished, so there is nothing to submit. `zero-study compare` shows "
            "the runs."
        )
    return remaining


def _shape(run: Run, needs_gpus: bool) -> _Shape:
    nodes, ranks = run.num_machines, run.num_local_ranks
    return _Shape(nodes, ranks, (1 if run.config.share_device else ranks) if needs_gpus else 0)


def _array(name: str, shape: _Shape, runs: Sequence[Run], folder: Path, minutes: int, command: Sequence[str]) -> str:
    # By default, Slurm gives each task one core. One task per rank is requested, so that a node has one core per rank,
    # although a single task starts all ranks.
    options = [f"--job-name={name}", f"--array=0-{len(runs) - 1}", f"--nodes={shape.nodes}"]
    options += [f"--ntasks-per-node={shape.ranks}", f"--time={minutes}", "--requeue", "--open-mode=append"]
    options += [f"--gpus-per-node={shape.gpus}"] if shape.gpus else []
    options += [f"--output={str(folder).replace('%', '%%')}/{OUTPUT}"]
    line = f'{shlex.join(command)} "$1"'
    if shape.nodes > 1:
        line += f" --num-machines {shape.nodes} --machine-rank $SLURM_NODEID"
        line += f' --main-process-ip "$SLURM_LAUNCH_NODE_IPADDR" --main-process-port {PORT}'
        line = f'{EVERYWHERE.format(nodes=shape.nodes)} sh -c {shlex.quote("exec " + line)} sh "$1"'
    run_ids = " ".join(shlex.quote(run.run_id) for run in runs)
    return ARRAY.format(options=shlex.join(options), run_ids=run_ids, command=line)
