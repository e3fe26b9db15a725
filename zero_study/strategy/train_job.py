"""Write the manifest of a TrainJob, with which Kubeflow Trainer starts a training in several pods."""

from __future__ import annotations

import re

from zero_study.doctor.job_rules import IN_POD
from zero_study.files import FILL_IN

FLAGS = [f"--{flag}" for flag in IN_POD[2:].split(" --")]
# Of Kubeflow Trainer 2.3. Its runtime torch-distributed sets the variables PET_*, which torchrun reads, too. accelerate
# overrides them if it gets all of their values as flags.
_TEMPLATE = """\
# {comment}
# In place of {fill_in}, write an image with the packages of the training, and a claim of a volume that all pods can
# write to. The volume holds the files of the training, and gets its results.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {name}
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    image: {fill_in}
    numNodes: {nodes}
    numProcPerNode: {per_node}
    resourcesPerNode:
      limits: {{{limits}}}
    command: [sh, -c]
    args:
    - |
      cd /work &&
      exec {command}
  runtimePatches:
  - manager: zero-study
    trainingRuntimeSpec:
      template:
        spec:
          replicatedJobs:
          - name: node
            template:
              spec:
                template:
                  spec:
                    containers:
                    - name: node
                      volumeMounts:
                      - {{name: shm, mountPath: /dev/shm}}
                      - {{name: work, mountPath: /work}}
                    volumes:
                    # NCCL and data loaders share memory of the machine
                    - {{name: shm, emptyDir: {{medium: Memory}}}}
                    - {{name: work, persistentVolumeClaim: {{claimName: {fill_in}}}}}
"""


def name_of(text: str) -> str:
    """Return a text as a name that Kubernetes accepts."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def manifest(name: str, comment: str, nodes: int, per_node: int, gpus: int, command: str) -> str:
    """Return the manifest for a number of nodes, and of processes and GPUs on each of them."""
    limits = f"nvidia.com/gpu: {gpus}" if gpus else ""
    command = command.replace("\n", "\n      ")
    return _TEMPLATE.format(
        name=name, comment=comment, nodes=nodes, per_node=per_node, limits=limits, command=command, fill_in=FILL_IN
    )
