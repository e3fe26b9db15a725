"""Lines that start trainings, in job files of Slurm, SkyPilot and Kubeflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from refusing import refusal

from zero_study import check, cli
from zero_study.doctor import examine, json_answer
from zero_study.doctor.job_rules import IN_POD

LOCAL = {"compute_environment": "LOCAL_MACHINE", "num_processes": 16}
FILES = {
    "ddp.yaml": LOCAL | {"distributed_type": "MULTI_GPU"},
    "zero.yaml": LOCAL
    | {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "gradient_clipping": 1.0}},
    "two.yaml": LOCAL | {"distributed_type": "MULTI_GPU", "num_machines": 2, "main_process_ip": "10.0.0.1"},
}  # fmt: skip
HEAD = "--num_machines $SLURM_NNODES --num_processes 16 --main_process_ip $HEAD"
ZERO = f"--config_file zero.yaml {HEAD} --machine_rank \\$SLURM_NODEID"
LAUNCHER = "deepspeed_config.deepspeed_multinode_launcher"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_text(yaml.safe_dump(content))


def train_job_of(words: Any, **trainer: Any) -> str:
    words = {"command": ["bash", "-c"], "args": [f"{words}\n"]} if isinstance(words, str) else {"command": words}
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"numNodes": 2, **trainer, **words}}
    return yaml.safe_dump({"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "spec": spec})


def judged(text: str, name: str = "job.sbatch") -> list[str]:
    """Return the keys of the findings that matter in a job file with this text."""
    Path(name).write_text(text)
    return [finding.key for finding in examine.examine(Path(name)).findings if finding.matters]


def on_two_nodes(line: str) -> str:
    return f"#!/bin/bash\n#SBATCH --nodes=2\n{line}\n"


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        (f"srun bash -c \"accelerate launch {ZERO} train.py\"", [LAUNCHER]),
        (f"srun bash -c \"accelerate launch {ZERO} --deepspeed_multinode_launcher standard train.py\"", []),
        # the launcher and its flags in a variable, which every node runs later
        (f'LAUNCH="accelerate launch {ZERO}"\nsrun bash -c "$LAUNCH train.py"', [LAUNCHER]),
        (f"srun python -m accelerate.commands.launch {ZERO} train.py", [LAUNCHER]),
        (f"NODES=$SLURM_NNODES\naccelerate launch {ZERO.replace('$SLURM_NNODES', '$NODES')} train.py", [LAUNCHER]),
        (f"accelerate launch {ZERO.replace('$SLURM_NNODES', '$OTHER')} train.py", []),
        ("srun accelerate launch train.py", ["num_machines"]),
        ("srun accelerate launch --config_file ddp.yaml train.py", ["num_machines"]),
        ("srun --nodes=1 accelerate launch --config_file ddp.yaml train.py", []),
        ("accelerate launch --config_file ddp.yaml train.py", []),
        ("srun accelerate launch --config_file two.yaml train.py", ["machine_rank"]),
        (f"srun accelerate launch --config_file ddp.yaml {HEAD} --machine_rank $SLURM_NODEID t.py", ["machine_rank"]),
        (f"srun bash -c 'accelerate launch --config_file ddp.yaml {HEAD} --machine_rank $SLURM_NODEID t.py'", []),
        (f"srun bash -c \"accelerate launch --config_file ddp.yaml {HEAD} --machine_rank \\$SLURM_NODEID t.py\"", []),
        ("srun accelerate launch --multi_gpu --num_machines 2 --num_processes 16 --machine_rank $RANK t.py",
         ["main_process_ip"]),
        ("srun torchrun --nproc_per_node 8 train.py", ["nnodes"]),
        ("srun torchrun --standalone --nproc-per-node=8 train.py", ["nnodes"]),
        ("srun torchrun --nnodes 2 --nproc_per_node 8 train.py", ["node_rank"]),
        ("srun torchrun --nnodes=2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint $HEAD:29500 train.py", []),
        ("srun python -m torch.distributed.run --nnodes $SLURM_NNODES --node_rank $RANK train.py", []),
        ("srun deepspeed --num_gpus 8 train.py --deepspeed ds.json", ["hostfile"]),
        ('ARGS="--nnodes 2 --rdzv_backend c10d --rdzv_endpoint $HEAD"\nsrun torchrun $ARGS train.py', []),
        ('ARGS="--nproc_per_node 8"\nsrun torchrun $ARGS train.py', ["nnodes"]),
        ("srun torchrun $ARGS train.py", []),
        ('srun torchrun "${ARGS[@]}" train.py', []),
        ("python submit.py --gpus 8 -- accelerate launch --multi_gpu --num_machines 4 --num_processes 8 t.py", []),
        ("accelerate launch --mixed_precision bf16 --use_deepspeed --deepspeed_config_file ds.json t.py", []),
        ('srun --nodes="1" torchrun --nproc_per_node 8 train.py', []),
        (f"R='$SLURM_PROCID'\nsrun bash -c \"accelerate launch --config_file ddp.yaml {HEAD} --machine_rank $R t.py\"",
         []),
        (f"srun accelerate launch --config_file ddp.yaml {HEAD} --rdzv_backend c10d --machine_rank \\$N t.py", []),
        ("deepspeed --hostfile hosts train.py", []),
        ("srun deepspeed --hostfile hosts train.py", []),
        ("export PET_NNODES=2\naccelerate launch --multi_gpu --num_processes 4 train.py", ["num_processes"]),
    ],
)  # fmt: skip
def test_lines_of_a_slurm_job(line, keys):
    assert judged(on_two_nodes(line)) == keys


@pytest.mark.parametrize("install", ["pip install deepspeed accelerate torchrun", "# accelerate launch train.py"])
def test_a_script_without_a_launch_is_no_job(install):
    Path("other.sh").write_text(on_two_nodes(install))
    refusal(cli.run, ["doctor", "other.sh"])
    assert "other.sh" not in check.examine([Path()]).configs


@pytest.mark.parametrize(
    ("words", "trainer", "keys"),
    [
        ("accelerate launch --multi_gpu --num_processes 4 train.py", {"numProcPerNode": 2}, ["num_processes"]),
        (["accelerate", "launch", "--multi_gpu", "--num_processes", "4", "train.py"], {}, ["num_processes"]),
        ("accelerate launch --multi_gpu --num_processes 4 train.py", {"numProcPerNode": 4}, []),
        ("accelerate launch --config_file ddp.yaml train.py", {"numProcPerNode": 8}, ["num_processes"]),
        ("accelerate launch train.py", {}, ["num_machines"]),
        ("accelerate launch train.py", {"resourcesPerNode": {"limits": {"nvidia.com/gpu": 8}}}, []),
        ("accelerate launch train.py", {"numNodes": 1}, []),
        (f"accelerate launch --config_file ddp.yaml {IN_POD} train.py", {"numProcPerNode": 8}, []),
        (f"accelerate launch --config_file zero.yaml {IN_POD} train.py", {"numProcPerNode": 8}, [LAUNCHER]),
        ("accelerate launch --config_file two.yaml --machine_rank 1 train.py", {}, ["machine_rank"]),
        ("torchrun train.py", {}, []),
        ("torchrun --standalone train.py", {}, ["nnodes"]),
    ],
)
def test_lines_of_a_train_job(words, trainer, keys):
    assert judged(train_job_of(words, **trainer), "job.yaml") == keys
    assert "job.yaml" in check.examine([Path()]).configs


def test_a_train_job_in_lists_and_in_several_documents():
    trainer = "  trainer:\n    numNodes: 2\n    command:\n    - accelerate\n    - launch\n    args: {}\n"
    head = "kind: TrainJob\nspec:\n  runtimeRef: {name: torch-distributed}\n"
    args = '["--multi_gpu", "--num_processes", "4", "train.py"]'
    assert judged(f"kind: ConfigMap\n---\n{head}{trainer.format(args)}", "job.yaml") == ["num_processes"]
    assert judged(f"{head}{trainer.format(args)}".replace("torch-d", "mpi-d"), "job.yaml") == ["num_machines"]


def test_lines_of_skypilot():
    job = "num_nodes: 2\nsetup: pip install accelerate\nrun: |\n  accelerate launch --config_file {} train.py\n"
    assert judged(job.format("ddp.yaml"), "sky.yaml") == ["num_machines"]
    line = f"zero.yaml {HEAD} --machine_rank $SKYPILOT_NODE_RANK".replace("SLURM_NNODES", "SKYPILOT_NUM_NODES")
    assert judged(job.format(line), "sky.yaml") == [LAUNCHER]
    assert judged(job.format(line).replace("nodes: 2", "nodes: 1"), "sky.yaml") == []


@pytest.mark.parametrize("begin", ["run: |", "kind: TrainJob\nspec:\n  trainer:\n    args:\n    - |"])
def test_the_line_of_a_command_in_yaml(begin):
    above = f"name: first\n---\nnum_nodes: 2\n{begin}\n      set -e"
    text = f"{above}\n      torchrun train.py\n".replace("  trainer:", "  trainer:\n    numNodes: 2")
    assert judged(text, "job.yaml") == ["nnodes"]
    (finding,) = (each for each in examine.examine(Path("job.yaml")).findings if each.matters)
    assert text.split("\n")[(finding.line or 0) - 1].strip() == "torchrun train.py"


def test_the_answer_names_the_line_and_the_file():
    """A finding of the accelerate file stands under this file, and `check` lists it once."""
    text = "\n\nset -e \\\n  -x\nsrun accelerate launch \\\n  --config_file zero.yaml train.py"
    Path("zero.yaml").write_text(yaml.safe_dump(FILES["zero.yaml"] | {"mixed_precision": "bf15"}))
    judged(on_two_nodes(text), "job.sbatch")
    found = list(json_answer.findings(examine.examine(Path("job.sbatch"))))
    assert {(finding.file, finding.key, finding.line) for finding in found if finding.severity != "note"} == {
        ("zero.yaml", "mixed_precision", 6), ("job.sbatch", "num_machines", 7),
    }  # fmt: skip
    of_check = [finding.key for finding in check.examine([Path()]).findings if finding.severity != "note"]
    assert sorted(of_check) == ["mixed_precision", "num_machines"]


def test_a_file_that_does_not_exist_is_not_judged(capsys):
    Path("job.sh").write_text("accelerate launch --config_file $HOME/missing.yaml train.py")
    assert cli.run(["doctor", "job.sh", "--json"]) == 3
    assert "missing.yaml" in capsys.readouterr().out
    assert "job.sh" not in check.examine([Path()]).configs
