"""The study's own metrics: against values worked out by hand, and without network."""

from __future__ import annotations

import math
import socket

import evaluate
import pytest
import torch

from study.errors import Refusal
from study.workloads import load_metric


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"network used: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_accuracy_in_batches_of_tensors():
    metric = load_metric("accuracy")
    metric.add_batch(predictions=torch.tensor([1, 1, 1]), references=torch.tensor([1, 1, 0]))
    metric.add_batch(predictions=torch.tensor([0]), references=torch.tensor([0]))
    assert metric.compute() == {"accuracy": 0.75}


def test_perplexity_weighs_by_tokens():
    metric = load_metric("perplexity")
    metric.add(predictions=1.0, references=30)
    metric.add(predictions=2.0, references=10)
    result = metric.compute()
    assert result == {"validation_loss": pytest.approx(1.25), "perplexity": pytest.approx(math.exp(1.25))}


@pytest.mark.parametrize(("loss", "expected"), [(800.0, math.inf), (math.inf, math.inf)])
def test_perplexity_of_a_diverged_model_is_infinite(loss, expected):
    assert load_metric("perplexity").compute(predictions=[loss], references=[3])["perplexity"] == expected


def test_cache_that_cannot_be_written(monkeypatch):
    def deny(*args, **kwargs):
        raise PermissionError(13, "Permission denied", "cache")

    monkeypatch.setattr(evaluate, "load", deny)
    with pytest.raises(Refusal, match=r"accuracy .*Permission denied.* set that to a folder that you may write to"):
        load_metric("accuracy")
