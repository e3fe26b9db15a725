"""Test on a real Slurm cluster of two nodes that the job script submits unfinished runs, and that they run."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_train
import killing
import launching
import pytest
import slurm_cluster
import yaml
from refusing import refusal
from slurm_cluster import Cluster

from study.records import schema
from study.running import plan, slurm, studies
from zero_study import cli
from zero_study.errors import Refusal

STUDY = """\
question: Which one?
parts:
  - flags: {max_steps: 2, num_train_examples: 16, num_eval_examples: 4}
    strategies: [single, ddp]
"""
SINGLE, DDP = "bert-imdb-tiny-single-1x-seed0", "bert-imdb-tiny-ddp-2x-seed0"
LONG = STUDY.replace("[single, ddp]", "[single]").replace("max_steps: 2", "max_steps: 200")
GPUS = STUDY.replace("question", "device: gpu\nquestion").replace("ddp]", "ddp, zero2]\n    world_sizes: [16]")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with three studies."""
    for name, text in (("mine", STUDY), ("long", LONG), ("gpus", GPUS)):
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `plan --slurm` prints."""
    assert cli.run(["plan", *words, "--slurm"]) == 0
    return capsys.readouterr().out


# ---------------------------------------------------------------- the script


def test_runs_that_take_the_same_are_one_array(folder, capsys):
    script = printed(capsys, "gpus.yaml", "--per-machine", "8", "--timeout", "1801", "--checkpoint-every", "50")
    one, two = (set(line.split()) for line in script.splitlines() if line.startswith("sbatch "))
    assert {"--array=0-0", "--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1", "--time=36", "--requeue"} < one
    assert {"--array=0-1", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=36", "--requeue"} < two
    assert "\nset -- bert-imdb-tiny-ddp-16x-seed0 bert-imdb-tiny-zero2-16x-seed0\n" in script
    alone, everywhere = (line for line in script.splitlines() if line.startswith("exec "))
    assert "job --runs-dir runs --timeout 1801 --checkpoint-every 50 gpus.yaml" in alone
    assert "srun" not in alone
    assert everywhere.startswith("exec srun --ntasks=2 --ntasks-per-node=1 ")
    for words in ("--num-machines 2", "--machine-rank $SLURM_NODEID", '--main-process-ip "$SLURM_LAUNCH_NODE_IPADDR"'):
        assert words in everywhere


def test_a_run_of_cpus_asks_for_no_gpu_and_a_shared_one_for_one(folder, capsys):
    assert "gpus-per-node" not in printed(capsys, "mine.yaml")
    ddp = studies.runs(studies.find("gpus.yaml"))[1]
    shared = dataclasses.replace(ddp, config=ddp.config.model_copy(update={"share_device": True}))
    assert slurm._shape(shared, needs_gpus=True) == (1, 16, 1)


@pytest.mark.launches
def test_what_is_finished_is_left_out(folder, capsys):
    study = studies.find("mine.yaml")
    single, ddp = runs = studies.runs(study)
    assert slurm.unfinished(study, runs, 60.0) == runs
    fake_train.prepare(Path("fakes.json"), runs)
    single.folder.mkdir(parents=True)
    subprocess.run(fake_train.command(Path("fakes.json").resolve())(single), check=True)
    assert slurm.unfinished(study, runs, 60.0) == [ddp]
    assert f"set -- {DDP}\n" in printed(capsys, "mine.yaml")
    with pytest.raises(Refusal, match="every run is finished"):
        slurm.script(study, [single], Path("runs/mine"), 60.0, ["job"])


def test_kubernetes_gets_one_manifest_for_each_run(folder, capsys):
    """Each pod executes the run as one of its machines."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    assert cli.run(["plan", "gpus.yaml", "--per-machine", "8", "--timeout", "1801", "--kubernetes"]) == 0
    manifests = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [TrainerV1alpha1TrainJob.from_dict(each).to_dict() for each in manifests] == manifests
    trainers = [each["spec"]["trainer"] for each in manifests]
    assert [(each["numNodes"], each["numProcPerNode"]) for each in trainers] == [(1, 1), (2, 8), (2, 8)]
    assert len({each["metadata"]["name"] for each in manifests}) == 3
    (line,) = trainers[1]["args"]
    begin, *words = shlex.split(line.partition("exec ")[2])
    assert begin == "zero-study"
    assert {"--timeout", "1801", "gpus.yaml", "bert-imdb-tiny-ddp-16x-seed0"} < {*words}
    assert words[-8::2] == ["--num-machines", "--machine-rank", "--main-process-ip", "--main-process-port"]
    assert "--json" in refusal(cli.run, ["plan", "gpus.yaml", "--kubernetes", "--json"])


