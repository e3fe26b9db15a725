"""Starts programs from a process that has imported everything, for tests that need what one leaves and no more.

It is the study's own fork server (`zero-study run --fork`) with more programs: "torchrun" is the launcher of torch,
"zero-study" is the study's command, and "python" runs a script or `-m` a module.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from study.running import fork_server
from study.running.fork_server import Request

# What the tests' programs import, beside what every run does.
IMPORTED = "zero_study.__main__ study.training.export"


def command(_: Request) -> NoReturn:
    fork_server.leave(sys.modules["zero_study.__main__"].main)


def python(request: Request) -> NoReturn:
    fork_server.leave(lambda: fork_server.run_words(request["arguments"]))


PROGRAMS = {
    "accelerate-launch": fork_server.launch,
    "torchrun": fork_server.launch,
    "zero-study": command,
    "python": python,
}

if __name__ == "__main__":
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
    modules = " ".join([fork_server.OF_EVERY_RUN, *fork_server.OF_SOME_RUNS.values(), IMPORTED])
    fork_server.serve(modules, {}, PROGRAMS, may_have_cuda=True)  # a simulated GPU is none
