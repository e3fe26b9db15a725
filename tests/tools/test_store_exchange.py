"""What ranks post to each other for `prove`: nobody waits for ever for a rank that has ended or posts nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from zero_study.prove import store_exchange

STEP = 3


@pytest.fixture
def exchange(monkeypatch) -> Callable[[list[Callable[[], Any]]], list[Any]]:
    """Run one function per rank in threads that share a store; return what each returned."""
    store, local = dist.HashStore(), threading.local()
    monkeypatch.setattr(store_exchange, "_get_default_store", lambda: store)
    monkeypatch.setattr(store_exchange, "WAITS_SECONDS", 1.0)
    monkeypatch.setattr(dist, "get_rank", lambda: local.rank)

    def run(ranks: list[Callable[[], Any]]) -> list[Any]:
        monkeypatch.setattr(dist, "get_world_size", lambda: len(ranks))
        results: list[Any] = ["did not end"] * len(ranks)

        def of_rank(rank: int) -> None:
            local.rank = rank
            results[rank] = ranks[rank]()

        threads = [threading.Thread(target=of_rank, args=(rank,), daemon=True) for rank in range(len(ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        return results

    return run


def posting(report: Any) -> Callable[[], Any]:
    return lambda: store_exchange.agree("proof", STEP, report, sum)


def test_every_rank_has_what_rank_0_decides_of_all(exchange):
    assert exchange([posting(1), posting(2), posting(4)]) == [7, 7, 7]


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_never_posts_is_waited_for_only_so_long(exchange, silent):
    ranks = [posting(1), posting(2), posting(4)]
    ranks[silent] = lambda: "ended"
    began = time.monotonic()
    results = exchange(ranks)
    assert [result for rank, result in enumerate(results) if rank != silent] == [None, None]
    assert time.monotonic() - began < 10


def test_a_rank_that_counts_another_step_lets_the_others_go_at_once(exchange, monkeypatch):
    monkeypatch.setattr(store_exchange, "WAITS_SECONDS", 20.0)
    began = time.monotonic()
    assert exchange([posting(1), lambda: store_exchange.post("proof", STEP, None) and "left"]) == [None, "left"]
    assert time.monotonic() - began < 15


def test_a_store_that_has_gone_with_its_rank_decides_nothing(exchange, monkeypatch):
    def gone(*_: Any) -> Any:
        raise dist.DistNetworkError("the connection was closed")

    monkeypatch.setattr(store_exchange, "post", gone)
    assert exchange([posting(1), posting(2)]) == [None, None]
