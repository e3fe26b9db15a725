"""Run a user's script as Python would run it, for programs that take a script and its arguments."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from .. import terminal
from ..verdict import REFUSED
from . import cpu_launch, torch_locks
from .hooks import wrap_function

LETTING_GO_SECONDS = 0.05  # a thread needs microseconds, on a machine that is busy milliseconds
# A script's globals live as long as the process, as in Python itself. If they were freed when the script ends, DDP and
# its process group might wait for their threads forever, and the script's exit handlers would lack them.
_globals: list[dict[str, Any]] = []
_module: list[str] = []  # how `parse` was called: -m, the name of the program, and its options


class Parser(argparse.ArgumentParser):
    """A command-line parser for programs started with `python -m`, which prints errors wrapped to the terminal."""

    def error(self, message: str) -> NoReturn:
        terminal.print_error(f"{message.rstrip('.')}. `{self.prog} --help` lists the options.", self.prog)
        sys.exit(REFUSED)


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """Parse a program's own options, the path of a user's script, and the script's arguments."""
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the script")
    options = parser.parse_args(words)
    own = [*(sys.argv[1:] if words is None else words)]
    _module[:] = [*parser.prog.split()[1:], *own[: len(own) - len(options.arguments) - 1]]
    if not options.script.is_file():
        parser.error(f"{options.script}: this file does not exist. Name a script, followed by its arguments.")
    return options


def run(script: Path, arguments: Sequence[str]) -> None:
    """Run a user's script to its end in this process, with its own command line and import path.

    Rank 0 first removes the locks of killed builds of torch, for which the script may wait forever, and names those on
    stderr. If the script fails because it was not started as it expects, the right command is printed there. If it
    lacks a launcher, it ends with status 1 and without a traceback.
    """
    if rank() == 0:
        removed = [str(each) for each in torch_locks.remove_stale()]
        for line in [*removed, *map(torch_locks.description, torch_locks.unclear())]:
            print(line, file=sys.stderr, flush=True)
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    with _without_hard_exit(), wrap_function(dist, "destroy_process_group", _let_threads_end):
        try:
            _globals[:] = [runpy.run_path(str(script), run_name="__main__")]
        except BaseException as error:
            frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
            _globals[:] = [frame.f_globals for frame in frames if frame.f_code.co_filename == str(script)][:1]
            if isinstance(error, Exception) and cpu_launch.lacks_launcher(error):
                terminal.print_error(cpu_launch.launch_advice([*_module, str(script), *arguments]))
                raise SystemExit(1) from error
            remedy = cpu_launch.remedy(error) if isinstance(error, Exception) else None
            if remedy is not None and os.environ.get("LOCAL_RANK", "0") == "0":
                terminal.print_error(remedy)
            raise
        finally:
            _wait_for_threads()


def _let_threads_end(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    _wait_for_threads()
    return call(*arguments, **options)


def _wait_for_threads() -> None:
    """Give gloo's threads time to release the tensors that they have sent.

    A tensor that a probe has seen has a Python object. If such a thread holds the last reference to the tensor, it must
    free that object. If the group is destroyed at that moment, it waits for the thread, and the thread waits for
    Python's lock: both wait forever.
    """
    if dist.is_initialized():
        time.sleep(LETTING_GO_SECONDS)


@contextmanager
def _without_hard_exit() -> Iterator[None]:
    """Make `os._exit` in the script's main thread end only the script, because the results are not written yet."""
    own, hard_exit = os.getpid(), os._exit

    def leave(status: int) -> NoReturn:
        if os.getpid() == own and threading.current_thread() is threading.main_thread():
            raise SystemExit(status)
        hard_exit(status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = hard_exit


def rank() -> int:
    """Return this process's rank, even if its process group was destroyed or never created."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
