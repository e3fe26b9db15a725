"""Start programs as forks of a process that has imported what they need. This is the program of that process.

It reads requests from stdin, one line of JSON each, and answers on stdout, also in JSON: first whether it is ready,
then for each request the process that it has forked and the exit status of that process. It handles one request at a
time. `forking.py` is its other side.

The program "accelerate-launch" is accelerate's own launcher, with the arguments and the environment of the request. The
launcher is forked from this process. The ranks that it starts are forked from the launcher before it has a thread of
its own, and wait for their command. So everything is as in an ordinary launch, but Python's start and the imports are
left out.
"""

from __future__ import annotations

import atexit
import ctypes
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, ClassVar, NoReturn

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# What every run imports sooner or later: the launcher, the trainer, the libraries. `summary` is imported by rank 0.
OF_EVERY_RUN = """
    accelerate.commands.launch torch.distributed.run
    study.train study.workloads study.training.pretraining study.training.checkpoints study.training.observer
    study.training.optimizer_steps study.training.rank_failures study.training.counters study.compare.summary
    datasets evaluate torch.profiler transformers.models.bert.modeling_bert transformers.models.gpt2.modeling_gpt2
"""

# Further modules that only some runs import: those with DeepSpeed, and with FSDP2, where accelerate imports DeepSpeed.
# A second process, forked from the first one, has imported them too. So no run has a library that it would not import.
OF_SOME_RUNS = {
    "deepspeed": """
        cpuinfo torch.utils.cpp_extension torch._inductor.compile_fx
        deepspeed deepspeed.module_inject.auto_ep_layer deepspeed.ops.adam deepspeed.ops.op_builder.all_ops
        deepspeed.runtime.superoffload.superoffload_stage3
    """
}

LAUNCHERS = {  # program -> its module, and its option with the number of ranks
    "accelerate-launch": ("accelerate.commands.launch", "--num_processes"),
    "torchrun": ("torch.distributed.run", "--nproc-per-node"),
}

POLL_SECONDS = 0.01
LEFT_OVER_SECONDS = 10.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # numbers of prctl

Request = dict[str, Any]
Program = Callable[[Request], NoReturn]

_set_by_imports: dict[str, str] = {}  # environment variables
_own_files: list[IO[str]] = []  # pipes of the servers, which forked programs must not keep open


def main() -> None:
    """Serve launches of this project's runs until stdin ends."""
    serve(OF_EVERY_RUN, OF_SOME_RUNS, {"accelerate-launch": launch})


