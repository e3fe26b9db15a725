"""Exchange the reports of ranks through the process group's store.

A collective could hang other ranks if one rank does not take part in it. The store cannot.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

WAITS_SECONDS = 30  # how long to wait for a rank, which may have ended or may not be watched


def post(proof: str, step: int, mine: Any) -> Store:
    """Post this rank's report of a step to the store, and return the store.

    `mine` is None if there is nothing to compare. Then no other rank has to wait for the result.
    """
    store = PrefixStore(f"zero-study/{proof}", _get_default_store())
    store.set(f"{step}/{dist.get_rank()}", json.dumps(mine))
    if mine is None and dist.get_rank() == 0:
        store.set(f"{step}/decided", "null")
    return store


def agree(proof: str, step: int, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
    """Post this rank's report of a step, and return rank 0's decision on the reports of all ranks.

    Rank 0 calls `decide` with the reports, in rank order. None if a rank did not count the step, or did not answer
    within WAITS_SECONDS. Call this once per proof.
    """
    posted: list[Any] = []
    deadline = time.monotonic() + WAITS_SECONDS
    try:
        store = post(proof, step, mine)
        if dist.get_rank():
            decided = read(store, f"{step}/decided", 0, deadline)
        else:
            while len(posted) < dist.get_world_size() and None not in posted:
                posted.append(read(store, f"{step}/{len(posted)}", len(posted), deadline))
            decided = None if None in posted else decide(posted)
            store.set(f"{step}/decided", json.dumps(decided))
            # This rank may raise next, which ends the store.
            for rank in range(1, len(posted) if decided is not None else 0):
                read(store, f"gone/{rank}", rank, deadline)
        store.set(f"gone/{dist.get_rank()}", "true")
        return decided
    except dist.DistError:  # the rank that hosts the store has ended
        return None


def read(store: Store, key: str, rank: int, deadline: float) -> Any:
    """Wait for a key that another rank sets, and return its value. None if the rank has gone, or at the deadline."""
    while not store.check([key]):
        if time.monotonic() > deadline or (store.check([f"gone/{rank}"]) and not store.check([key])):
            return None
        time.sleep(0.002)
    return json.loads(store.get(key))
