"""Does a study go through Slurm: submitted, waited for, typed, taken up again? On a real one of two nodes, by loopback.

What a job does is mostly a line of shell, put in the place of `zero-study job`; three tests train.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import launching
import pytest
import slurm_cluster
from slurm_cluster import Cluster

from study import cli
from study.errors import Refusal
from study.records import schema
from study.records.schema import Outcome
from study.run import Run
from study.running import on_slurm, plan, runner, slurm, studies
from study.running.slurm import Job

STUDY = """\
question: Which one?
parts:
  - flags: {max_steps: 2, num_train_examples: 16, num_eval_examples: 4}
    strategies: [single, ddp]
"""
SINGLE, DDP = "bert-imdb-tiny-single-1x-seed0", "bert-imdb-tiny-ddp-2x-seed0"
LONG = STUDY.replace("[single, ddp]", "[single]").replace("max_steps: 2", "max_steps: 200")
GPUS = STUDY.replace("question", "device: gpu\nquestion").replace("ddp]", "ddp]\n    world_sizes: [16]")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with three studies."""
    for name, text in (("mine", STUDY), ("long", LONG), ("gpus", GPUS)):
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def order(name: str = "mine", words: str = "", program: tuple[str, ...] = ("true",), timeout: float = 60.0):
    study = studies.find(f"{name}.yaml")
    return on_slurm.Order(study, Path("runs") / name, timeout, slurm.split(words), program)


def runs(asked: on_slurm.Order) -> list[Run]:
    return studies.runs(asked.study, folder=asked.folder)


# ---------------------------------------------------------------- without a cluster


def test_a_job_asks_for_what_its_run_takes(folder):
    asked = order("gpus", "--partition=gpu --comment='a b'", ("zero-study", "job", "gpus.yaml"), timeout=1801)
    ddp = plan.spread(runs(asked), 8)[1]
    assert asked.asked(ddp) == "2 nodes with 8 GPUs each, at most 36 min"
    assert asked.script(ddp).splitlines() == [
        "#!/bin/sh",
        "#SBATCH --job-name=bert-imdb-tiny-ddp-16x-seed0",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --time=36",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={folder}/runs/gpus/bert-imdb-tiny-ddp-16x-seed0/slurm-%j.out",
        "#SBATCH --partition=gpu '--comment=a b'",
        "exec srun --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 sh -c 'exec zero-study job "
        "gpus.yaml bert-imdb-tiny-ddp-16x-seed0 --num-machines 2 --machine-rank $SLURM_NODEID --main-process-ip "
        '"$SLURM_LAUNCH_NODE_IPADDR" --main-process-port $((20000 + SLURM_JOB_ID % 10000))\'',
    ]
    shared = dataclasses.replace(ddp, config=ddp.config.model_copy(update={"share_device": True}))
    assert "#SBATCH --gpus-per-node=1\n" in asked.script(shared)


def test_a_job_on_one_node_of_cpus(folder):
    asked = order(program=("zero-study", "job", "mine.yaml"))
    single, ddp = plan.spread(runs(asked), 2)
    assert asked.asked(single) == "1 node with 1 core, at most 6 min"
    assert asked.asked(ddp) == "1 node with 2 cores, at most 6 min"
    script = asked.script(ddp)
    assert script.endswith(f"\nexec zero-study job mine.yaml {DDP}\n")
    assert "gpus" not in script
    assert "srun" not in script


