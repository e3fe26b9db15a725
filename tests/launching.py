"""Starts real runs for tests: the one helper that does, so that tests share trainings, which cost seconds each.

They share them in a folder of the test session, so that workers of pytest-xdist do as well. What needs no more than a
training's outcome has it from `run`, whose processes are forked from one that has imported everything (see warm.py);
`launch` is `accelerate launch` itself.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from study.config import build_config
from study.records import schema
from study.records.schema import Record
from study.records.steps import read_steps
from study.run import as_words, make_run
from study.running.forking import ForkServer
from study.running.launch import TRAIN, command
from zero_study.engines import extensions
from zero_study.errors import Refusal
from zero_study.strategy.file import find_strategy, read_strategy

ROOT = Path(__file__).resolve().parents[1]
HAS_IPROUTE2 = all(shutil.which(program) for program in ("ip", "tc"))
TIMEOUT_SECONDS = 900  # a hang is found; a slow machine is none

# Small, but long enough for the probed step (the sixth) and two more; the learning rate lets the tiny model move.
DEFAULTS: dict[str, Any] = {"max_steps": 8, "num_train_examples": 64, "num_eval_examples": 16, "learning_rate": 1e-3}

Done = subprocess.CompletedProcess[str]
words = as_words  # flags as train.py takes them: {"max_steps": 8, "measure": False} is --max-steps 8 --no-measure

session_folder = Path()  # which conftest.py makes and deletes

_may_launch = True  # whether the test that runs is marked `launches`
_may_build = True  # whether it is in a set of tests that may build DeepSpeed's extensions
_has_launched = False
_servers: dict[str, ForkServer] = {}  # that trainings are forked from, by their Python


def begin_session(folder: Path) -> None:
    """Take the folder of a test session, which its workers share."""
    global session_folder
    session_folder = folder


def in_laboratory(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that divides this machine into several. CI is to have what that takes: without, it fails there."""
    lacks = os.geteuid() != 0 or not (HAS_IPROUTE2 or os.environ.get("CI"))
    reason = "a laboratory takes root, and ip and tc of iproute2; run: make iproute2"
    return pytest.mark.slow(pytest.mark.skipif(lacks, reason=reason)(test))


@dataclass(frozen=True)
class Run:
    """A run that ended well."""

    record: Record
    steps: list[dict[str, Any]]
    run_dir: Path


def run(strategy: str | Path, num_processes: int = 2, **flags: Any) -> Run:
    """Return the run of a strategy (its name or its file) with these flags; trained once for a whole test session."""
    return _run(fork, strategy, num_processes, flags)


def launch(strategy: str | Path, num_processes: int = 2, **flags: Any) -> Run:
    """Return the same by `accelerate launch`; started once for a whole test session."""
    return _run(_start, strategy, num_processes, flags)


def _run(start: Callable[..., Any], strategy: str | Path, num_processes: int, flags: dict[str, Any]) -> Run:
    flags = {**DEFAULTS, **flags}
    config_file = find_strategy(str(strategy))
    key = repr((str(strategy), num_processes, *sorted((name, str(value)) for name, value in flags.items())))
    name = f"{start.__name__}-{config_file.stem}-{num_processes}x-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    run_dir = once(name, lambda folder: start(config_file, num_processes, flags, folder))
    return read(run_dir, num_processes)


def read(run_dir: Path, num_processes: int) -> Run:
    """Return the run that is in a folder, which ended well."""
    record = schema.read(run_dir)
    assert record.status == "ok"
    assert record.world_size == record.proof.world_size == num_processes
    return Run(record, read_steps(run_dir), run_dir)


