"""Predict the messages among ranks that share a sequence: torch's context parallelism and DeepSpeed's Ulysses.

Sources: _templated_ring_attention in torch/distributed/tensor/experimental/_context_parallel/_attention.py of torch
2.13, with accelerate's default strategy "allgather"; and UlyssesSPAttentionHF in
deepspeed/runtime/sequence_parallel/ulysses_sp.py of release 0.19.8.
"""

from __future__ import annotations

from typing import NamedTuple

from zero_study.theory.communication.buckets import Collective
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.shapes import ModelShape

FULL_BYTES = 4  # torch's ring adds up the gradients of keys and values in fp32
POSITION_BYTES = 8


class Exchanges(NamedTuple):
    """The collectives of attention in a micro step, separately for the forward and the backward pass."""

    forward: list[Collective]
    recompute: list[Collective]
    backward: list[Collective]


def exchanges(engine: Engine, shape: ModelShape, job: StepConfig) -> Exchanges:
    """Return the collectives by which ranks share sequences in attention. Empty if each rank has whole sequences."""
    if job.sequence_ranks == 1:
        return Exchanges([], [], [])
    forward, backward = (_ring if engine.kind == "fsdp" else _ulysses)(engine, shape, job)
    among = "subgroup_" if job.sequence_ranks < engine.world_size else ""
    forward, backward = ([(among + kind, size) for kind, size in each] for each in (forward, backward))
    # Selective checkpointing of operators keeps the output of attention.
    again = 0 if job.activation_checkpointing == "selective-op" else int(job.recomputed * shape.layers)
    return Exchanges(forward * shape.layers, forward * again, backward * shape.layers)


def _ring(engine: Engine, shape: ModelShape, job: StepConfig) -> tuple[list[Collective], list[Collective]]:
    """Return the collectives of ring attention in one block.

    Both passes gather the keys and values of all ranks at once. The gradients of keys and values are passed from rank
    to rank, until they are back at their own.
    """
    ranks, sent = job.sequence_ranks, 2 * job.tokens * shape.kv_heads * shape.head_size  # keys and values
    gathered = ("all_gather", engine.compute_bytes * ranks * sent)
    return [gathered], [gathered, *[("all_to_all", FULL_BYTES * sent)] * ranks]


def _ulysses(engine: Engine, shape: ModelShape, job: StepConfig) -> tuple[list[Collective], list[Collective]]:
    """Return the collectives of Ulysses in one block.

    Queries, keys and values are exchanged before attention, so that a rank has whole sequences of some heads, and the
    output is exchanged after it. The positions of all tokens are gathered, too.
    """
    size = engine.compute_bytes * job.tokens * shape.head_size
    of_queries = ("all_to_all", size * shape.heads)
    # With more ranks than heads of keys, these heads are repeated.
    of_keys = ("all_to_all", size * max(shape.kv_heads, job.sequence_ranks))
    exchanged = [of_queries, of_keys, of_keys, of_queries]
    return [("all_gather", POSITION_BYTES * job.micro_batch_size * job.sequence_length), *exchanged], exchanged