def test_machines_have_equally_many_processes(folder):
    runs = studies.runs(studies.find("gpus.yaml"))
    with pytest.raises(Refusal, match=r"--per-machine 5: .*-ddp-16x-seed0 has 16 processes"):
        plan.over_machines(runs, 5)
    assert {run.num_machines for run in plan.over_machines(runs, None)} == {1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["job", "mine.yaml", DDP, "--num-machines", "2"], "--num-machines 2: "),
        (["job", "mine.yaml", "ddp"], "The study 'mine' has no run ddp. "),
    ],
)
def test_what_is_refused(folder, words, message):
    assert refusal(cli.run, words).startswith(message)
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["runs\nARRAY\ntouch mine", "runs\rx"])
def test_a_line_break_does_not_end_the_script_of_a_task(folder, name):
    """What followed it was executed, on the machine that submits."""
    assert "a Slurm script cannot contain a name with a line break" in refusal(
        cli.run, ["plan", "mine.yaml", "--slurm", "--runs-dir", name]
    )


# ---------------------------------------------------------------- on a cluster


@pytest.fixture(scope="module")
def only_cluster() -> Iterator[Cluster]:
    if reason := slurm_cluster.lacking():
        if os.environ.get("CI") and os.getuid() == 0:
            pytest.fail(reason)
        pytest.skip(reason)
    with slurm_cluster.started() as cluster:
        yield cluster


@pytest.fixture
def cluster(only_cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, with nothing in its queue."""
    launching.use()  # its jobs do
    only_cluster.ask("scancel", "--user=root")
    wait(lambda: only_cluster.is_clear(), only_cluster, slurm_cluster.READY_SECONDS)
    for name, value in launching.environment({"SLURM_CONF": str(only_cluster.folder / "slurm.conf")}).items():
        monkeypatch.setenv(name, value)
    return only_cluster


def wait(is_so: Callable[[], bool], cluster: Cluster, seconds: float = launching.TIMEOUT_SECONDS) -> None:
    killing.wait(is_so, seconds, 0.3)
    assert is_so(), cluster.ask("squeue")


def submit(script: str, *words: str) -> str:
    """Submit as a user does."""
    completed = subprocess.run(["sh", "-s", "--", *words], input=script, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.slow
@pytest.mark.launches
def test_a_study_goes_through_it(cluster, capsys):
    """Two runs that train, side by side; then there is nothing left to submit."""
    assert submit(printed(capsys, "mine.yaml"), "--partition=main").count("Submitted batch job") == 2
    wait(cluster.is_clear, cluster)
    for run_id, world_size in ((SINGLE, 1), (DDP, 2)):
        assert schema.read_outcome(Path("runs/mine") / run_id / "outcome.json").status == "ok"
        record = schema.read(Path("runs/mine") / run_id)
        assert (record.status, record.proof.world_size) == ("ok", world_size)
    assert len(list(Path("runs/mine").glob("slurm-*_0.out"))) == 2
    assert cli.run(["pack", "runs/mine", "kept"]) == 0
    with pytest.raises(Refusal, match="every run is finished"):
        cli.run(["plan", "mine.yaml", "--slurm"])


@pytest.mark.nightly
@pytest.mark.launches
def test_a_job_that_is_requeued_goes_on_from_its_checkpoint(cluster, capsys):
    run_dir = Path("runs/long") / SINGLE
    output = submit(printed(capsys, "long.yaml", "--checkpoint-every", "10"))
    number = output.split()[-1]

    def state() -> str:
        return cluster.ask("squeue", "--noheader", f"--jobs={number}", "--states=all", "--format=%T|%r").strip()

    wait(lambda: any(run_dir.glob("checkpoints/step-????????")), cluster)
    cluster.ask("scontrol", "requeue", f"{number}_0")
    wait(lambda: state() == "PENDING|BeginTime", cluster)  # for two minutes, were it not for what follows
    cluster.ask("scontrol", "update", f"JobId={number}_0", "StartTime=now")
    wait(lambda: (run_dir / "outcome.json").exists(), cluster)
    record = schema.read(run_dir)
    assert (record.status, record.steps_done) == ("ok", 200)
    assert len(record.resumed_at) == 1


@pytest.mark.nightly
@pytest.mark.launches
def test_one_run_on_two_nodes(cluster, capsys):
    submit(printed(capsys, "mine.yaml", "--only", "ddp", "--per-machine", "1"))
    wait(cluster.is_clear, cluster)
    record = schema.read(Path("runs/mine") / DDP)
    assert (record.status, record.proof.world_size) == ("ok", 2)
    assert record.proof.ranks_of_machines == [1, 1]