def once(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` has filled, once for a test session; where it fails, all who want it are told."""
    use()
    folder, done, failed = (session_folder / f"{name}{suffix}" for suffix in ("", ".done", ".failed"))
    with FileLock(session_folder / f"{name}.lock"):
        if failed.exists():
            raise AssertionError(failed.read_text())
        if not done.exists():
            folder.mkdir()
            try:
                make(folder)
            except Exception as error:
                failed.write_text(f"{type(error).__name__}: {error}")
                raise
            done.touch()
    return folder


def attempt(arguments: Sequence[str | Path], cwd: Path = ROOT, env: Mapping[str, str | None] | None = None) -> Done:
    """Run `zero-study ...`, `accelerate launch ...` or `python ...`, which may fail; None in `env`: no variable."""
    programs = {
        ("zero-study",): ["-m", "zero_study"],
        ("accelerate", "launch"): ["-m", "accelerate.commands.launch"],
        ("python",): [],
    }
    given = [str(word) for word in arguments]
    first = next(program for program in programs if tuple(given[: len(program)]) == program)
    asked = [sys.executable, *programs[first], *given[len(first) :]]
    _build_extensions(given, env)
    return subprocess.run(asked, cwd=cwd, env=environment(env), capture_output=True, text=True, timeout=TIMEOUT_SECONDS)


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's environment: one thread a process, no GPU, the study importable from anywhere."""
    fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    changed = {**os.environ, **fixed, **(changes or {})}
    return {name: value for name, value in changed.items() if value is not None}


def begin(may_launch: bool, may_build: bool = False) -> None:
    """Begin a test, which may start another Python, or may not, and may build DeepSpeed's extensions, or may not."""
    global _may_launch, _may_build, _has_launched
    _may_launch, _may_build, _has_launched = may_launch, may_build, False


def use() -> None:
    """Say that the test starts another Python, or uses what one has left; it fails where it may not."""
    global _has_launched
    _has_launched = True
    if not _may_launch:
        pytest.fail("starts another Python, or uses what one has left: mark it with @pytest.mark.launches")


def end() -> None:
    """End a test that has passed; it fails where it is marked and has launched nothing, or the other way round."""
    if _has_launched and not _may_launch:  # and something has caught what `use` raised
        pytest.fail("has tried to start another Python: mark it with @pytest.mark.launches")
    if _may_launch and not _has_launched:
        pytest.fail("starts no other Python: take its mark `launches` away")


def _arguments(config_file: Path, num_processes: int, flags: Mapping[str, Any], run_dir: Path) -> list[str]:
    """The command of a run's launch."""
    config = build_config(**flags, output_dir=run_dir)
    arguments = command(make_run(config, read_strategy(config_file, ROOT), num_processes))
    assert arguments[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    assert "--config_file" in arguments  # or the user's own default leaks in
    return arguments


def _start(config_file: Path, num_processes: int, flags: Mapping[str, Any], run_dir: Path) -> None:
    arguments = _arguments(config_file, num_processes, flags, run_dir)
    _build_extensions(arguments)
    done = subprocess.run(
        arguments, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    _check(arguments, done)


def _check(arguments: list[str], done: Done) -> None:
    if done.returncode:
        raise AssertionError(f"{' '.join(arguments)}\nexit status {done.returncode}\n{_tail(done.stderr)}")


def fork(
    config_file: Path,
    num_processes: int,
    flags: Mapping[str, Any],
    run_dir: Path,
    meanwhile: Callable[[int], None] | None = None,
) -> int:
    """Train into a folder by processes that are forked, and return the launcher's exit status.

    `meanwhile` is called with the launcher's process, and may kill it; without it any status but 0 is an error.
    """
    arguments = _arguments(config_file, num_processes, flags, run_dir)
    done = _fork("accelerate-launch", arguments[3:], ROOT, None, run_dir, meanwhile)
    if meanwhile is None:
        _check(arguments, done)
    return done.returncode


def fork_with(
    python: Path,
    config_file: Path,
    num_processes: int,
    flags: Mapping[str, Any],
    run_dir: Path,
    env: Mapping[str, str | None],
    script: Path = TRAIN,
) -> Done:
    """Train into a folder by forked processes of another Python, and return how its launcher ended.

    `script` is run in place of study/train.py, and takes the same arguments.
    """
    arguments = [str(script) if word == str(TRAIN) else word
                 for word in _arguments(config_file, num_processes, flags, run_dir)]  # fmt: skip
    return _fork("accelerate-launch", arguments[3:], ROOT, env, run_dir, python=str(python))


def command_line(
    arguments: Sequence[str | Path], cwd: Path = ROOT, env: Mapping[str, str | None] | None = None
) -> Done:
    """What `attempt` says of `zero-study` (left out) or `accelerate launch` with --num_processes, but forked."""
    is_launch = [*arguments[:2]] == ["accelerate", "launch"]
    return _forked("accelerate-launch" if is_launch else "zero-study", arguments[2 * is_launch :], cwd, env)


def script(path: Path, cwd: Path, *given: str, strategy: str = "ddp", num_processes: int = 2) -> Done:
    """What `accelerate launch` of a script says, forked from a process that has imported everything."""
    file = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    words = ["--config_file", file, "--num_processes", num_processes, "--main_process_port", "0", path, *given]
    return command_line(["accelerate", "launch", *words], cwd, {"DS_ACCELERATOR": "cpu"})


def python(arguments: Sequence[str | Path], cwd: Path, env: Mapping[str, str | None] | None = None) -> Done:
    """What `python` says of a script, or of `-m` a module, forked from a process that has imported everything."""
    return _forked("python", arguments, cwd, env)


def torchrun(
    arguments: Sequence[str | Path], cwd: Path, num_processes: int = 2, env: Mapping[str, str | None] | None = None
) -> Done:
    """What torch's launcher says of a script, or of `-m` a module, likewise."""
    return _forked("torchrun", ["--standalone", "--nproc-per-node", str(num_processes), *arguments], cwd, env)


def _forked(program: str, arguments: Sequence[str | Path], cwd: Path, env: Mapping[str, str | None] | None) -> Done:
    with tempfile.TemporaryDirectory(dir=session_folder) as folder:
        return _fork(program, [str(word) for word in arguments], cwd, env, Path(folder) / "command")


def _fork(
    program: str,
    arguments: list[str],
    cwd: Path,
    env: Mapping[str, str | None] | None,
    beside: Path,
    meanwhile: Callable[[int], None] | None = None,
    python: str = sys.executable,
) -> Done:
    """Run one of warm.py's programs; its output is kept beside a path."""
    use()
    _build_extensions(arguments, env)
    outputs = {name: beside.with_name(f"{beside.name}.{name}") for name in ("stdout", "stderr")}
    for output in outputs.values():
        output.write_bytes(b"")
    given = environment(env)
    process = _warm_server(python, env).start(program, arguments, **outputs, environment=given, folder=cwd)
    if meanwhile is not None:
        meanwhile(process.pid)
    status = None
    with suppress(subprocess.TimeoutExpired):
        status = process.wait(TIMEOUT_SECONDS)
    if status is None:
        os.kill(process.pid, signal.SIGKILL)  # and so the ranks of a launch
        process.wait()
    said = {name: path.read_text(errors="replace") for name, path in outputs.items()}
    if status is None:
        raise AssertionError(f"{program} {' '.join(arguments)}\nnot done in time\n{_tail(said['stderr'])}")
    return subprocess.CompletedProcess([program, *arguments], status, **said)


def _build_extensions(arguments: Sequence[str], env: Mapping[str, str | None] | None = None) -> None:
    """Build what the strategies named in a command need, before its time limit begins: a build takes minutes.

    A test that changes where extensions are, or which compiler there is, is about that, and builds nothing here.
    """
    if {"TORCH_EXTENSIONS_DIR", "PATH", "CXX"} & {*(env or ())}:
        return
    names = {word.removesuffix(".yaml").rpartition("/")[2] for words in arguments for word in words.split(",")}
    files = [ROOT / "accelerate_configs" / f"{name}.yaml" for name in names if "offload" in name]
    needs = {need for file in files if file.exists() for need in read_strategy(file, ROOT).needed_extensions}
    if needs and not _may_build:
        pytest.fail(f"builds {', '.join(sorted(needs))}, which takes minutes: mark it with @pytest.mark.slow")
    with suppress(Refusal):  # which the command says itself
        extensions.provide(needs, "a test")


def _warm_server(python: str, env: Mapping[str, str | None] | None) -> ForkServer:
    """This process's own of a Python, started when it is first asked for."""
    if python not in _servers:
        given = environment() if python == sys.executable else environment(env)
        _servers[python] = ForkServer(given, Path(__file__).with_name("warm.py"), python)
    return _servers[python]


def end_server() -> None:
    """End the processes that trainings are forked from, where any was started."""
    for server in _servers.values():
        server.close()


def _tail(output: str | bytes | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return "\n".join(text.splitlines()[-40:])
