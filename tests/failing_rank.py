"""The study's program, on whose rank 1 the second step runs out of memory. Started by test_failures.py."""

from __future__ import annotations

import os

from study import train
from study.workloads import WORKLOADS

if os.environ["RANK"] == "1":
    workload = WORKLOADS["bert-imdb"]
    loss, calls = workload.loss, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 EB")
        return loss(*arguments)

    workload.loss = failing

train.main()
