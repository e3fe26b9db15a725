"""`zero-study why` names the first failure of a log, states what is certain about it, and claims nothing else."""

from __future__ import annotations

import importlib.metadata
import io
import json
import pickle
import random
import re
import signal
import sys
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from refusing import refusal
from why_logs import (
    BACKWARD,
    CAUSE,
    CONSEQUENCES,
    CRASHES,
    FACTS,
    FAULT,
    HANDLING,
    IN_WAIT,
    KEY,
    LONG,
    LOSS,
    MEMORY,
    NOTHING,
    OPTIMIZER,
    ORDINAL,
    PIECES,
    PREFIXES,
    QWEN,
    RAYLET,
    REPORT,
    RISING,
    SECRETS,
    SOUND,
    STATUSES,
    STEP,
    TRACEBACK,
    WITHOUT_CAUSE,
    Code,
    full,
    of_rank,
    raised,
    waiting,
)

from zero_study import cli
from zero_study.logs.printed_failures import Failure, Frame, crash_of
from zero_study.logs.printed_settings import Setting
from zero_study.terminal import GIB
from zero_study.theory import gpus
from zero_study.upgrade import faults
from zero_study.why import answer, json_answer, known_faults, memory_messages, tensors, text, tracebacks
from zero_study.why.answer import Answer
from zero_study.why.fact import Fact

CASES = Path(__file__).parents[1] / "why"


def answer_of(lines: Sequence[str], environment: bool | None = False, **setting: Any) -> Answer:
    """Return the answer for the lines of a log."""
    return answer.answer([[f"{line}\n".encode() for line in lines]], Setting(**setting), (), environment)


def failure_of(*lines: str) -> Failure:
    failure = answer_of(lines).first_failure
    assert failure is not None
    return failure


def ids_of(lines: Sequence[str], **setting: Any) -> set[str]:
    return {fact.id for fact in answer_of(lines, **setting).facts}


def fact_of(id: str, lines: Sequence[str], **setting: Any) -> Fact:
    (fact,) = (fact for fact in answer_of(lines, **setting).facts if fact.id == id)
    return fact


def text_of(result: Answer) -> str:
    """Return the printed answer without its line breaks, and check that it claims nothing that it cannot know."""
    printed = " ".join(text.text(result).split())
    assert "Nothing wrong" not in printed
    return printed


# ---------------------------------------------------------------- public logs