def test_machines_have_equally_many_processes(folder):
    with pytest.raises(Refusal, match=r"--per-machine 5: .*-ddp-16x-seed0 has 16 processes, and every machine is to"):
        plan.spread(runs(order("gpus")), 5)
    assert {run.num_machines for run in plan.spread(runs(order("gpus")), None)} == {1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "mine.yaml", "--slurm", "-p gpu"], "--slurm is about jobs; pass --on slurm, or leave it out"),
        (["plan", "mine.yaml", "--per-machine", "4"], "--per-machine is about jobs; pass --on slurm, or leave it out"),
        (["run", "mine.yaml", "--on", "slurm", "--fail-fast"], "--fail-fast: Slurm says when runs start; leave it out"),
        (["run", "mine.yaml", "--on", "slurm", "--minutes", "9"], "--minutes: Slurm says when runs start"),
        (["run", "mine.yaml", "--on", "slurm", "--slurm", "'-p"], "--slurm '-p: cannot be split into words (No clos"),
        (["run", "mine.yaml", "--on", "slurm", "--slurm", "gpu"], "--slurm 'gpu': write options of sbatch on one line"),
        (["run", "mine.yaml", "--on", "slurm", "--slurm", "-p\ngpu"], "--slurm '-p\\ngpu': write options of sbatch"),
        (["run", "mine.yaml", "--on", "slurm"], "squeue is not installed here; --on slurm is for a login node"),
        (["job", "mine.yaml", DDP, "--num-machines", "2"], "--num-machines 2: the others have to know machine 0; pass"),
        (["job", "mine.yaml", "ddp"], "study 'mine' has no run ddp; zero-study plan lists them"),
    ],
)
def test_what_is_refused(folder, monkeypatch, words, message):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Refusal) as refused:
        cli.run(words)
    assert str(refused.value).startswith(message)
    assert not Path("runs").exists()


def test_a_plan_needs_no_slurm(folder, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.run(["plan", "mine.yaml", "--on", "slurm", "--slurm", "--partition=gpu"]) == 0
    said = capsys.readouterr().out
    assert "2 runs in runs/mine, as jobs of Slurm, each with --partition=gpu\n" in said
    assert f"\n2  submit  {DDP}     1 node with 2 cores, at most 35 min\n" in said
    assert "\n2 to submit, 0 queued, 0 kept, 0 skipped; what a node lacks" in said
    assert "\nnot known: which runs are queued (squeue is not installed here; --on slurm is for a login node" in said


def test_times_of_slurm_are_read():
    job = Job(7, "RUNNING", "None", "node[1-2]", "2026-11-22T05:57:19", "1-02:03:04")
    assert job.seconds == 93784
    assert job.started_at is not None
    assert job._replace(elapsed="1:40").seconds == 100
    assert job._replace(started="N/A").started_at is None


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        ("TIMEOUT", ("timed_out", "the job reached its time limit (Slurm's job 7: TIMEOUT on n1)")),
        ("BOOT_FAIL", ("node_failed", "a node did not boot (Slurm's job 7: BOOT_FAIL on n1)")),
        ("CANCELLED", None),
        ("UNKNOWN", None),
        ("FAILED", ("crashed", "exit status 1 (Slurm's job 7: FAILED on n1)")),
        ("COMPLETED", ("crashed", "exit status 0 and no record (Slurm's job 7: COMPLETED on n1)")),
    ],
)
def test_ends_are_typed(tmp_path, state, ended):
    assert slurm.how_it_ended(Job(7, state, "None", "n1", "N/A", "0:00"), tmp_path) == ended


SACCT = """\
#!/bin/sh
[ "$1" = --jobs=12 ] || exit 1
echo 'CANCELLED by 1000|None|n[1-2]|2026-11-22T05:57:19|00:01:02'
"""


