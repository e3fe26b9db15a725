"""Ranks that share sequences, pretended or with gloo: what they send and save, and the same by theory."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.state import AcceleratorState, GradientState
from launching import ROOT

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from zero_study.dryrun import prepare, trace, world
from zero_study.dryrun.models import of_shape
from zero_study.engines import extensions
from zero_study.ranks import forks
from zero_study.theory import shapes
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.shapes import ModelShape

EXAMPLES = ROOT / "docs" / "examples"
FILES = {"cp": EXAMPLES / "fsdp2_cp.yaml", "sp": EXAMPLES / "zero3_ulysses.yaml"}
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 300,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
LENGTH = 336  # tokens; neither this number nor its parts are a size of the model

extensions.use_own_folder()
extensions.use_built()


def shape_of(folder: Path, **settings: Any) -> ModelShape:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | settings))
    return shapes.find(str(path))


def strategy(folder: Path, kind: str, world_size: int, ranks: int, **deepspeed: Any) -> Path:
    """Write the file of the documentation for another number of GPUs, of which `ranks` share a sequence."""
    content = yaml.safe_load(FILES[kind].read_text())
    content["num_processes"] = world_size
    content["parallelism_config"] |= {
        "parallelism_config_dp_shard_size": world_size // ranks, f"parallelism_config_{kind}_size": ranks,
    }  # fmt: skip
    if kind == "sp":
        content["deepspeed_config"] |= deepspeed
    path = folder / f"{kind}_{world_size}_{ranks}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def engine_of(kind: str, world_size: int, ranks: int, precision: str, stage: int = 3) -> Engine:
    """The same in theory, with the defaults of accelerate and DeepSpeed."""
    if kind == "cp":
        return Engine("fsdp", 3, world_size, precision, 4, syncs_each_micro_step=False, optimizer_kernel="foreach")
    sizes = {
        "persistence_threshold": 100_000, "prefetch_bucket_size": 50_000_000, "max_live_parameters": 10**9,
        "max_reuse_distance": 10**9, "overlap_comm": True,
    } if stage == 3 else {}  # fmt: skip
    return Engine(
        "deepspeed", stage, world_size, precision, 4 if precision == "fp32" else 2, reduce_bucket_size=500_000_000,
        reduces_in_fp32=ranks > 1 and precision != "fp32", optimizer_kernel="foreach", **sizes,
    )  # fmt: skip


def run(
    file: Path, shape: ModelShape, job: StepConfig, world_size: int, precision: str, folder: Path | None = None,
    program: Callable[[], Any] | None = None,
) -> dict[int, Any]:  # fmt: skip
    """Return the answers of rank 0, which is pretended, or of all ranks over gloo if there is a folder to meet in."""
    AcceleratorState._reset_state(True)  # of an earlier test, which forked ranks would take for theirs
    GradientState._reset_state()
    variables = world.launch_environment(file, world_size, "no" if precision == "fp32" else precision)
    job = dataclasses.replace(job, sequence_ranks=1)  # the engine divides the sequence
    program = program or trace.trainer(of_shape(shape, job.sequence_length), job, has_memory=True)
    if folder is None:
        return forks.run(program, {0: world.rank_of_many(0, world_size, world_size, variables)})
    meeting = folder / f"meeting_{file.stem}"
    places = {rank: world.rank_of_many(rank, world_size, world_size, variables, meeting) for rank in range(world_size)}
    return forks.run(program, places, at_once=world_size)


def by_kind(calls: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return the number of calls and their bytes by kind, as theory names it."""
    counts, sizes = Counter[str](), Counter[str]()
    for call in calls:
        kind = f"{'subgroup_' if call['ranks'] else ''}{call['kind']}"
        counts[kind] += 1
        sizes[kind] += call["num_bytes"]
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


def saving(shape: ModelShape, job: StepConfig) -> Callable[[], dict[str, Any]]:
    """Return the program of a rank: one forward pass, and what autograd keeps of the tokens for the backward pass."""
    job = dataclasses.replace(job, sequence_ranks=1)

    def program() -> dict[str, Any]:
        training = prepare.through_accelerate(of_shape(shape, job.sequence_length), job)
        kept: dict[int, tuple[int, tuple[int, ...]]] = {}

        def keep(tensor: Any) -> Any:
            local = tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
            storage = local.untyped_storage()
            if not tensor.is_leaf or not tensor.requires_grad:
                kept[storage._cdata] = storage.nbytes(), tuple(local.shape)
            return tensor

        with training.accumulate(True), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = training.compute_loss()
            training.backward(loss)
        return {"saved": list(kept.values()), "loss": float(loss.detach())}

    return program


def of_tokens(saved: list[tuple[int, tuple[int, ...]]], job: StepConfig) -> int:
    """Return the bytes of those saved tensors that have tokens, a rank's or those of the whole sequence."""
    lengths = {job.sequence_length, job.rank_length, job.tokens, job.micro_batch_size * job.sequence_length}
    return sum(num_bytes for num_bytes, sizes in saved if lengths & set(sizes))


def gloo_places(folder: Path, world_size: int) -> dict[int, Any]:
    """Return the places of ranks that meet over gloo, and are launched by nothing."""
    world.import_engines(may_use_deepspeed=False)
    return {
        rank: world.rank_of_many(rank, world_size, world_size, {}, folder / "meeting") for rank in range(world_size)
    }


def ring_errors() -> dict[str, list[float]]:
    """Compare torch's ring with attention in one process, and return the errors of the output and of the gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn import functional

    from zero_study.engines.workarounds import ring_attention_on_cpu

    ring_attention_on_cpu()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 32, 8) for heads in (4, 2, 2)]
    parts = [tensor.clone() for tensor in inputs]
    weights = torch.randn(1, 4, 32, 8)  # of the outputs in the loss

    def attend(tensors: list[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output = functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        (output * weights).sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves)]

    whole = attend(inputs, weights)
    part_of_weights = weights.clone()
    with context_parallel(mesh, buffers=[*parts, part_of_weights, *whole], buffer_seq_dims=[2] * 8):
        results = attend(parts, part_of_weights)
        pairs = zip(results, whole, strict=True)
        return {"errors": [float((ours - theirs).abs().max()) for ours, theirs in pairs]}
