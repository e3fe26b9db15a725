"""Test that each way in which a run can end is recognized, from texts that torch, accelerate and DeepSpeed print."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path

import pytest

from study.running import launch, outcome
from study.running.outcome import RankReport, classify_exit
from study.training.warnings_log import tidy_launcher
from zero_study import files, processes

FIXTURES = Path(__file__).parents[1] / "fixtures" / "records"
LAUNCHER = """\
Traceback (most recent call last):
  File "/x/site-packages/accelerate/commands/launch.py", line 1245, in main
    launch_command(args)
subprocess.CalledProcessError: Command '['python', 'study/train.py']' returned non-zero exit status 1."""
ONE_KILLED = LAUNCHER.replace("returned non-zero exit status 1.", "died with <Signals.SIGKILL: 9>.")
TORCHRUN = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
study/train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_10:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 4711)
  error_file: <N/A>
  traceback : {message}"""
RANK_KILLED = TORCHRUN.format(code="-9", message="Signal 9 (SIGKILL) received by PID 4711")
RANK_CRASHED = TORCHRUN.format(code="-11", message="Signal 11 (SIGSEGV) received by PID 4711")
RANK_ABORTED = TORCHRUN.format(code="-6", message="Signal 6 (SIGABRT) received by PID 4711")
RANK_FAILED = TORCHRUN.format(code="1", message="To enable traceback see: https://pytorch.org/docs/")
INTERRUPTED = RankReport("interrupted", 3, "Interrupted: interrupted by SIGTERM, from the user or from the launcher")


def traceback(error: str, *files: str) -> str:
    frames = [f'  File "/x/site-packages/{file}", line 7, in f\n    work()' for file in files or ("model.py",)]
    return "\n".join(["Traceback (most recent call last):", *frames, error])


def failed(error: str, step: int | None = 1) -> RankReport:
    return RankReport("failed", step, error)


def ended(status: str, message: str, told: RankReport | None = None, stderr: str = "", returncode: int = 1) -> tuple:
    """A run that ended so, and the start of what is to be said of it."""
    return stderr, told, returncode, status, message