def test_what_squeue_has_forgotten_accounting_knows(tmp_path, monkeypatch):
    """By a stand-in for sacct: the tests' cluster has no database."""
    (tmp_path / "sacct").write_text(SACCT)
    (tmp_path / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert slurm.ended_long_ago(tmp_path) is None  # nothing was started
    for number in (2, 12):
        (tmp_path / f"slurm-{number}.out").touch()
    job = slurm.ended_long_ago(tmp_path)
    assert job == Job(12, "CANCELLED", "None", "n[1-2]", "2026-11-22T05:57:19", "00:01:02")
    assert job.seconds == 62
    (tmp_path / "slurm-13.out").touch()
    assert slurm.ended_long_ago(tmp_path) is None  # sacct fails


def test_a_run_whose_folder_is_deleted_begins_anew_though_squeue_knows_its_job(folder, monkeypatch, capsys):
    """By a stand-in for Slurm; the folder is deleted before the call, and once more while it waits."""
    asked = order()
    run = runs(asked)[0]
    job = "{}|COMPLETED|None|n1|N/A|0:00|" + str(slurm.script_path(run))
    known = [job.format(7)]

    def ask(program: str, *words: str) -> str:
        if program == "sbatch":
            known.append(job.format(8))
            shutil.rmtree(asked.folder)
            return "8\n"
        return "\n".join(known)

    monkeypatch.setattr(slurm, "_ask", ask)
    monkeypatch.setattr(on_slurm, "POLL_SECONDS", 0.0)
    assert on_slurm.run(asked, [run]) == runner.SOME_WITHOUT_OUTCOME
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("[1/1] ")] == [
        f"[1/1] {SINGLE}: no outcome; job 7, completed on n1",
        f"[1/1] {SINGLE}: submitted, job 8: {asked.asked(run)}",
        f"[1/1] {SINGLE}: no outcome; job 8, completed on n1",
    ]
    assert not Path("runs").exists()


def test_a_job_that_is_taken_back_before_it_begins_has_not_the_end_of_the_one_before(folder, monkeypatch):
    """By a stand-in for Slurm, whose queue has forgotten both."""
    asked = order()
    run = runs(asked)[0]
    run.folder.mkdir(parents=True)
    (run.folder / "slurm-7.out").touch()
    said = {"--jobs=7": "TIMEOUT|None|n1|2026-11-22T05:57:19|01:00:00", "--jobs=8": "CANCELLED by 0|None||N/A|0:00"}
    answers = {"sbatch": lambda *words: "8", "squeue": lambda *words: "", "sacct": lambda job, *words: said[job]}
    monkeypatch.setattr(slurm, "_ask", lambda program, *words: answers[program](*words))
    slurm.submit(run, "its script")  # by a call that was then killed
    on_slurm._begin(call := on_slurm._Call(asked, {run.run_id: "1"}), [run])
    assert (call.outcomes, call.left) == ({}, [run])
    call.queued[run.run_id] = run, Job(8, "PENDING", "None", "", "", "")
    on_slurm._poll(call)
    assert (call.outcomes, call.queued) == ({}, {})
    assert not (run.folder / "outcome.json").exists()


