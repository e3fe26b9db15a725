"""Train a cell of the conformance matrix without an engine, as a script in plain PyTorch would."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from zero_study.conformance import adapters, cells, optimizers, toy
from zero_study.conformance.cells import Cell


class Trained(NamedTuple):
    """The loss of a step and its gradient norm before clipping."""

    loss: float
    norm: float


def steps(cell: Cell, model: toy.Toy) -> Iterator[Trained]:
    """Train the model of a cell, and yield after each step what it gave."""
    optimizer = optimizers.build(cell, model)
    scheduler = adapters._schedule(cell, optimizer)
    for step in range(cells.NUM_STEPS):
        batch, loss = toy.tokens(cell, step), torch.zeros(())
        for rank, number in itertools.product(range(cell.num_ranks), range(cell.accumulation)):
            torch.manual_seed(toy.seed(step, rank, number))
            part = cell.micro_batches(rank)[number]
            tokens = batch[part.start : part.stop]
            loss = loss + sum(toy.losses(cell, model, model(tokens[:, :-1]), tokens))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(optimizers.trained(model), cell.max_norm)
        if not (cell.does("skipped") and step == cells.SKIPPED):
            optimizer.step()
            if scheduler:
                scheduler.step()
        optimizer.zero_grad()
        yield Trained(float(loss.detach()), float(norm))
