"""The study's program, to whose rank 1 something happens in the second step; ZS_TEST_FAULT says what.

Out of memory, unless it is the name of a signal that the rank sends itself. Started by test_failures.py.
"""

from __future__ import annotations

import os
import signal

from study import train
from study.workloads import WORKLOADS

if os.environ["RANK"] == "1":
    workload = WORKLOADS["bert-imdb"]
    loss, calls = workload.loss, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 2 and "ZS_TEST_FAULT" in os.environ:
            os.kill(os.getpid(), signal.Signals[os.environ["ZS_TEST_FAULT"]])
        elif len(calls) == 2:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 EB")
        return loss(*arguments)

    workload.loss = failing

train.main()