def test_a_refused_job_leaves_what_an_earlier_one_left(folder, monkeypatch):
    run = runs(order())[0]
    run.folder.mkdir(parents=True)
    earlier = {"outcome.json": "its outcome", slurm.SCRIPT: "its script"}
    for name, text in earlier.items():
        (run.folder / name).write_text(text)

    def refuse(*words: str) -> str:
        raise Refusal("sbatch: Job violates accounting/QOS policy")

    monkeypatch.setattr(slurm, "_ask", refuse)
    with pytest.raises(Refusal):
        slurm.submit(run, "another script")
    assert {path.name: path.read_text() for path in run.folder.iterdir()} == earlier

    def end_at_once(*words: str) -> str:
        assert not (run.folder / "outcome.json").exists()
        (run.folder / "outcome.json").write_text("another outcome")
        return "8\n"

    monkeypatch.setattr(slurm, "_ask", end_at_once)
    assert slurm.submit(run, "another script") == 8
    assert (run.folder / "outcome.json").read_text() == "another outcome"


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
    """The cluster, with nothing in its queue, asked every half second."""
    launching.use()  # its jobs do
    only_cluster.ask("scancel", "--user=root")
    deadline = time.monotonic() + slurm_cluster.READY_SECONDS
    while not only_cluster.is_clear():
        assert time.monotonic() < deadline, only_cluster.ask("squeue")
        time.sleep(0.2)
    for name, value in launching.environment({"SLURM_CONF": str(only_cluster.folder / "slurm.conf")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(on_slurm, "POLL_SECONDS", 0.5)
    return only_cluster


def between(monkeypatch: pytest.MonkeyPatch, act: Callable[[dict[Path, Job]], bool]) -> None:
    """Have something done between two looks at the queue, until it says that it is done."""
    sleep, done = time.sleep, []

    def tick(seconds: float) -> None:
        sleep(seconds)
        if not done and act(slurm.jobs()):
            done.append(True)

    monkeypatch.setattr(on_slurm.time, "sleep", tick)


def outcome(asked: on_slurm.Order, run_id: str) -> Outcome | None:
    return plan.read_outcome(asked.folder / run_id)


@pytest.mark.launches
def test_a_study_goes_through_it(cluster, capsys):
    """Two runs that train, side by side; then there is nothing left to do."""
    command = ["run", "mine.yaml", "--on", "slurm"]
    assert cli.run(command) == runner.ALL_OK
    said = capsys.readouterr().out
    assert f"[2/2] {DDP}: submitted, job " in said
    assert f"[2/2] {DDP}: ok, final loss " in said
    for run_id, world_size in ((SINGLE, 1), (DDP, 2)):
        assert outcome(order(), run_id).status == "ok"
        record = schema.read(Path("runs/mine") / run_id)
        assert (record.status, record.proof.world_size) == ("ok", world_size)
    assert cli.run(["collect", "runs/mine", "kept"]) == 0
    assert cli.run(["plan", "mine.yaml", "--on", "slurm"]) == 0
    assert "0 to submit, 0 queued, 2 kept, 0 skipped" in capsys.readouterr().out
    assert cli.run(command) == runner.ALL_OK
    assert "submitted" not in capsys.readouterr().out


@pytest.mark.launches
def test_a_job_that_is_requeued_goes_on_from_its_checkpoint(cluster, monkeypatch, capsys):
    run_dir = Path("runs/long") / SINGLE

    def requeue(jobs: dict[Path, Job]) -> bool:
        job = jobs[(run_dir / slurm.SCRIPT).resolve()]
        if job.state == "RUNNING" and any(run_dir.glob("checkpoints/step-????????")):
            cluster.ask("scontrol", "requeue", str(job.number))
        if job.state == "PENDING" and job.reason == "BeginTime":  # for two minutes, were it not for this
            cluster.ask("scontrol", "update", f"JobId={job.number}", "StartTime=now")
            return True
        return False

    between(monkeypatch, requeue)
    assert cli.run(["run", "long.yaml", "--on", "slurm", "--checkpoint-every", "10"]) == runner.ALL_OK
    assert capsys.readouterr().out.count("submitted, job") == 1
    record = schema.read(run_dir)
    assert (record.status, record.steps_done) == ("ok", 200)
    assert len(record.resumed_at) == 1


@pytest.mark.launches
def test_what_is_queued_is_not_submitted_twice(cluster, monkeypatch, capsys):
    asked = order(program=("sh", "-c", "sleep 100"))

    def interrupt(jobs: dict[Path, Job]) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        between(patch, interrupt)
        assert on_slurm.run(asked, runs(asked)) == runner.SOME_WITHOUT_OUTCOME
    said = capsys.readouterr().out
    before = {path.parent.name: job.number for path, job in slurm.jobs().items() if not job.is_over}
    assert set(before) == {SINGLE, DDP}
    assert f"2 jobs in the queue; to take back: scancel {before[SINGLE]} {before[DDP]}\n" in said
    assert "2 of 2 runs have no outcome yet; the same command goes on with them" in said

    assert f"2  queued  {DDP}     job {before[DDP]}, " in on_slurm.show(asked, runs(asked))
    between(monkeypatch, lambda jobs: bool(cluster.ask("scancel", "--user=root")) or True)
    assert on_slurm.run(asked, runs(asked)) == runner.SOME_WITHOUT_OUTCOME
    said = capsys.readouterr().out
    assert "submitted" not in said
    assert f"no outcome; job {before[DDP]}, cancelled" in said
    assert not list(Path("runs").rglob("outcome.json"))


@pytest.mark.launches
def test_a_wait_that_is_killed_is_taken_up_by_the_same_command(cluster, capsys):
    """Killed when one of two runs that train has ended: it is kept, and the other's job goes on."""
    words = f"--exclusive --nodelist={cluster.nodes[0]}"  # one after the other
    command = ["run", "mine.yaml", "--on", "slurm", "--slurm", words]
    single, ddp = (slurm.script_path(run) for run in runs(order()))
    deadline = time.monotonic() + launching.TIMEOUT_SECONDS
    with subprocess.Popen([sys.executable, "-m", "study", *command]) as waiting:
        try:
            while not ((job := slurm.jobs().get(single)) and job.is_over):
                assert waiting.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
        finally:
            waiting.kill()
    assert waiting.returncode == -signal.SIGKILL
    before = slurm.jobs()
    assert not before[ddp].is_over

    assert cli.run(command) == runner.ALL_OK
    said = capsys.readouterr().out
    assert f"[1/2] {SINGLE}: kept, ok, final loss " in said
    assert f"[2/2] {DDP}: job {before[ddp].number}, " in said
    assert f"[2/2] {DDP}: ok, final loss " in said
    for path in (single, ddp):
        assert slurm.jobs()[path].number == before[path].number
        assert [file.name for file in path.parent.glob("slurm-*.out")] == [f"slurm-{before[path].number}.out"]


def ends(asked: on_slurm.Order, monkeypatch: pytest.MonkeyPatch, act: Callable[[Job], object] | None = None) -> Outcome:
    """The outcome of the first run, whose job is ended by what `act` does to it as soon as it runs; None: by itself."""

    def end(jobs: dict[Path, Job]) -> bool:
        job = jobs[slurm.script_path(run)]
        if job.state == "RUNNING" and act:
            act(job)
        return job.state == "RUNNING"

    run = runs(asked)[0]
    between(monkeypatch, end)
    assert on_slurm.run(asked, [run]) == runner.SOME_NOT_OK
    return outcome(asked, run.run_id)


@pytest.mark.launches
def test_a_failed_node_is_an_outcome_where_the_job_may_not_be_requeued(cluster, monkeypatch):
    asked = order(words=f"--no-requeue --nodelist={cluster.nodes[0]}", program=("sh", "-c", "sleep 100"))
    ended = ends(asked, monkeypatch, lambda job: cluster.down(0))
    assert ended.status == "node_failed"
    assert ended.message.startswith("a node failed (Slurm's job ")
    assert ended.message.endswith(f": NODE_FAIL on {cluster.nodes[0]})")
    assert 0 <= ended.wall_seconds < 60
    # It is no result: the next call submits it again.
    assert "1  submit" in on_slurm.show(asked, runs(asked))


@pytest.mark.launches
def test_a_preempted_job_is_an_outcome_where_the_cluster_ends_it(cluster, monkeypatch):
    asked = order(words=f"--partition=cheap --nodelist={cluster.nodes[0]}", program=("sh", "-c", "sleep 100"))
    dear = ("sbatch", "--partition=dear", f"--nodelist={cluster.nodes[0]}", "--exclusive", "--output=/dev/null")
    ended = ends(asked, monkeypatch, lambda job: cluster.ask(*dear, "--wrap=true"))
    assert ended.status == "preempted"
    assert ended.message.startswith("another job took its place (Slurm's job ")


@pytest.mark.launches
def test_a_jobs_time_limit_is_an_outcome(cluster, monkeypatch):
    """Slurm looks every 30 s; a run's own limit is shorter than its job's, unless the user's words say otherwise."""
    asked = order(words="--time=1", program=("sh", "-c", "sleep 100"), timeout=1.0)
    ended = ends(
        asked, monkeypatch, lambda job: cluster.ask("scontrol", "update", f"JobId={job.number}", "EndTime=now")
    )
    assert ended.status == "timed_out"
    assert ended.message.startswith("the job reached its time limit (Slurm's job ")
    # As much time would end it again, more may not.
    assert "1  keep" in on_slurm.show(asked, runs(asked))
    assert "1  submit" in on_slurm.show(dataclasses.replace(asked, timeout_seconds=1000.0), runs(asked))


@pytest.mark.launches
def test_a_job_that_takes_more_memory_than_it_has_is_an_outcome(cluster, monkeypatch):
    if not cluster.limits_memory:
        pytest.skip(f"{slurm_cluster.MEMORY_GROUP} cannot be written")
    program = ("sh", "-c", "sleep 1; head -c 400000000 /dev/zero | tail -c 300000000 >/dev/null")  # tail keeps them
    ended = ends(order(words="--mem=100", program=program), monkeypatch)
    assert ended.status == "killed"
    assert ended.message.startswith("the job needed more host memory than it had; ask for more, as --slurm '--mem=64G'")
    assert any("oom" in line for line in ended.stderr_tail)


@pytest.mark.launches
def test_a_job_that_cannot_begin_says_why(cluster, monkeypatch):
    program = ("sh", "-c", "sleep 1; echo 'zero-study: the disk is read-only; mend it' >&2; exit 2")
    ended = ends(order(program=program), monkeypatch)
    assert ended.status == "misconfigured"
    assert ended.message.startswith("the disk is read-only; mend it (Slurm's job ")
    assert ended.stderr_tail == ["zero-study: the disk is read-only; mend it"]


@pytest.mark.launches
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--slurm", "--partition=nope"],
            "sbatch: invalid partition specified: nope; Batch job submission failed: Invalid partition name specified; "
            "change --slurm or --per-machine",
        ),
        (["--slurm", "--gpus-per-node=2"], "sbatch: Invalid generic resource (gres) specification; change --slurm"),
    ],
)
def test_what_slurm_refuses_is_one_line_and_leaves_nothing(cluster, words, message):
    with pytest.raises(Refusal) as refused:
        cli.run(["run", "mine.yaml", "--on", "slurm", *words])
    assert str(refused.value).startswith(message)
    assert not Path("runs").exists()


