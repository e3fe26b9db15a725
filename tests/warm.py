"""Starts programs from a process that has imported everything, for tests that need what one leaves and no more.

`python warm.py` reads programs from stdin, a line of JSON each, and answers each with its process and its exit status.
"accelerate-launch" is accelerate's own launcher, with its arguments and environment: its process is forked from this
one, and the ranks that it starts are forked before it has a thread of its own. "torchrun" is the launcher of torch.
"zero-study" is the study's command, and "python" runs a script or `-m` a module. Python's start, the imports and the
digests of the imported files are all that is left out.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import Any, ClassVar, NoReturn

# What a run imports sooner or later, a line for each that asks for it: the launcher, the trainer, the engines.
IMPORTED = """
    accelerate.commands.launch torch.distributed.run
    study.__main__ study.train study.workloads study.training.pretraining study.training.checkpoints
    study.training.export study.training.observer study.training.optimizer_steps study.training.rank_failures
    study.training.counters
    datasets evaluate cpuinfo torch.profiler transformers.models.bert.modeling_bert
    transformers.models.gpt2.modeling_gpt2
    deepspeed deepspeed.module_inject.auto_ep_layer deepspeed.ops.adam deepspeed.ops.op_builder.all_ops
    deepspeed.runtime.superoffload.superoffload_stage3 torch._inductor.compile_fx torch.utils.cpp_extension
"""
SET_BY_IMPORTS: dict[str, str] = {}  # variables
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Import, then serve until stdin ends. Nothing here may start a thread: no tensor, no process group."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
    before = dict(os.environ)
    for name in IMPORTED.split():
        importlib.import_module(name)
    SET_BY_IMPORTS.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    _digest_libraries()
    gc.collect()
    gc.freeze()  # or every child would go through, and so copy, all that was imported
    assert threading.active_count() == 1
    for line in sys.stdin:
        asked, server = json.loads(line), os.getpid()
        process = os.fork()
        if not process:
            _be_started(asked, server)
            PROGRAMS[asked["program"]](asked)
        print(process, file=answers, flush=True)
        print(json.dumps(_wait(process, asked["timeout"])), file=answers, flush=True)


def _digest_libraries() -> None:
    """Read the files of the libraries once. Each run would spend a third of a second on it, for its record."""
    imports = sys.modules["study.records.imports"]
    imports._library = functools.cache(imports._library)
    for name in imports.LIBRARIES:
        imports._library(name)


def _wait(process: int, timeout: float) -> int | None:
    """A process's exit status as subprocess has it; None: it was killed, late or as the tests ended."""
    deadline, tests = time.monotonic() + timeout, os.getppid()
    while not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() > deadline or os.getppid() != tests:
            os.kill(process, signal.SIGKILL)  # and so the ranks of a launch
            os.waitpid(process, 0)
            return None
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _be_started(asked: dict[str, Any], server: int) -> None:
    """Let this fork be as if it were started with an environment, in a folder, its output in files."""
    os.setsid()
    _die_with(server)
    given = [(os.devnull, os.O_RDONLY), *((asked[name], os.O_WRONLY | os.O_CREAT) for name in ("stdout", "stderr"))]
    for number, (path, flags) in enumerate(given):
        os.dup2(os.open(path, flags, 0o644), number)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    atexit._clear()  # what the server registered is the server's
    sys.argv = [asked["program"], *asked["arguments"]]


def _command(_asked: dict[str, Any]) -> NoReturn:
    _leave(sys.modules["study.__main__"].main)


def _python(asked: dict[str, Any]) -> NoReturn:
    _leave(lambda: _run_words(asked["arguments"]))


LAUNCHERS = {  # program -> its module, and its option with the number of ranks
    "accelerate-launch": ("accelerate.commands.launch", "--num_processes"),
    "torchrun": ("torch.distributed.run", "--nproc-per-node"),
}


def _launch(asked: dict[str, Any]) -> NoReturn:
    arguments, (module, option) = asked["arguments"], LAUNCHERS[asked["program"]]
    num_ranks = int(arguments[arguments.index(option) + 1])
    Starts.waiting = [_fork_rank(asked, asked["env"]) for _ in range(num_ranks)]
    subprocess.Popen = Starts  # type: ignore[misc]
    sys.modules["torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"].Popen = Starts
    _leave(sys.modules[module].main)


class Starts(subprocess.Popen):
    """In the launcher: a rank's start hands its command to a process that waits for it, any other is as ever."""

    waiting: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, args: Any, **options: Any) -> None:
        if args[0] != sys.executable:
            super().__init__(args, **options)
            return
        process, pipe = self.waiting.pop(0)
        unknown = set(options) - {"env", "stdout", "stderr", "start_new_session"}
        assert not unknown, unknown
        assert options.get("stdout") is options.get("stderr") is None
        words = list(args[2:] if args[1] == "-u" else args[1:])
        content = {"words": words, "env": options["env"], "is_leader": options.get("start_new_session", False)}
        with os.fdopen(pipe, "w") as sent:
            print(json.dumps(content), file=sent)
        self.args, self.pid, self.returncode = args, process, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._sigint_wait_secs, self._waitpid_lock = True, 0.25, threading.Lock()


def _fork_rank(asked: dict[str, Any], environment: dict[str, str]) -> tuple[int, int]:
    """Fork a rank that waits for its command; return its process and the pipe that takes the command."""
    launcher = os.getpid()
    reads, writes = os.pipe()
    process = os.fork()
    if process:
        os.close(reads)
        return process, writes
    os.close(writes)
    _die_with(launcher)
    with os.fdopen(reads) as pipe:
        told = json.loads(pipe.readline())  # for ever where the launcher starts fewer: it then ends with its launcher
    if told["is_leader"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(told["env"] | SET_BY_IMPORTS)
    _show_launcher(launcher, [asked["program"], *asked["arguments"]], environment)
    sys.stdout.reconfigure(write_through=True)
    _leave(lambda: _run_words(told["words"]))


def _run_words(words: list[str]) -> None:
    """Run what stands behind `python` in a command: a script, or `-m` and a module, and its arguments."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def _show_launcher(launcher: int, words: list[str], environment: dict[str, str]) -> None:
    """Let psutil say of the launcher's process what a launcher that was started would have: a fork keeps the old."""
    import psutil

    for name, value in (("cmdline", words), ("environ", environment)):
        asked = getattr(psutil.Process, name)
        setattr(
            psutil.Process, name, lambda self, asked=asked, value=value: value if self.pid == launcher else asked(self)
        )


def _leave(program: Any) -> NoReturn:
    status = 0
    try:
        program()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


PROGRAMS = {"accelerate-launch": _launch, "torchrun": _launch, "zero-study": _command, "python": _python}

if __name__ == "__main__":
    main()
