"""Is every way in which a run ends told apart, from texts that torch, accelerate and DeepSpeed really print?"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest

from study import files
from study.running import ending
from study.running.ending import OwnReport, classify
from study.training.screen import LibraryWarnings

FIXTURES = Path(__file__).parent / "fixtures" / "records"
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
RANK_FAILED = TORCHRUN.format(code="1", message="To enable traceback see: https://pytorch.org/docs/")
INTERRUPTED = OwnReport("interrupted", 3, "Interrupted: interrupted by SIGTERM, from the user or from the launcher")


def traceback(error: str, *files: str) -> str:
    frames = [f'  File "/x/site-packages/{file}", line 7, in f\n    work()' for file in files or ("model.py",)]
    return "\n".join(["Traceback (most recent call last):", *frames, error])


CASES = {
    "ok": ("", OwnReport("ok", text="final loss 0.5000"), 0, "ok", "final loss 0.5000"),
    "abort after the record": (
        TORCHRUN.format(code="-6", message="Signal 6 (SIGABRT) received by PID 1"),
        OwnReport("ok", text="final loss 0.5000"),
        1,
        "crashed_after_result",
        "rank 1 was ended by SIGABRT, after its record was written",
    ),
    "out of memory, recorded": (
        RANK_FAILED,
        OwnReport("out_of_memory", 1, "OutOfMemoryError: CUDA out of memory.\nTried to allocate 2 GiB."),
        1,
        "out_of_memory",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
    ),
    "out of memory, not recorded": (
        traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.") + "\n" + RANK_FAILED,
        None,
        1,
        "out_of_memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
    ),
    "out of memory in cuBLAS": (
        "",
        OwnReport(
            "failed", 1, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
        ),
        1,
        "out_of_memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
    ),
    "one process killed": (ONE_KILLED, None, 1, "killed", "a process was ended by SIGKILL, perhaps by the kernel"),
    "a rank killed": (RANK_KILLED, INTERRUPTED, 1, "killed", "rank 1 was ended by SIGKILL, perhaps by the kernel"),
    "the launcher killed": ("", None, -9, "killed", "the launcher was ended by SIGKILL, perhaps by the kernel"),
    "refused": (
        "zero-study: data/imdb is not there; correct --data-dir\n" + LAUNCHER,
        None,
        1,
        "misconfigured",
        "data/imdb is not there; correct --data-dir",
    ),
    "refused on one rank": (
        "zero-study: data/imdb/train.parquet cannot be read; correct --data-dir\n" + RANK_FAILED,
        INTERRUPTED,
        1,
        "misconfigured",
        "data/imdb/train.parquet cannot be read; correct --data-dir",
    ),
    "refused by DeepSpeed": (
        traceback("deepspeed.runtime.config.DeepSpeedConfigError: no gradient clipping", "deepspeed/runtime/config.py"),
        OwnReport("failed", None, "DeepSpeedConfigError: no gradient clipping"),
        1,
        "misconfigured",
        "DeepSpeedConfigError: no gradient clipping",
    ),
    "refused by DeepSpeed's schema": (
        "",
        OwnReport(
            "failed", None, "ValidationError: 1 validation error for DeepSpeedZeroConfig\nstage\n  Input should be"
        ),
        1,
        "misconfigured",
        "ValidationError: 1 validation error for DeepSpeedZeroConfig stage Input should be",
    ),
    "an assertion of DeepSpeed's before the first step": (
        traceback(
            "AssertionError: Micro batch size per gpu: 0 has to be greater than 0", "deepspeed/runtime/config.py"
        ),
        OwnReport("failed", None, "AssertionError: Micro batch size per gpu: 0 has to be greater than 0"),
        1,
        "misconfigured",
        "AssertionError: Micro batch size",
    ),
    "an assertion of DeepSpeed's in a step": (
        traceback("AssertionError", "deepspeed/runtime/zero/stage3.py"),
        OwnReport("failed", 2, "AssertionError: "),
        1,
        "crashed",
        "AssertionError:",
    ),
    "an assertion of the study's before the first step": (
        traceback("AssertionError", "study/training/weights.py"),
        OwnReport("failed", None, "AssertionError: "),
        1,
        "crashed",
        "AssertionError:",
    ),
    "an extension that does not compile": (
        traceback(
            "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.",
            "torch/utils/cpp_extension.py",
        )
        + "\n\nThe above exception was the direct cause of the following exception:\n\n"
        + traceback("RuntimeError: Error building extension 'cpu_adam'", "torch/utils/cpp_extension.py"),
        None,
        1,
        "build_failed",
        "RuntimeError: Error building extension 'cpu_adam'",
    ),
    "no ninja": (
        "",
        OwnReport("failed", None, "RuntimeError: Unable to JIT load the async_io op due to ninja not being installed."),
        1,
        "build_failed",
        "RuntimeError: Unable to JIT load the async_io op",
    ),
    "another CUDA than torch's": (
        "",
        OwnReport(
            "failed", None, "CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 11.2 does not"
        ),
        1,
        "build_failed",
        "CUDAMismatchException: >- DeepSpeed Op Builder",
    ),
    "a rank killed, and another that lost it": (
        RANK_KILLED,
        OwnReport("failed", 3, "PeerLost: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"),
        1,
        "killed",
        "rank 1 was ended by SIGKILL, perhaps by the kernel",
    ),
    "two ranks aborted": (
        TORCHRUN.format(code="-6", message="Signal 6 (SIGABRT) received by PID 1").replace(
            "rank      : 1", "rank      : 0"
        )
        + "\n"
        + TORCHRUN.format(code="-6", message="Signal 6 (SIGABRT) received by PID 2"),
        None,
        1,
        "crashed",
        "rank 1 was ended by SIGABRT",
    ),
    "a rank stopped": (
        RANK_FAILED,
        OwnReport("stalled", 3, "Stalled: rank 1 did not come to a collective within 20 s (--collective-timeout)"),
        1,
        "stalled",
        "rank 1 did not come to a collective within 20 s",
    ),
    "a full disk that the run writes to": (
        "",
        OwnReport("output_failed", 3, "OutputFailed: runs/x: [Errno 28] No space left on device"),
        1,
        "output_failed",
        "runs/x: [Errno 28] No space left on device",
    ),
    "a full disk, by an error that names no folder": (
        "",
        OwnReport("failed", 3, "SafetensorError: Error while serializing: I/O error: No space left on device"),
        1,
        "output_failed",
        "SafetensorError: Error while serializing: I/O error: No space left on device",
    ),
    "a full disk that is swapped to": (
        "",
        OwnReport("failed", 3, "OffloadFailed: runs/x/swap: No space left on device (AssertionError)"),
        1,
        "offload_failed",
        "runs/x/swap: No space left on device",
    ),
    "a full disk": (
        "",
        OwnReport("failed", 1, "OSError: [Errno 28] No space left on device: 'swap/zero_stage_3/optimizer'"),
        1,
        "offload_failed",
        "OSError: [Errno 28] No space left on device",
    ),
    "a read that comes back short": (
        traceback("AssertionError", "deepspeed/runtime/engine.py", "deepspeed/runtime/swap_tensor/optimizer_utils.py"),
        OwnReport("failed", 2, "AssertionError: "),
        1,
        "offload_failed",
        "AssertionError",
    ),
    "nothing swapped": (
        "zero-study failed: NVMe offload was asked, and the ranks wrote [0] bytes: nothing was swapped",
        OwnReport("failed", 8, "Failed: NVMe offload was asked, and the ranks wrote [0] bytes: nothing was swapped"),
        1,
        "offload_failed",
        "NVMe offload was asked",
    ),
    "no number": (
        "",
        OwnReport("failed", 2, "Failed: step 2: the loss is nan"),
        1,
        "failed",
        "step 2: the loss is nan",
    ),
    "an exception": (
        traceback("KeyError: 'labels'") + "\n" + LAUNCHER,
        OwnReport("failed", 2, "KeyError: 'labels'"),
        1,
        "crashed",
        "KeyError: 'labels'",
    ),
    "an exception in a rank that torch marks": (
        "[rank1]: " + traceback("KeyError: 'labels'").replace("\n", "\n[rank1]: ") + "\n" + RANK_FAILED,
        None,
        1,
        "crashed",
        "KeyError: 'labels'",
    ),
    "a segmentation fault": (RANK_CRASHED, INTERRUPTED, 1, "crashed", "rank 1 was ended by SIGSEGV"),
    "ended by somebody": ("", INTERRUPTED, 1, "crashed", "Interrupted: interrupted by SIGTERM"),
    "nothing said": ("", None, 3, "crashed", "exit status 3"),
    "nothing left": ("", None, 0, "crashed", "exit status 0 and no record"),
}


@pytest.mark.parametrize(("stderr", "told", "returncode", "status", "message"), CASES.values(), ids=CASES)
def test_how_it_ended(stderr, told, returncode, status, message):
    found, line = classify(stderr.splitlines(), told, returncode)
    assert found == status
    assert line.startswith(message)
    assert "\n" not in line


def test_who_did_not_come_is_told_by_the_watchdogs_of_those_who_did():
    """By torch's sources: NCCL's watchdog ends a process before it can report."""
    line = (
        "[rank{0}]:[E1121 08:00:00 ProcessGroupNCCL.cpp:683] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=20000) "
        "ran for 20047 milliseconds before timing out."
    )
    errors = [line.format(rank) for rank in (0, 3)] + RANK_CRASHED.splitlines()
    found = classify(errors, None, 1, world_size=4)
    assert found == ("stalled", "ranks 1, 2 did not come to a collective within 20 s (--collective-timeout)")


def test_where_nothing_could_be_recorded_the_folder_says_why():
    full = "runs/x: No space left on device"
    assert classify([], None, 1, folder_says=full) == ("output_failed", full)
    assert classify([], OwnReport("failed", 2, "KeyError: 'labels'"), 1, folder_says=full)[0] == "crashed"
    gone = f"runs/x {ending.REMOVED}"
    assert classify([], OwnReport("failed", 2, "AssertionError: "), 1, folder_says=gone) == ("output_failed", gone)
    assert classify(
        [], OwnReport("failed", 2, f"OffloadFailed: runs/x/swap {ending.REMOVED}"), 1, folder_says=gone
    ) == (
        "output_failed",
        gone,
    )
    assert classify(RANK_KILLED.splitlines(), None, 1, folder_says=gone)[0] == "killed"


def test_an_assertion_of_deepspeeds_reading_names_the_swap_folder():
    aborted = TORCHRUN.format(code="-6", message="Signal 6 (SIGABRT) received by PID 1").splitlines()
    said = "python: /x/deepspeed/ops/csrc/aio/py_lib/deepspeed_py_io_handle.cpp:34: bool is_valid_bytes_to_read(...): "
    full = "runs/x/swap: No space left on device"
    found = classify([said + "Assertion `...' failed.", *aborted], None, 1, swap_says=full)
    assert found == ("offload_failed", f"{full}; rank 1 was ended by SIGABRT in DeepSpeed's reading")
    assert classify(aborted, None, 1, swap_says=full) == ("crashed", "rank 1 was ended by SIGABRT")


@pytest.mark.parametrize(
    ("status", "message", "record"),
    [
        ("killed", "rank 1 was ended by SIGKILL", "killed"),
        ("timed_out", "ended at its time limit of 9 s", "timed_out"),
        ("crashed", "Interrupted: interrupted by SIGTERM", "interrupted"),
        ("crashed", "rank 1 was ended by SIGSEGV", "failed"),
        ("offload_failed", "runs/x/swap: No space left on device", "failed"),
    ],
)
def test_a_record_agrees_with_the_outcome(status, message, record):
    assert ending.of_record(status, message) == record


def test_exceptions_are_found_behind_what_launchers_put_before_a_line():
    lines = ["[default0]:[rank0]: Traceback", '[default0]:[rank0]:   File "/x/y.py", line 7, in f']
    lines += ["[default0]:[rank0]: study.errors.Refusal: no hub; take files", "x.ChildFailedError: it said so"]
    assert ending.raised_in(lines) == [ending.Raised("study.errors.Refusal: no hub; take files", "/x/y.py")]
    assert ending.raised_in(lines)[0].type == "Refusal"


def test_a_time_limit_is_told_with_its_seconds():
    assert classify([], INTERRUPTED, -15, 90.0) == ("timed_out", "ended at its time limit of 90 s")
    found = classify([], OwnReport("ok", text="final loss 0.5"), -15, 90.0)
    assert found == ("crashed_after_result", "ended at its time limit of 90 s, after its record was written")


@pytest.mark.parametrize(
    ("short", "words"), [(True, "and the kernel ended a process"), (False, "though the kernel ended none")]
)
def test_the_kernels_count_words_a_kill(short, words):
    status, message = classify([], None, -9, host_memory_was_short=short)
    assert status == "killed"
    assert words in message


def test_what_a_run_told_is_its_record_or_the_first_report_of_another_rank(tmp_path):
    assert ending.read_report(tmp_path) is None
    for rank, at, step in ((1, 20.0, 5), (2, 10.0, 4)):
        report = {"at": at, "status": "out_of_memory", "step": step, "error": f"OutOfMemoryError: on rank {rank}"}
        (tmp_path / f"failure-rank{rank}.json").write_text(json.dumps(report))
    assert ending.read_report(tmp_path) == OwnReport("out_of_memory", 4, "OutOfMemoryError: on rank 2")
    shutil.copy(FIXTURES / "auto-ddp" / "record.json", tmp_path / "record.json")
    told = ending.read_report(tmp_path)
    assert told.status == "ok"
    assert told.text.startswith("final loss ")


def test_a_warning_that_a_full_disk_does_not_take_is_no_error(tmp_path):
    (tmp_path / "warnings.log").symlink_to("/dev/full")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        kept = LibraryWarnings()
        warnings.warn("early", stacklevel=1)
        kept.write_to(tmp_path)
        warnings.warn("while it trains", stacklevel=1)


def test_of_a_progress_bar_only_what_was_drawn_last_is_kept(tmp_path):
    log = tmp_path / "stderr.log"
    log.write_bytes(b"warning\n\r  0%|  | 0/8\r 50%|# | 4/8\r100%|##| 8/8\r\n\nlast \xff line\r\n")
    assert ending.read_lines(log) == ["warning", "100%|##| 8/8", "last \ufffd line"]


def test_texts_hold_no_folder_of_this_machine(tmp_path, monkeypatch):
    home, project = tmp_path / "home", tmp_path / "project"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(files, "ROOT", project)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = f'File "{project}/study/train.py" {home}/data {tmp_path}/here/runs {home} {home}less {tmp_path}/hereafter'
    assert files.shown_text(text) == f'File "./study/train.py" ~/data ./runs ~ {home}less {tmp_path}/hereafter'
    assert files.shown_text("  host      : box.example.org") == "  host      : (this machine)"
    words = [
        f"{project}/.venv/bin/python",
        "-m",
        "accelerate.commands.launch",
        f"{project}/study/train.py",
        f"{home}/x",
    ]
    assert ending.shown_command(words) == ["accelerate", "launch", "study/train.py", "~/x"]