@pytest.mark.launches
def test_more_jobs_than_a_user_may_have_are_submitted_as_others_end(cluster, monkeypatch, capsys):
    """By a stand-in for the limit, which takes accounting: sbatch refuses while one job is there."""
    asked = order(program=("sh", "-c", "exit 1"))
    ask = slurm._ask

    def limited(program: str, *words: str) -> str:
        if program == "sbatch" and any(not job.is_over for job in slurm.jobs().values()):
            raise Refusal("sbatch: Job violates accounting/QOS policy")
        return ask(program, *words)

    monkeypatch.setattr(slurm, "_ask", limited)
    assert on_slurm.run(asked, runs(asked)) == runner.SOME_NOT_OK
    said = capsys.readouterr().out
    assert "sbatch: Job violates accounting/QOS policy: 1 run to be submitted as others end\n" in said
    assert said.count("submitted, job") == 2


@pytest.mark.launches
def test_one_run_on_two_nodes(cluster):
    assert cli.run(["run", "mine.yaml", "--on", "slurm", "--only", "ddp", "--per-machine", "1"]) == runner.ALL_OK
    script = (Path("runs/mine") / DDP / slurm.SCRIPT).read_text()
    assert "#SBATCH --nodes=2\n" in script
    record = schema.read(Path("runs/mine") / DDP)
    assert (record.status, record.proof.world_size) == ("ok", 2)
    assert record.proof.ranks_of_machines == [1, 1]
