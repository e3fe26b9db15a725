"""What does FSDP2 send, as accelerate wraps a model of `transformers`?"""

from __future__ import annotations

from study.theory.case import Engine
from study.theory.communication.buckets import Collective
from study.theory.communication.model_order import Layout, Model, Parameter, modules_of
from study.theory.shapes import ModelShape


def micro_step(engine: Engine, shape: ModelShape, model: Model) -> list[Collective]:
    """List the gathers and reductions of a micro step; a parameter's rows are padded until they divide.

    One group for each block, and for what surrounds them (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model).
    Gradients are reduced in every micro step, as the study asks accelerate to (`sync_each_batch`) and as the published
    rows' trainer does: kept whole, they would undo what sharding saves. Checkpointing adds no gather: the backward pass
    has gathered a block before it is computed again (fsdp/_fully_shard/_fsdp_state.py).
    """
    words = _padded(model.lookups[0][0], shape, engine)
    around = _elements(model.before, shape, engine) - words
    end = _elements(model.after, shape, engine)
    # Without an output layer what follows the blocks is of the root's own group.
    kept = [end, around] if shape.head == "tokens" else [around + end]
    resharded = [] if shape.has_tied_head else [words]
    resharded += [_elements(block, shape, engine) for block in model.blocks]
    groups = [elements for elements in (*kept, *resharded) if elements]
    again = resharded if engine.reshard_after_forward else []
    size = engine.compute_bytes
    reduced = 4 if engine.reduces_in_fp32 else size
    sent: list[Collective] = []
    among = "subgroup_" if engine.replicas > 1 else ""
    if engine.num_shards > 1:
        sent += [(f"{among}all_gather", size * elements) for elements in (*groups, *again)]
        sent += [(f"{among}reduce_scatter", reduced * elements) for elements in groups]
    if engine.replicas > 1:
        sent += [("subgroup_all_reduce", reduced * elements // engine.num_shards) for elements in groups]
    return sent


def norm(engine: Engine) -> Collective:
    """The norm of the gradients, in double precision, among the ranks that share a replica."""
    return ("subgroup_all_reduce" if engine.replicas > 1 else "all_reduce", 8)


def _elements(layout: Layout, shape: ModelShape, engine: Engine) -> int:
    """Count the elements of all parameters, each once, with their padding."""
    return sum(_padded(p, shape, engine) for p in {p: None for module in modules_of(layout) for p in module})


def _padded(parameter: Parameter, shape: ModelShape, engine: Engine) -> int:
    """Elements of a parameter whose rows, of the hidden size, are cut into equal parts.

    GPT-2 keeps its blocks' matrices the other way round, so this is exact where the shards divide the hidden size.
    """
    row = shape.hidden if parameter.group == 0 else 1
    return -(-parameter.numel // row // engine.num_shards) * engine.num_shards * row
