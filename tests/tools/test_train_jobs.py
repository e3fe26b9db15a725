"""The files that `advise` writes for several machines, and the manifests of Kubeflow's TrainJob."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import launching
import pytest
import yaml
from refusing import refusal

from zero_study import cli
from zero_study.doctor import examine
from zero_study.files import read_yaml
from zero_study.strategy import file, own_file, train_job


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def judged(path: str) -> list[str]:
    """Return the keys of the findings that matter in a file."""
    return [finding.key for finding in examine.examine(Path(path)).findings if finding.matters]


ASKED = ["advise", "--model", "gpt2-xl", "--gpu", "a100-80gb", "--gpus", "16", "--strategy"]


def test_every_command_refuses_a_file_without_the_address():
    assert cli.run([*ASKED, "zero2", "--write", "mine.yaml"]) == 0
    path = Path("mine.yaml")
    for read in (file.read_strategy, lambda path: read_yaml(path, path), lambda path: own_file.read(str(path), "trl")):
        assert "FILL_IN" in refusal(read, path)
    for command in (["train", "--strategy"], ["dry-run", "--model", "gpt2-xl", "--world", "2"]):
        assert "FILL_IN" in refusal(cli.run, [*command, "mine.yaml"])
    assert judged("mine.yaml") == ["main_process_ip"]
    path.write_text(path.read_text().replace("FILL_IN", "10.0.0.1"))
    assert file.read_strategy(path).num_machines == 2
    assert judged("mine.yaml") == []


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3_tuned", "fsdp2"])
def test_the_manifest_follows_kubeflows_schema(strategy):
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    assert cli.run([*ASKED, strategy, "--write", "My_run.yaml", "--kubernetes"]) == 0
    manifest = yaml.safe_load(Path("My_run.trainjob.yaml").read_text())
    parsed = TrainerV1alpha1TrainJob.from_dict(manifest)
    assert parsed is not None
    assert parsed.to_dict() == manifest  # otherwise, it has a key that the schema does not have
    trainer = parsed.spec.trainer
    assert (trainer.num_nodes, trainer.num_proc_per_node) == (2, 8)
    assert re.fullmatch("[a-z0-9-]+", manifest["metadata"]["name"])
    assert "/dev/shm" in str(parsed.spec.runtime_patches)
    assert judged("My_run.trainjob.yaml") == []
    assert judged("My_run.yaml") == []


@pytest.mark.parametrize("words", [["zero2", "--kubernetes"], ["zero2", "--stack", "deepspeed", "--write", "a.json",
                                                               "--kubernetes"]])  # fmt: skip
def test_a_manifest_needs_a_file_that_accelerate_reads(words):
    assert "--kubernetes" in refusal(cli.run, [*ASKED, *words])


SCRIPT = """
import torch.distributed as dist
dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    "strategy", ["zero2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp2"))]
)
def test_the_command_of_the_manifest_starts_one_training_in_two_pods(strategy, tmp_path):
    launching.use()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        free_port = server.getsockname()[1]
    Path("train.py").write_text(SCRIPT)
    assert cli.run([*ASKED, strategy, "--write", "mine.yaml", "--kubernetes"]) == 0
    manifest = yaml.safe_load(Path("mine.trainjob.yaml").read_text())
    command, (line,) = manifest["spec"]["trainer"]["command"], manifest["spec"]["trainer"]["args"]
    pods = []
    for rank in range(2):
        of_pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(rank)}
        of_pod |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port)}
        of_pod["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        words = [*command, line.replace("/work", str(tmp_path))]
        pods.append(subprocess.Popen(words, env=launching.environment(of_pod), stdout=subprocess.PIPE, text=True))
    printed = [pod.communicate(timeout=launching.TIMEOUT_SECONDS)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0]
    assert sorted(re.findall("rank .*", "\n".join(printed))) == [f"rank {rank} of 4" for rank in range(4)]


def test_the_manifest_of_a_training_without_gpus():
    trainer = yaml.safe_load(train_job.manifest("cpu", "", 1, 2, 0, "x"))["spec"]["trainer"]
    assert trainer["resourcesPerNode"] == {"limits": {}}
