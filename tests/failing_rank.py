"""The study's program, whose rank 1 runs out of memory in step 2, or sends itself the signal in ZS_TEST_FAULT."""

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