def serve(
    modules: str, of_some: Mapping[str, str], programs: Mapping[str, Program], may_have_cuda: bool = False
) -> None:
    """Import modules, whose names are separated by spaces, and fork a process per request until stdin ends.

    `of_some` has further modules by the name of a group. A request that names the group is passed on to a second
    server, which is forked from this one and has imported these modules too. Nothing here may start a thread: no
    tensor, no process group. If CUDA is initialized, requests are refused unless `may_have_cuda`, for simulated GPUs.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # messages that libraries print are not answers
    _import(modules)
    reason = _why_not_fork(may_have_cuda)
    _tell(answers, {"refused": reason} if reason else {"ready": os.getpid()})
    if reason is None:
        _own_files.extend((sys.stdin, answers))
        _answer(sys.stdin, answers, of_some, programs)


def _import(modules: str) -> None:
    before = dict(os.environ)
    for name in modules.split():
        importlib.import_module(name)
    _set_by_imports.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    sys.modules["study.records.imports"].describe()  # reads the files of the libraries once; the forks have the digests
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a fork would copy all that was imported


def _why_not_fork(may_have_cuda: bool) -> str | None:
    if threading.active_count() > 1:
        return "an imported library has started a thread"
    torch = sys.modules.get("torch")
    has_cuda = torch is not None and torch.cuda.is_initialized()
    return "CUDA is already initialized" if has_cuda and not may_have_cuda else None


def _answer(requests: IO[str], answers: IO[str], of_some: Mapping[str, str], programs: Mapping[str, Program]) -> None:
    servers: dict[str, tuple[int, IO[str], IO[str]]] = {}
    # A launcher that a signal ended leaves its ranks to this process. The kernel has killed them.
    _libc().prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    for line in requests:
        request = json.loads(line)
        group = request.get("group")
        if group in of_some:
            if group not in servers:
                servers[group] = _fork_server(of_some[group], programs)
            _, sent, received = servers[group]
            print(line, end="", file=sent, flush=True)
            for _ in range(2):  # the process, and its exit status
                if not (answer := received.readline()):
                    sys.exit(f"the server with the modules of {group} has ended")
                print(answer, end="", file=answers, flush=True)
        else:
            process, ranks = _fork(request, programs)
            _tell(answers, {"process": process})
            _tell(answers, {"status": _wait(process, ranks)})
    for process, sent, _ in servers.values():  # so that their processor time counts as that of a child
        sent.close()
        os.waitpid(process, 0)


def _tell(answers: IO[str], content: Mapping[str, Any]) -> None:
    print(json.dumps(content), file=answers, flush=True)


def _fork_server(modules: str, programs: Mapping[str, Program]) -> tuple[int, IO[str], IO[str]]:
    """Fork a server that imports further modules. Return its process and the files for its requests and answers."""
    server = os.getpid()
    (requests, sends), (receives, answers) = os.pipe(), os.pipe()
    process = os.fork()
    if not process:
        try:
            _die_with(server)
            _close_own_files()
            os.close(sends)
            os.close(receives)
            _import(modules)
            files = os.fdopen(requests), os.fdopen(answers, "w")
            _own_files.extend(files)
            _answer(*files, {}, programs)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(requests)
    os.close(answers)
    _own_files.extend((os.fdopen(sends, "w"), os.fdopen(receives)))
    return process, _own_files[-2], _own_files[-1]


def _fork(request: Request, programs: Mapping[str, Program]) -> tuple[int, list[int]]:
    """Fork a process that runs a program. Return the process and the ranks that it has forked for a launcher."""
    server = os.getpid()
    reads, writes = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.close(reads)
            _be_started(request, server)
            if request["program"] in LAUNCHERS:
                Ranks.waiting = [_fork_rank(request, writes) for _ in range(_num_ranks(request))]
            os.write(writes, json.dumps([rank for rank, _ in Ranks.waiting]).encode())
            os.close(writes)
            programs[request["program"]](request)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads) as pipe:  # ends when the process is in its own session and has its ranks
        ranks = json.loads(pipe.read() or "[]")
    return process, ranks


def _wait(process: int, ranks: Iterable[int]) -> int:
    """Wait for a process, and return its exit status as subprocess does.

    Its ranks have ended then, too. They outlive a launcher that was killed only for a moment.
    """
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    deadline = time.monotonic() + LEFT_OVER_SECONDS
    while any(map(_exists, ranks)) and time.monotonic() < deadline:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_SECONDS)
    return status


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _be_started(request: Request, server: int) -> None:
    """Give this fork what a started process has: its session, files, folder, environment and arguments."""
    os.setsid()
    _die_with(server)
    _close_own_files()
    given = [(os.devnull, os.O_RDONLY), (request["stdout"], os.O_WRONLY), (request["stderr"], os.O_WRONLY)]
    for number, (path, flags) in enumerate(given):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    atexit._clear()  # what was registered in the server
    sys.argv = [request["program"], *request["arguments"]]


def _close_own_files() -> None:
    for file in _own_files:
        if file.fileno() > 2:
            file.close()
    _own_files.clear()


# ---------------------------------------------------------------- launchers and their ranks


def launch(request: Request) -> NoReturn:
    """Run a launcher in this process. Its ranks are processes that were forked before and wait for a command."""
    subprocess.Popen = Ranks  # type: ignore[assignment,misc]
    sys.modules["torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"].Popen = Ranks  # type: ignore[attr-defined]
    leave(sys.modules[LAUNCHERS[request["program"]][0]].main)


def _num_ranks(request: Request) -> int:
    arguments, option = request["arguments"], LAUNCHERS[request["program"]][1]
    return int(arguments[arguments.index(option) + 1])


class Ranks(subprocess.Popen):  # type: ignore[type-arg]
    """A replacement for a launcher's way to start ranks: they run in processes that were forked before."""

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


def _fork_rank(request: Request, unused: int) -> tuple[int, int]:
    """Fork a rank that waits for its command. Return its process and the pipe that takes the command.

    `unused` is a file of the launcher that the rank closes.
    """
    launcher = os.getpid()
    reads, writes = os.pipe()
    process = os.fork()
    if process:
        os.close(reads)
        return process, writes
    os.close(writes)
    os.close(unused)
    _die_with(launcher)
    with os.fdopen(reads) as pipe:
        line = pipe.readline()  # if the launcher starts fewer ranks, this one ends with it
    given = json.loads(line)
    if given["is_leader"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(given["env"] | _set_by_imports)
    _show_launcher(launcher, request)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    leave(lambda: run_words(given["words"]))


def run_words(words: Sequence[str]) -> None:
    """Run a script or a module, from the words of a command after `python`."""
    is_module = words[0] == "-m"
    sys.argv = list(words[1:] if is_module else words)
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0])))
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _show_launcher(launcher: int, request: Request) -> None:
    """Let psutil return the command and environment of the launcher as if it had been started.

    The kernel still has those of the server from which the launcher was forked.
    """
    import psutil

    values = {"cmdline": [request["program"], *request["arguments"]], "environ": request["env"]}
    for name, value in values.items():
        original = getattr(psutil.Process, name)
        setattr(
            psutil.Process,
            name,
            lambda self, original=original, value=value: value if self.pid == launcher else original(self),
        )


def leave(program: Callable[[], object]) -> NoReturn:
    """Run a program in this fork. Then end the process with the exit status that Python would return."""
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


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    _libc().prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    # No file of this folder may replace a module of that name.
    sys.path[:] = [
        folder for folder in sys.path if os.path.abspath(folder) != os.path.dirname(os.path.abspath(__file__))
    ]
    sys.path.append(ROOT)
    main()
