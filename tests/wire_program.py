"""Ask gloo for collectives, print what the interface sent: wire_program.py RANK WORLD_SIZE ADDRESS BYTES COUNT"""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path

import torch
from torch import distributed

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast")
SETTLING_SECONDS = 0.3  # until acknowledgements are through


def ask(kind: str, whole: torch.Tensor, part: torch.Tensor) -> None:
    if kind == "all_gather":
        distributed.all_gather_into_tensor(whole, part)
    elif kind == "reduce_scatter":
        distributed.reduce_scatter_tensor(part, whole)
    elif kind == "all_reduce":
        distributed.all_reduce(whole)
    else:
        getattr(distributed, kind)(whole, 0)


def main() -> None:
    rank, world_size, num_bytes, count = (int(sys.argv[i]) for i in (1, 2, 4, 5))
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{sys.argv[3]}:29501", rank=rank, world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    whole, part = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4 // world_size)
    sent = {}
    for kind in KINDS:
        ask(kind, whole, part)  # connections are made
        distributed.barrier()
        time.sleep(SETTLING_SECONDS)
        before = int(counter.read_text())
        distributed.barrier()  # nobody sends before all have looked, here and below
        for _ in range(count):
            ask(kind, whole, part)
        distributed.barrier()
        time.sleep(SETTLING_SECONDS)
        sent[kind] = int(counter.read_text()) - before
        distributed.barrier()
    print(json.dumps(sent), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