CASES = {
    "ok": ended("ok", "final loss 0.5000", told=RankReport("ok", text="final loss 0.5000"), returncode=0),
    "abort after the record": ended("crashed", "rank 1 was ended by SIGABRT, after its record was written",
        told=RankReport("ok", text="final loss 0.5000"),
        stderr=RANK_ABORTED),
    "out of memory, recorded": ended("out_of_memory", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
        told=RankReport("out_of_memory", 1, "OutOfMemoryError: CUDA out of memory.\nTried to allocate 2 GiB."),
        stderr=RANK_FAILED),
    "out of memory, not recorded": ended("out_of_memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
        stderr=traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.") + "\n" + RANK_FAILED),
    "out of memory, and the other rank is killed": ended("out_of_memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
        stderr=traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.") + "\n" + RANK_KILLED),
    "out of memory in cuBLAS": ended("out_of_memory", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
        told=failed("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    "one process killed": ended("killed", "a process was ended by SIGKILL, perhaps by the kernel", stderr=ONE_KILLED),
    "the launcher killed": ended("killed", "the launcher was ended by SIGKILL, perhaps by the kernel", returncode=-9),
    "refused": ended("misconfigured", "data/imdb is not there; correct --data-dir",
        stderr="zero-study: data/imdb is not there; correct --data-dir\n" + LAUNCHER),
    "refused on one rank": ended("misconfigured", "data/imdb/train.parquet cannot be read; correct --data-dir",
        told=INTERRUPTED,
        stderr="zero-study: data/imdb/train.parquet cannot be read; correct --data-dir\n" + RANK_FAILED),
    "refused by DeepSpeed": ended("misconfigured", "DeepSpeedConfigError: no gradient clipping",
        told=failed("DeepSpeedConfigError: no gradient clipping", None),
        stderr=traceback(
            "deepspeed.runtime.config.DeepSpeedConfigError: no gradient clipping", "deepspeed/runtime/config.py")),
    "refused by DeepSpeed's schema": ended("misconfigured",
        "ValidationError: 1 validation error for DeepSpeedZeroConfig stage Input should be",
        told=failed("ValidationError: 1 validation error for DeepSpeedZeroConfig\nstage\n  Input should be", None)),
    "an assertion of DeepSpeed's before the first step": ended("misconfigured", "AssertionError: Micro batch size",
        told=failed("AssertionError: Micro batch size per gpu: 0 has to be greater than 0", None),
        stderr=traceback(
            "AssertionError: Micro batch size per gpu: 0 has to be greater than 0", "deepspeed/runtime/config.py")),
    "an assertion of DeepSpeed's in a step": ended("crashed", "AssertionError:", told=failed("AssertionError: ", 2),
        stderr=traceback("AssertionError", "deepspeed/runtime/zero/stage3.py")),
    "an assertion of the study's before the first step": ended("crashed", "AssertionError:",
        told=failed("AssertionError: ", None), stderr=traceback("AssertionError", "study/training/weights.py")),
    "an extension that does not compile": ended("crashed", "RuntimeError: Error building extension 'cpu_adam'",
        stderr=traceback("subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.")
        + "\n\nThe above exception was the direct cause of the following exception:\n\n"
        + traceback("RuntimeError: Error building extension 'cpu_adam'", "torch/utils/cpp_extension.py")),
    "no ninja": ended("crashed", "RuntimeError: Unable to JIT load the async_io op",
        told=failed("RuntimeError: Unable to JIT load the async_io op due to ninja not being installed.", None)),
    "a rank killed, and another that lost it": ended("killed", "rank 1 was ended by SIGKILL, perhaps by the kernel",
        told=failed("PeerLost: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer", 3),
        stderr=RANK_KILLED),
    "two ranks aborted": ended("crashed", "rank 1 was ended by SIGABRT",
        stderr=RANK_ABORTED.replace("rank      : 1", "rank      : 0") + "\n" + RANK_ABORTED),
    "a rank stopped": ended("stalled", "rank 1 did not call a collective within 20 s",
        told=RankReport(
            "stalled", 3, "Stalled: rank 1 did not call a collective within 20 s (--collective-timeout)"),
        stderr=RANK_FAILED),
    "a full disk that the run writes to": ended("killed", "runs/x: [Errno 28] No space left on device",
        told=RankReport("killed", 3, "OutputFailed: runs/x: [Errno 28] No space left on device")),
    "a full disk, by an error that names no folder": ended("killed",
        "SafetensorError: Error while serializing: I/O error: No space left on device",
        told=failed("SafetensorError: Error while serializing: I/O error: No space left on device", 3)),
    "a full disk that is swapped to": ended("crashed", "runs/x/swap: No space left on device",
        told=failed("OffloadFailed: runs/x/swap: No space left on device (AssertionError)", 3)),
    "a full disk": ended("crashed", "OSError: [Errno 28] No space left on device",
        told=failed("OSError: [Errno 28] No space left on device: 'swap/zero_stage_3/optimizer'")),
    "a read that comes back short": ended("crashed", "AssertionError", told=failed("AssertionError: ", 2),
        stderr=traceback(
            "AssertionError", "deepspeed/runtime/engine.py", "deepspeed/runtime/swap_tensor/optimizer_utils.py")),
    "nothing swapped": ended("crashed", "NVMe offload was requested",
        told=failed("Failed: NVMe offload was requested, but nothing was swapped", 8),
        stderr="zero-study failed: NVMe offload was requested, but nothing was swapped",
    ),
    "no number": ended("failed", "step 2: the loss is nan", told=failed("Failed: step 2: the loss is nan", 2)),
    "an exception in a rank that torch marks": ended("crashed", "KeyError: 'labels'",
        stderr="[rank1]: " + traceback("KeyError: 'labels'").replace("\n", "\n[rank1]: ") + "\n" + RANK_FAILED),
    "a segmentation fault": ended("crashed", "rank 1 was ended by SIGSEGV", told=INTERRUPTED, stderr=RANK_CRASHED),
    "ended by somebody": ended("crashed", "Interrupted: interrupted by SIGTERM", told=INTERRUPTED),
    "nothing said": ended("crashed", "exit status 3", returncode=3),
    "nothing left": ended("crashed", "the exit status is 0, but there is no record", returncode=0),
}  # fmt: skip


@pytest.mark.parametrize(("stderr", "told", "returncode", "status", "message"), CASES.values(), ids=CASES)
def test_how_it_ended(stderr, told, returncode, status, message):
    result, line, memory = classify_exit(stderr.splitlines(), told, returncode)
    assert (memory is not None) == (status == "out_of_memory")
    assert result == status
    assert line.startswith(message)
    assert "\n" not in line


def test_a_time_limit_after_the_record_was_written_is_a_crash():
    end = classify_exit([], RankReport("ok", text="final loss 0.5000"), 0, time_limit_seconds=60.0)
    assert end[:2] == ("crashed", "ended at its time limit of 60 s, after its record was written")


def test_who_did_not_come_is_told_by_the_watchdogs_of_those_who_did():
    """By torch's sources: NCCL's watchdog ends a process before it can report."""
    line = (
        "[rank{0}]:[E1121 08:00:00 ProcessGroupNCCL.cpp:683] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=20000) "
        "ran for 20047 milliseconds before timing out."
    )
    errors = [line.format(rank) for rank in (0, 3)] + RANK_CRASHED.splitlines()
    result = classify_exit(errors, None, 1, world_size=4)
    assert result[:2] == ("stalled", "ranks 1, 2 did not call a collective within 20 s (--collective-timeout)")


def test_where_nothing_could_be_recorded_the_folder_problem_why():
    full = "runs/x: No space left on device"
    assert classify_exit([], None, 1, folder_problem=full)[:2] == ("killed", full)
    assert classify_exit([], RankReport("failed", 2, "KeyError: 'labels'"), 1, folder_problem=full)[0] == "crashed"
    gone = f"runs/x {outcome.REMOVED}"
    for error in ("AssertionError: ", f"OffloadFailed: runs/x/swap {outcome.REMOVED}"):
        assert classify_exit([], RankReport("failed", 2, error), 1, folder_problem=gone)[:2] == ("killed", gone)
    assert classify_exit(RANK_KILLED.splitlines(), None, 1, folder_problem=gone)[0] == "killed"


def test_an_assertion_of_deepspeeds_reading_names_the_swap_folder():
    aborted = RANK_ABORTED.splitlines()
    said = "python: /x/deepspeed/ops/csrc/aio/py_lib/deepspeed_py_io_handle.cpp:34: bool is_valid_bytes_to_read(...): "
    full = "runs/x/swap: No space left on device"
    result = classify_exit([said + "Assertion `...' failed.", *aborted], None, 1, swap_problem=full)
    assert result[:2] == ("crashed", f"{full}; rank 1 was ended by SIGABRT while DeepSpeed read from the disk")
    assert classify_exit(aborted, None, 1, swap_problem=full)[:2] == ("crashed", "rank 1 was ended by SIGABRT")


@pytest.mark.parametrize(
    ("status", "message", "record"),
    [
        ("timed_out", "ended at its time limit of 9 s", "timed_out"),
        ("crashed", "Interrupted: interrupted by SIGTERM", "interrupted"),
        ("crashed", "rank 1 was ended by SIGSEGV", "failed"),
        ("out_of_memory", "rank 1 was ended by SIGKILL", "out_of_memory"),
    ],
)
def test_a_record_agrees_with_the_outcome(status, message, record):
    assert outcome.of_record(outcome.Exit(status, message)) == record


def test_exceptions_are_found_behind_what_launchers_put_before_a_line():
    lines = ["[default0]:[rank0]: Traceback", '[default0]:[rank0]:   File "/x/y.py", line 7, in f']
    lines += ["[default0]:[rank0]: zero_study.errors.Refusal: no hub; take files", "x.ChildFailedError: it said so"]
    assert processes.raised_in(lines) == [processes.Raised("zero_study.errors.Refusal: no hub; take files", "/x/y.py")]
    assert processes.raised_in(lines)[0].type == "Refusal"


@pytest.mark.parametrize(
    ("kernel_kill", "status", "words", "memory"),
    [
        ("host", "out_of_memory", "too much host memory", "host"),
        ("cap", "out_of_memory", "its control group may use", "cap"),
        ("none", "killed", "although the kernel did not end a process", None),
    ],
)
def test_the_kernels_count_types_a_kill(kernel_kill, status, words, memory):
    end = classify_exit([], None, -9, kernel_kill=kernel_kill)
    assert (end.status, end.memory) == (status, memory)
    assert words in end.message


def test_the_kernel_says_where_memory_was_short(tmp_path, monkeypatch):
    """Of control groups of version 1 and 2; what it does not say is left out."""
    groups = [tmp_path / "own", tmp_path / "above"]
    for group in groups:
        group.mkdir()
    monkeypatch.setattr(launch.this_machine, "control_groups", lambda controller: iter(groups))
    before = launch._out_of_memory_kills()
    assert "cap" not in before
    (groups[0] / "memory.events").write_text("oom 9\noom_kill 1\n")
    (groups[1] / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    assert launch._out_of_memory_kills()["cap"] == 3
    assert launch._short_memory({"host": 1, "cap": 3}, {"host": 2, "cap": 4}) == "cap"
    assert launch._short_memory({"host": 1, "cap": 3}, {"host": 2, "cap": 3}) == "host"
    assert launch._short_memory({"host": 1}, {"host": 1}) == "none"
    assert launch._short_memory({}, {}) is None


def test_an_allocators_error_says_which_memory(monkeypatch):
    on_host = "RuntimeError: [enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"
    assert outcome.memory_of("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.") == "device"
    capped = (
        "CUDA out of memory. GPU 0 has a total capacity of 79.19 GiB of which 78.1 GiB is free. 1.00 GiB allowed; Of"
    )
    assert outcome.memory_of(capped) == "cap"  # PyTorch says so where a process has a limit of its own
    assert outcome.memory_of(on_host) == "host"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 30, 1 << 30))  # as under `ulimit -v`
    assert outcome.memory_of(on_host) == "cap"


def test_what_a_run_told_is_its_record_or_the_first_report_of_another_rank(tmp_path):
    assert outcome.read_report(tmp_path) is None
    for rank, at, step in ((1, 20.0, 5), (2, 10.0, 4)):
        report = {"at": at, "status": "out_of_memory", "step": step, "error": f"OutOfMemoryError: on rank {rank}"}
        (tmp_path / f"failure-rank{rank}.json").write_text(json.dumps(report))
    assert outcome.read_report(tmp_path) == RankReport("out_of_memory", 4, "OutOfMemoryError: on rank 2")
    shutil.copy(FIXTURES / "auto-ddp" / "record.json", tmp_path / "record.json")
    told = outcome.read_report(tmp_path)
    assert told.status == "ok"
    assert told.text.startswith("final loss ")


def test_texts_hold_no_folder_of_this_machine(tmp_path, monkeypatch):
    home, project = tmp_path / "home", tmp_path / "project"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(files, "ROOT", project)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = f'File "{project}/study/train.py" {home}/data {tmp_path}/here/runs {home} {home}less {tmp_path}/hereafter'
    assert files.redact_paths(text) == f'File "./study/train.py" ~/data ./runs ~ {home}less {tmp_path}/hereafter'
    assert files.redact_paths("  host      : box.example.org") == "  host      : (this machine)"
    words = [f"{project}/.venv/bin/python", "-m", "accelerate.commands.launch", f"{project}/study/train.py"]
    assert outcome.shown_command([*words, f"{home}/x"]) == ["accelerate", "launch", "study/train.py", "~/x"]


def test_what_torchrun_leaves_of_a_launch_goes_with_its_last_rank(tmp_path, monkeypatch):
    """Of `accelerate launch`; what was written there stays, and so does a folder that was named."""
    for name, is_kept in (("torchelastic_ab12", False), ("logs", True)):
        for rank in ("0", "1"):
            (folder := tmp_path / name / "none_cd34" / "attempt_0" / rank).mkdir(parents=True)
        for rank in ("0", "1"):
            assert folder.is_dir()  # of the last one
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder.with_name(rank) / "error.json"))
            tidy_launcher()
        assert (tmp_path / name).exists() == is_kept
    log = tmp_path / "torchelastic_ef56" / "none_cd34" / "attempt_0" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.touch()
    for told in (str(log.with_name("error.json")), os.devnull):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", told)
        tidy_launcher()
    assert log.exists()