def read_case(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def name_of(path: Path) -> str:
    return str(path.relative_to(CASES).with_suffix(""))


FIRST_FAILURES = [path for path in sorted(CASES.rglob("*.yaml")) if "first_failure" in read_case(path)]

LOCAL_RANK = "the launcher states only the local rank, which is not the rank if there are several machines"
# Where the program names another first failure than a person who had only the log.
KNOWN_DIFFERENCES = {
    "memory-host-ranks-load-model": LOCAL_RANK,
    "held_out_4/h5-08": LOCAL_RANK,
    "held_out_5/02-xflux-host-ram": LOCAL_RANK,
    "held_out/hang-validation-main-only": "the reader named the C++ exception, and the program the time-out",
}


def is_reading(reading: dict[str, Any] | None, failure: Failure | None) -> bool:
    """Return whether a failure is the one that a person read in the log."""
    if reading is None or failure is None:
        return (reading, failure) == (None, None)
    kinds = {
        "timeout": failure.kind == "Timeout",
        "crash": failure.signal > 0 or failure.kind in ("Assertion", "Killed"),
    }
    is_kind = kinds.get(reading["kind"], failure.kind == reading["kind"])
    return is_kind and (failure.number, failure.rank) == (reading["line"], reading["rank"])


@pytest.mark.parametrize("path", FIRST_FAILURES, ids=name_of)
def test_the_first_failure_of_a_public_log_is_the_one_that_an_independent_reader_named(path: Path) -> None:
    case, result = read_case(path), answer.answer([path.with_suffix(".log")])
    readings = [case["first_failure"], *case.get("alternative", [])]
    is_same = any(is_reading(reading, result.first_failure) for reading in readings)
    assert is_same != (name_of(path) in KNOWN_DIFFERENCES)
    assert text_of(result)
    json.dumps(answer.content(result))


def test_all_readings_are_there_and_a_thread_is_in_one_set_only_unless_the_case_says_from_where_it_is_known() -> None:
    assert len(FIRST_FAILURES) == 151
    assert {*map(name_of, FIRST_FAILURES)} >= KNOWN_DIFFERENCES.keys()
    known = "thread_known_from"
    cases = [read_case(path) for path in FIRST_FAILURES]
    sources = [case["source"] for case in cases if known not in case]
    assert len(sources) == len(set(sources))
    for case in (case for case in cases if known in case):
        assert read_case(CASES / f"{case[known]}.yaml")["source"] == case["source"]


@pytest.mark.parametrize("path", sorted((CASES / "sound").glob("*.log")), ids=name_of)
def test_nothing_is_found_in_a_sound_training_of_others(path: Path) -> None:
    result = answer.answer([path])
    assert (result.num_found, result.first_failure, result.cause) == (0, None, None)
    assert result.verdict.status in (0, 3)
    assert text_of(result)


# ---------------------------------------------------------------- prefixes


def prefixed(prefix: str, lines: Iterable[str]) -> list[str]:
    return [prefix.replace("##", str(number)) + line for number, line in enumerate(lines, start=10)]


@pytest.mark.parametrize("name", PREFIXES)
def test_a_traceback_behind_a_prefix_is_the_traceback_without_it(name: str) -> None:
    prefix, rank = PREFIXES[name]
    plain, behind = failure_of(*TRACEBACK), failure_of(*prefixed(prefix, TRACEBACK))
    assert (behind.kind, behind.message, behind.rank) == ("ValueError", "a broken sample", rank)
    assert behind.frames == plain.frames == (Frame(*STEP), Frame(*BACKWARD))
    assert tracebacks.user_frame(behind) == Frame(*STEP)
    lines = prefixed(prefix, raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", STEP))
    assert failure_of(*lines).first_line == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def test_a_logger_writes_its_prefix_only_before_the_first_line() -> None:
    failure = failure_of("2026-11-30 11:59:10,123 - trainer - ERROR - the step failed", *TRACEBACK)
    assert (failure.kind, len(failure.frames), failure.number) == ("ValueError", 2, 7)
    assert failure.time is not None
    assert failure.time.text == "after 2026-11-30 11:59:10,123"


@pytest.mark.parametrize("names", ["gpu01: gpu02: ", "trainer-1  | trainer-2  | ", "[rank0]: [rank1]: "])
def test_the_interleaved_tracebacks_of_two_hosts_are_kept_apart(names: str) -> None:
    half = len(names) // 2
    pairs = zip(prefixed(names[:half], TRACEBACK), prefixed(names[half:], KEY * 2), strict=False)
    by_kind = {failure.kind: failure for failure in answer_of([line for pair in pairs for line in pair]).log.failures}
    assert [frame.function for frame in by_kind["KeyError"].frames] == ["load"]
    assert [frame.function for frame in by_kind["ValueError"].frames] == ["step", "backward"]


def test_the_lines_of_two_ranks_that_are_written_into_one_line_are_kept_apart() -> None:
    lines = [
        "[rank0]: Traceback (most recent call last):[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/work/train.py", line 3, in main[rank0]:   File "/work/a.py", line 1, in f',
        "[rank1]: ValueError: one[rank0]: KeyError: 'two'",
    ]
    failures = {(each.rank, each.kind, each.frames[-1].function) for each in answer_of(lines).log.failures}
    assert failures == {(0, "KeyError", "f"), (1, "ValueError", "main")}


@pytest.mark.parametrize("prefix", ["gpu01: ", "[rank3]: ", "(TrainWorker pid=4242, ip=10.0.0.7) "])
def test_an_exception_whose_last_line_lost_its_prefix_keeps_its_frames_and_its_rank(prefix: str) -> None:
    failure = failure_of(*prefixed(prefix, TRACEBACK[:-1]), TRACEBACK[-1])
    assert [frame.function for frame in failure.frames] == ["step", "backward"]
    assert failure.rank == (3 if "rank3" in prefix else None)


@pytest.mark.parametrize(
    "lines",
    [
        [f"│ {line:60} │" for line in ("/work/train.py:12 in step", "", "  11   x = 1", "❱ 12   loss.backward()")],
        ["/work/train.py in step(self)", "     11     x = 1", "---> 12     loss.backward()"],
        ['\x1b[31m  File "/work/train.py", line 12, in step\x1b[0m', "    loss.backward()", "    ^^^^^^^^^^"],
    ],
    ids=["rich", "notebook", "colors-and-marks"],
)
def test_decorated_tracebacks_have_the_same_user_frame(lines: list[str]) -> None:
    for error in (
        "ValueError: a broken sample",
        " 12%|█▏ | 12/100 [00:10<01:20,  1.10it/s]ValueError: a broken sample",
    ):
        failure = failure_of("Traceback (most recent call last):", *lines, error)
        assert (tracebacks.user_frame(failure), failure.message) == (Frame(*STEP), "a broken sample")


# ---------------------------------------------------------------- the first failure


def test_the_exception_with_which_a_chain_began_is_the_first_failure() -> None:
    carried = raised("ValueError: Caught KeyError in DataLoader worker process 0.", STEP)
    in_worker = [*carried, "Original Traceback (most recent call last):", *KEY[1:]]
    for lines, number in (([*KEY, "", CAUSE, "", *TRACEBACK], 4), (in_worker, 8)):
        failure = failure_of(*lines)
        assert (failure.kind, failure.message, failure.number) == ("KeyError", "'loss'", number)
        assert failure.frames[-1].function == "load"
    result = answer_of([*KEY, "", HANDLING, "", *TRACEBACK])
    assert result.first_failure is not None
    assert (result.first_failure.kind, result.first_failure.number) == ("ValueError", 13)
    assert "KeyError: 'loss'" in text_of(result)


@pytest.mark.parametrize("name", CONSEQUENCES)
def test_a_failed_rank_comes_before_what_follows_from_it_wherever_it_is_in_the_log(name: str) -> None:
    later = CONSEQUENCES[name]
    for lines in ([*of_rank(1, *TRACEBACK), *later], [*later, "", *of_rank(1, *TRACEBACK)]):
        failure = failure_of(*lines)
        assert (failure.kind, failure.rank) == ("ValueError", 1)


@pytest.mark.parametrize(("code", "kind"), [("1", "ExitCode"), ("-9", "SIGKILL"), ("-11", "SIGSEGV")])
def test_the_root_cause_that_torchrun_reports_is_a_failure_with_rank_time_and_signal(code: str, kind: str) -> None:
    failure = failure_of(*REPORT.format(code).split("\n"))
    assert (failure.kind, failure.rank, failure.signal) == (kind, 5, max(0, -int(code)))
    assert failure.time is not None
    assert (failure.time.date, failure.time.seconds) == ((2026, 11, 30), 11 * 3600 + 59 * 60 + 1)


def test_an_exception_after_which_the_training_goes_on_comes_last_and_an_ignored_one_is_no_failure() -> None:
    assert failure_of(*TRACEBACK, "", *SOUND, "KeyError: 'evaluation'").kind == "KeyError"
    assert failure_of(*TRACEBACK, "", *SOUND[:2], "KeyError: 'evaluation'").kind == "ValueError"
    ignored = "Exception ignored in: <function DeepSpeedCPUAdam.__del__ at 0x7f>"
    assert answer_of([ignored, *TRACEBACK]).first_failure is None


def test_time_stamps_order_the_failures_of_several_files_and_their_names_state_ranks(tmp_path: Path) -> None:
    paths = []
    for rank, (minute, error) in enumerate([(58, "KeyError: 'a'"), (12, "ValueError: early"), (40, "TypeError: b")]):
        paths.append(tmp_path / f"rank_{rank}.log")
        lines = [f"2026-11-30 11:{minute}:00,000 INFO step", *raised(error, STEP, BACKWARD)]
        paths[-1].write_text("\n".join(lines), encoding="utf-8")
    result = answer.answer(paths)
    assert result.first_failure is not None
    assert (result.first_failure.kind, result.first_failure.rank) == ("ValueError", 1)
    assert result.log.place(result.first_failure.number) == (str(paths[1]), 7)
    assert result.num_later == 2


@pytest.mark.parametrize("line", CRASHES)
def test_a_native_crash_is_a_failure_with_its_signal(line: str) -> None:
    result = answer_of([*SOUND, line])
    (name, is_of_memory), failure = CRASHES[line], result.first_failure
    assert failure is not None
    assert (failure.kind, failure.signal, result.verdict.status) == (name, signal.Signals[name], 1)
    fact = fact_of("launch/signal", [*SOUND, line])
    assert (str(failure.signal) in fact.happened, bool(fact.because)) == (True, is_of_memory)
    assert line.split()[-1] in text_of(result)
    for other in ("exit code 1", "exited with code 0", "exit code: -1.5", "free memory: 12 GiB", "is killed by noise"):
        assert crash_of(other) == 0


def test_the_stack_of_the_failing_thread_belongs_to_the_crash() -> None:
    lines = f"""Fatal Python error: Segmentation fault

Thread 0x00007f12 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f34 (most recent call first):
  File "{BACKWARD[0]}", line 99 in backward
  File "/work/train.py", line 12 in step
"""
    failure = failure_of(*lines.split("\n"))
    assert [frame.function for frame in failure.frames] == ["step", "backward"]
    assert failure.signal == signal.SIGSEGV


def test_a_message_of_several_lines_is_quoted_in_full() -> None:
    message = ["RuntimeError: Error(s) in loading state_dict:", *(f"\tsize mismatch for layer {n}" for n in range(9))]
    result = answer_of([*TRACEBACK[:-1], *message, "", "wandb: run finished"])
    assert result.first_failure is not None
    assert result.first_failure.message.count("size mismatch") == text_of(result).count("size mismatch") == 9
    assert answer.content(result)["first_failure"]["message"].count("\n") == 9


def test_later_errors_are_counted_and_so_are_those_with_the_same_message() -> None:
    later = [f"[rank{rank}]: ValueError: a broken sample {rank}" for rank in range(1, 5)]
    result = answer_of([*of_rank(0, *TRACEBACK[:-1], "ValueError: a broken sample 0"), *later, "KeyError: 'x'"])
    content = answer.content(result)["first_failure"]
    assert (result.num_later, result.num_alike) == (5, 4)
    assert (content["num_later"], content["num_later_alike"]) == (5, 4)


def test_a_log_that_ends_inside_a_traceback_is_no_sound_training() -> None:
    result = answer_of([*SOUND, *TRACEBACK[:-1]])
    assert (result.first_failure, result.cause, result.verdict.status) == (None, None, 3)
    assert "step" in text_of(result)
    assert result.next_step.question


# ---------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(("id", "lines", "setting", "numbers", "is_cause"), FACTS)
def test_a_fact_states_its_numbers_and_the_cause_only_if_they_show_it(
    id: str, lines: list[str], setting: dict[str, Any], numbers: list[str], is_cause: bool
) -> None:
    fact, result = fact_of(id, lines, **setting), answer_of(lines, **setting)
    stated = f"{fact.happened} {fact.because}".lower()
    assert [number for number in numbers if number.lower() not in stated] == []
    assert (bool(fact.because), result.cause == fact) == (is_cause, is_cause)
    assert fact.evidence
    assert text_of(result)


@pytest.mark.parametrize(("id", "lines", "setting"), NOTHING)
def test_nothing_is_concluded_from_numbers_that_do_not_show_it(
    id: str, lines: list[str], setting: dict[str, Any]
) -> None:
    assert id not in ids_of(lines, **setting)


def test_a_signal_is_explained_by_the_last_line_on_the_memory_of_the_host_before_it() -> None:
    explained = fact_of("launch/signal", [MEMORY, "Killed"])
    assert (explained.kind, [line.number for line in explained.evidence]) == ("memory", [2, 1])
    for lines in (["Killed"], ["Killed", MEMORY], [MEMORY, "Segmentation fault (core dumped)"]):
        assert fact_of("launch/signal", lines).kind == "launch"
    assert fact_of("launch/signal", ["Out of memory: Killed process 4242 (python)"]).because
    assert (failure_of(RAYLET).kind, failure_of(RAYLET).signal) == ("Killed", 0)  # Ray names no signal


def test_sizes_are_rounded_as_the_allocator_does_and_folders_of_known_models_are_known() -> None:
    mib = 1 << 20
    assert [tensors.rounded(size * mib) / mib for size in (0.1, 2, 11, 12, 12.5)] == [2, 20, 12, 12, 14]
    shape = tensors.shape_of("/data/models/Qwen2.5-7B-Instruct")
    assert shape is not None
    assert shape == tensors.shape_of("qwen/qwen2.5-7b")
    assert tensors.shape_of("/data/models/own") is None
    assert tensors.vocabulary_of(Setting(), ["empty_strided_cuda((4096, 151936), (1, 1))"]) == 151_936
    assert tensors.vocabulary_of(Setting()) is None


def test_all_numbers_of_the_old_message_are_read() -> None:
    line = (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 1; 39.50 GiB total "
        "capacity; 35.50 GiB already allocated; 256.00 MiB free; 37.25 GiB reserved in total by PyTorch) If reserved"
    )
    message = memory_messages.read(failure_of(line))
    assert message is not None
    numbers = [message.tried, message.total, message.allocated, message.free, message.unused]
    assert [number and number / GIB for number in numbers] == [0.5, 39.5, 35.5, 0.25, 1.75]
    assert (message.gpu, message.own, message.processes, message.others) == (1, None, (), None)
    assert memory_messages.read(failure_of("ray.exceptions.OutOfMemoryError: the node is low on memory")) is None


def test_the_gpu_and_changes_that_fit_follow_from_the_memory_only_if_model_and_gpus_are_known() -> None:
    assert [gpus.usual_with(round(size * GIB)) for size in (79.14, 139.8, 5)] == ["a100-80gb", "h200", None]
    setting = QWEN | {"model": "llama-3.1-8b", "num_gpus": 2, "strategy": "ddp"}
    setting |= {"micro_batch_size": 1, "sequence_length": 2048}
    result = answer_of(full(OPTIMIZER), **setting)
    assert (result.setting.gpu, bool(result.remedies)) == ("a100-80gb", True)
    assert all(remedy["needed_bytes_per_gpu"] < 80 * GIB for remedy in result.remedies)
    for unknown in ({"num_gpus": None}, {"model": None}):
        assert not answer_of(full(OPTIMIZER), **setting | unknown).remedies
    assert not answer_of(TRACEBACK, **setting).remedies


def test_a_length_that_occurred_is_no_sequence_length_and_a_prediction_says_what_it_assumes() -> None:
    columns = "{'loss': 0.1, 'completions/max_length': 30.0}"
    setting = QWEN | {"model": "llama-3.1-8b", "num_gpus": 8, "strategy": "zero3", "micro_batch_size": 1}
    result = answer_of([columns, *full(OPTIMIZER)], **setting | {"sequence_length": None})
    assert result.setting.sequence_length is None
    (remedy,) = result.remedies
    assert "8 x a100-80gb, 1 x 1,024 tokens per GPU" in remedy["text"]
    stated = answer_of(["max_seq_len: 2048", *full(OPTIMIZER)], **setting | {"sequence_length": None})
    assert stated.setting.sequence_length == 2048


# ---------------------------------------------------------------- known faults, and the environment


@pytest.mark.parametrize("release", ["0.17.1", "0.17.2", "0.17.4", "0.17.5", None])
def test_a_known_fault_is_the_cause_only_if_the_log_states_a_release_that_has_it(release: str | None) -> None:
    stated = [f"deepspeed=={release}"] if release else []
    result = answer_of([*stated, *raised(FAULT, IN_WAIT)])
    is_affected = release in ("0.17.2", "0.17.4")
    assert [fault.id for fault in result.faults] == ["autocast-duplicate-gather"] * (is_affected or release is None)
    assert (result.cause is not None and result.cause.id == "start-up/known-fault") == is_affected
    if release is None:
        fact = fact_of("start-up/known-fault", raised(FAULT, IN_WAIT))
        assert (fact.is_open, "0.17.2" in fact.check, "0.17.5" in fact.check) == (True, True, True)


def test_a_known_fault_needs_the_exception_the_text_and_the_function() -> None:
    elsewhere = (*IN_WAIT[:2], "fetch", IN_WAIT[3])
    others = [
        (FAULT.replace("Assertion", "Runtime"), IN_WAIT),
        (FAULT.replace("inflight", "x"), IN_WAIT),
        (FAULT, elsewhere),
    ]
    assert [fault.id for error, frame in others for fault in answer_of(raised(error, frame)).faults] == []


@pytest.mark.parametrize("fault", [fault for fault in faults.read() if fault.signature], ids=lambda fault: fault.id)
def test_the_example_of_a_signature_has_the_signature(fault: faults.Fault) -> None:
    kind, example = fault.signature["exception"], fault.signature["example"]
    assert re.search(fault.signature["text"], example)
    if not (fault.signature["function"] or fault.beside):
        log = answer_of([*TRACEBACK[:-1], *(example if kind in example else f"{kind}: {example}").split("\n")]).log
        releases = {fault.package: fault.introduced or "0.0.1"}
        assert fault.id in {each.id for each, _ in known_faults.facts(log, releases)}


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a folder of packages with the release 1.2.3 of a package."""
    folder = tmp_path / "lib" / "python3.11" / "site-packages"
    (folder / "frob").mkdir(parents=True)
    (folder / "frob-1.2.3.dist-info").mkdir()
    (folder / "frob" / "core.py").write_text("def call():\n    return frobnicate(1)\n", encoding="utf-8")
    return folder


def of_package(file: Path | str, *code: str) -> list[str]:
    lines = [f'  File "{file}", line 2, in call', *(f"    {line}" for line in code), "ValueError: no frob"]
    return ["Traceback (most recent call last):", *lines]


def test_the_installed_packages_that_a_log_names_are_looked_at_if_they_have_its_lines(packages: Path) -> None:
    path = packages / "frob" / "core.py"
    result = answer_of(of_package(path), None)
    assert result.environment is not None
    assert result.environment.versions == {"frob": "1.2.3"}
    assert "return frobnicate(1)" in text_of(result)
    assert answer.content(result)["environment"] == {"folder": str(packages), "releases": {"frob": "1.2.3"}}
    assert answer_of(of_package(path), False).environment is None
    assert answer_of(of_package(path, "return frobnicate(1)"), None).environment is not None
    assert answer_of(of_package(path, "return frobnicate(2)"), None).environment is None


def test_the_packages_beside_this_program_are_looked_at_only_on_request() -> None:
    lines = of_package("/gone/site-packages/pytest/__init__.py")
    environment = answer_of(lines, True).environment
    assert environment is not None
    assert environment.versions == {"pytest": importlib.metadata.version("pytest")}
    assert answer_of(lines, None).environment is None


@pytest.mark.parametrize("is_requested", [True, None])
def test_a_log_cannot_make_the_program_read_other_files(
    is_requested: bool | None, packages: Path, tmp_path: Path
) -> None:
    for path in (tmp_path / "own.py", packages / "frob" / "key"):
        path.write_text("\nPRIVATE\n", encoding="utf-8")
    names = ["frob/key", "frob/../../../../own.py", "../site-packages/frob/../../../../own.py"]
    for file in ("/etc/passwd", "/proc/self/environ", f"{tmp_path}/own.py", *(f"{packages}/{name}" for name in names)):
        result = answer_of([*of_package(packages / "frob" / "core.py")[:-1], *of_package(file)[1:]], is_requested)
        printed = text_of(result) + json.dumps(answer.content(result))
        assert [word for word in ("PRIVATE", "root:", "PATH=") if word in printed] == []


# ---------------------------------------------------------------- the answer


def write(path: Path, lines: Iterable[str]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("lines", "status"), STATUSES, ids=["raised", "killed", "rising", "sound", "few", "none"])
def test_the_exit_status_says_whether_something_was_found(
    lines: list[str], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "log", lines)
    assert cli.run(["why", log]) == status
    printed = capsys.readouterr().out
    assert "Nothing wrong" not in printed
    assert ("30 rows" in printed) == (lines is SOUND)
    assert cli.run(["why", log, "--json"]) == status
    content = json.loads(capsys.readouterr().out)
    assert content["verdict"] == {0: "sound", 1: "found", 3: "unknown"}[status]
    assert (content["first_failure"] is not None) == (status == 1 and lines is not RISING)


def test_an_answer_in_json_has_these_keys_and_documented_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["why", write(tmp_path / "log", full(LOSS, unused="9.00 GiB")), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    keys = (
        "first_failure cause other_causes question record lines files num_lines num_rows ranks num_steps setting "
        "environment remedies known_faults_of_the_releases verdict findings schema"
    )
    assert content.keys() >= {*keys.split()}
    keys = (
        "id kind what_happened why certainty certainty_of_what_happened certainty_of_why basis is_open is_note "
        "evidence changes check documented"
    )
    assert content["cause"].keys() == {*keys.split()}
    assert (content["cause"]["id"], content["first_failure"]["line"]) == ("memory/fragmentation", 4)
    assert content["first_failure"]["library_frame"]["function"] == "fixed_cross_entropy"
    assert {finding["id"] for finding in content["findings"]} <= json_answer.ids().keys()
    assert content["findings"][0]["id"] == "why/first-failure"


@pytest.mark.parametrize("lines", WITHOUT_CAUSE)
def test_an_answer_without_a_cause_has_a_question_and_says_what_to_record(lines: list[str]) -> None:
    result = answer_of(lines)
    assert result.cause is None
    content = answer.content(result)
    assert (content["question"], content["cause"]) == (result.next_step.question, None)
    assert " ".join(result.next_step.question.split()[:3]) in text_of(result)
    assert bool(result.next_step.record) == (lines is not TRACEBACK)
    for line in result.next_step.record:
        assert " ".join(line.split()) in text_of(result)


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_are_masked_wherever_a_log_has_them(secret: str) -> None:
    frames: list[Code] = [(STEP[0], 3, "main", f"run('{secret}')"), (BACKWARD[0], 9, "call", f"check('{secret}')")]
    logs = [
        raised(f"OSError: 401 Client Error for {secret}", *frames),
        [*raised(f"KeyError: '{secret}'", *frames), "", HANDLING, "", *raised("ValueError: no", *frames)],
        [f"ERROR {secret}", "Killed"],
        [f"python train.py {secret}", *SOUND[:2]],
        [f"***** Running {secret} *****", *waiting((0, 9, "BROADCAST", 64))],
        [f"export CUDA_VISIBLE_DEVICES=0 {secret}", ORDINAL],
        [f"{secret} available memory", "Killed"],
    ]
    for lines in logs:
        result = answer_of(lines)
        assert SECRETS[secret] not in text.text(result).replace("\n", "").replace(" ", "")
        assert SECRETS[secret] not in json_answer.of(result).text()


@given(
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=40)), max_size=12), st.randoms(use_true_random=False)
)
def test_any_text_gets_an_answer(pieces: list[str], drawn: random.Random) -> None:
    whole = drawn.choice(["\n", "", " "]).join(pieces) or "x"
    result = answer_of(whole.split("\n"))
    assert text.text(result).replace("\n", "").isprintable()
    json_answer.of(result).text()


def test_any_bytes_get_an_answer(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(random.Random(2).randbytes(200_000))
    result = answer.answer([tmp_path / "log"])
    assert result.verdict.status in (0, 1, 3)
    assert text.text(result).replace("\n", "").isprintable()


@pytest.mark.parametrize("line", LONG, ids=["rows", "one-line", "errors"])
def test_a_long_log_needs_little_memory_and_time(line: str, tmp_path: Path) -> None:
    path, begin = Path(write(tmp_path / "log", [line * 40_000])), time.process_time()  # 10 MB
    answer.answer([path])
    assert time.process_time() - begin < 10
    tracemalloc.start()
    answer.answer([path])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8e6


def test_a_failure_is_found_in_lines_that_were_seen_before_with_other_digits() -> None:
    lines = [f"[rank{number % 2}]: loading shard {number}" for number in range(50)]
    failure = failure_of(*lines, *of_rank(1, *TRACEBACK[:2], "Frob"))
    assert (failure.kind, failure.rank) == ("Frob", 1)


# ---------------------------------------------------------------- the command line


def test_several_files_are_the_logs_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [waiting((0, 51, "ALLREDUCE", 4096)), [*TRACEBACK, "shutdown", ""]]
    paths = [write(tmp_path / str(rank) / "stderr.log", lines) for rank, lines in enumerate(logs)]
    assert cli.run(["why", *paths, "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    failure, place = content["first_failure"], content["findings"][0]["place"]
    assert (failure["file"], failure["line"], failure["rank"], failure["kind"]) == (paths[1], 6, 1, "ValueError")
    assert (place["file"], place["line"], place["rank"]) == (paths[1], 6, 1)
    assert [entry["file"] for entry in content["files"]] == paths
    assert cli.run(["why", *paths]) == 1
    assert "rank 1 raised ValueError" in " ".join(capsys.readouterr().out.split())


def test_a_recording_is_answered_without_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [{"cat": "kernel", "name": "gemm", "ts": 10 * number, "dur": 5} for number in range(20)]
    path = write(tmp_path / "trace.json", [json.dumps({"traceEvents": events})])
    assert cli.run(["why", "--trace", path, "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert (content["first_failure"], content["num_lines"], content["cause"]) == (None, 0, None)
    assert [fact["id"] for fact in content["other_causes"]] == ["slow/trace"]
    assert cli.run(["why", "--trace", path, write(tmp_path / "log", TRACEBACK)]) == 1
    assert "a broken sample" in capsys.readouterr().out


@pytest.mark.launches
def test_recordings_that_show_nothing_are_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = {"collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "state": "completed", "input_sizes": [[4]]}
    call |= {"record_id": 0, "process_group": ("0", "default_pg"), "is_p2p": False}
    for rank in range(2):
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps({"rank": rank, "entries": [call]}))
    for options in ([], ["--json"]):
        assert cli.run(["why", "--flight-recorder", str(tmp_path), *options]) == 3
        printed = capsys.readouterr()
        assert "Name the log" in (printed.out if options else printed.err)
    assert cli.run(["why", "--flight-recorder", str(tmp_path), write(tmp_path.parent / "log", TRACEBACK)]) == 1


def test_standard_input_is_read_by_default(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["why"], ["why", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(TRACEBACK).encode())))
        assert cli.run(words) == 1
        assert "a broken sample" in capsys.readouterr().out


def test_an_empty_log_is_refused(tmp_path: Path) -> None:
    assert "empty" in refusal(cli.run, ["why", write(tmp_path / "log", [])])


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        ("--strategy", "zero9", "zero3"), ("--gpu", "h900", "--gpu list"), ("--model", "nope", "gpt2"),
        ("--model", "llama-3.1-9b", "llama-3.1-8b"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_known_names(option: str, value: str, known: str, tmp_path: Path) -> None:
    log = write(tmp_path / "log", SOUND)
    message = refusal(cli.run, ["why", log, option, value])
    assert value in message
    assert known in message


def test_a_name_that_advise_knows_is_no_unknown_name(tmp_path: Path) -> None:
    for name in ("Qwen2.5-7B-Instruct", "gpt2-xl"):
        assert cli.run(["why", write(tmp_path / "log", SOUND), "--model", name]) == 0


# ---------------------------------------------------------------- lines that only look like a failure, and hostile ones

TEN_ROWS = [f"step {step} loss {20 - step}.5" for step in range(1, 11)]


@pytest.mark.parametrize(
    "line",
    [
        "exit_signal ............... Signals.SIGTERM", "kill_signal: SIGKILL", "Timeout: 1800", "Exit: 0",
        "MeanSquaredError: 0.2", "Killed by user request: none", "exit 150 steps", "exit_code: 140", "free(): ok",
        "NCCL INFO Bootstrap: SIGHUP ignored", "Received SIGTERM, saving checkpoint and exiting cleanly",
    ],
)  # fmt: skip
def test_a_line_that_only_names_a_failure_is_none(line: str) -> None:
    assert answer_of([line, *TEN_ROWS]).verdict.status == 0
    assert answer_of([*TEN_ROWS, line]).verdict.status == 0


@pytest.mark.parametrize(
    "line",
    [
        "Terminated", "Process finished with exit code 1", "Command terminated by signal 9",
        "srun: error: gpu01: task 1: Exited with exit code 1",
        "E0101 api.py:869] failed (exitcode: 1) local_rank: 1 (pid: 13) of binary: python",
    ],
)  # fmt: skip
def test_the_end_of_a_process_after_sound_rows_is_a_failure(line: str) -> None:
    assert answer_of([*TEN_ROWS, line]).verdict.status == 1


def test_a_notebook_and_a_message_before_the_traceback_hide_no_exception() -> None:
    lines = ["RuntimeError        Traceback (most recent call last)", "Cell In[3], line 2", "----> 2 f()"]
    assert failure_of(*lines, "", "RuntimeError: boom").number == 5
    twice = ["ValueError: boomTraceback (most recent call last):", '  File "a.py", line 2, in f', "ValueError: boom"]
    assert failure_of(*twice).frames


@pytest.mark.parametrize("number", ["0", "1.2.3", "9" * 400, "1e999"])
@pytest.mark.parametrize(
    "line",
    [
        "vocab_size: {}", "world_size: {}", "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has {} GiB is free",
        " 1%|x| {}/{} [00:01<00:02, {}s/it]", "step: 1 loss: {} step_time: -{}",
        "OVERFLOW! loss scale: {}, reducing to {}",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
        "Timeout(ms)={}) ran for {}",
    ],
)  # fmt: skip
def test_no_number_ends_the_program(line: str, number: str) -> None:
    answer_of(
        [line.replace("{}", number)] * 12 + ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"]
    )


@pytest.mark.parametrize("line", ["OVERFLOW!" * 100 + "loss scale " + "1" * 2900, "loss: 1.0 " + "a" * 3900])
def test_a_pathological_line_is_read(line: str) -> None:
    assert answer_of([line] * 10).log.num_lines == 10  # which took minutes


@pytest.mark.parametrize(
    "text",
    [
        "redis://:SECRETSECRET@10.0.0.1", "https://user:p@SECRETSECRET@host", "HF_TOKEN=12345678-SECRET-abcd",
        "Authorization: Basic SECRET", 'password="abc;SECRET"', "api_key = b'SECRET'", "PRIVATE_KEY=SECRET",
    ],
)  # fmt: skip
def test_more_secrets_are_masked(text: str) -> None:
    result = answer_of([f'  File "/home/{text}/train.py", line 2, in f', f"ValueError: {text}"])
    assert "SECRET" not in text_of(result) + json.dumps(answer.content(result))


def test_a_link_from_a_folder_of_packages_is_not_followed(packages: Path) -> None:
    (packages.parent / "private.py").write_text("first\nprivate\n")
    (packages / "frob" / "link.py").symlink_to(packages.parent / "private.py")
    assert "private" not in text_of(answer_of(of_package(packages / "frob" / "link.py", "x"), None)).replace(
        "private.py", ""
    )


def test_the_frames_of_another_rank_that_raised_the_same_are_shown() -> None:
    failure = failure_of(
        "[rank0]: ValueError: no 3", *[f"[rank1]: {line}" for line in TRACEBACK[:-1]], "[rank1]: ValueError: no 4"
    )
    assert (failure.rank, failure.number) == (0, 1)
    assert failure.frames
