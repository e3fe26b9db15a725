"""Activation checkpoints that are moved to the host: memory of GPU and host, time, and published lengths."""

from __future__ import annotations

import dataclasses

import pytest

from zero_study import planner
from zero_study.planner.request import Request
from zero_study.theory import computation, peaks, shapes, step_time
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.shapes import ModelShape

LLAMA = shapes.KNOWN["llama-3.1-8b"]
ENGINE = Engine("fsdp", 3, 8, "bf16", 4)
BOX = Request("h100-sxm", 8).box()
FULL = StepConfig(1, 65_536, activation_checkpointing=True, kernels="fused", loss_kernel="chunked")
OFFLOAD = dataclasses.replace(FULL, activation_checkpointing="offload")


def test_the_gpu_keeps_a_few_checkpoints_and_the_host_has_all() -> None:
    checkpoint = 65_536 * LLAMA.hidden * 2
    full, offload = (peaks.peak(LLAMA, ENGINE, job) for job in (FULL, OFFLOAD))
    at = peaks.PEAK_MOMENTS.index("last block")
    moved = (LLAMA.layers - computation.KEPT_CHECKPOINTS) * checkpoint
    assert full.totals[at] - offload.totals[at] == pytest.approx(moved, rel=1e-6)
    assert offload.host_bytes - full.host_bytes == pytest.approx(LLAMA.layers * checkpoint, rel=1e-6)


def test_transfers_add_time_only_where_they_do_not_overlap() -> None:
    full, offload = (step_time.seconds(LLAMA, ENGINE, job, BOX) for job in (FULL, OFFLOAD))
    sent = 2 * computation.offloaded_bytes(LLAMA, ENGINE, OFFLOAD)
    alone = sent / (step_time.PCIE_EFFICIENCY * BOX.gpu.pcie_bandwidth)
    assert full.total < offload.total <= full.total + alone
    assert offload.recompute == full.recompute
    assert offload.offload > 0 == full.offload


def test_a_host_without_room_for_the_checkpoints_is_lacking() -> None:
    settings = {"sequence_length": 131_072, "kernels": "fused", "loss_kernel": "chunked", "strategy": "fsdp2"}
    enough, little = (
        planner.advise(
            "llama-3.1-8b",
            Request("h100-sxm", 8, host_memory=memory, activation_checkpointing="offload", **settings),
        ).options[0]
        for memory in (1024.0, 128.0)
    )
    assert enough.fits
    assert little.lacking == "host memory"


# The longest sequences of Llama-3.1-8B that ArcticTraining trains on 8 H100 with 80 GB: ZeRO-3 with the optimizer on
# the host, Ulysses on 8 GPUs, Liger's kernels and loss, FlashAttention-2 (snowflakedb/ArcticTraining 2771b4b1,
# projects/sequence-parallelism, run-h100-sp8-llama-8b-no-mlp-no-act-offload.yml and -yes-act-offload.yml). Its copy
# keeps no checkpoint on the GPU.
PUBLISHED = {"full": 1_100_000, "offload": 2_400_000}


@pytest.mark.parametrize("checkpointing", PUBLISHED)
def test_the_longest_published_sequences_are_predicted(checkpointing: str) -> None:
    def fits(length: int) -> bool:
        request = Request(
            "h100-sxm", 8, sequence_length=length, global_batch_size=1, micro_batch_size=1, sequence_parallel=8,
            strategy="zero3_cpu_offload", activation_checkpointing=checkpointing, kernels="fused",
            loss_kernel="chunked", host_memory=1900.0,
        )  # fmt: skip
        return planner.advise("llama-3.1-8b", request).options[0].fits

    longest = max(length for length in range(160_000, 4_000_000, 160_000) if fits(length))
    assert longest == pytest.approx(PUBLISHED[checkpointing], rel=0.2)


def test_checkpoints_are_all_that_a_model_of_transformers_saves_in_its_blocks() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=96, vocab_size=128, pad_token_id=0)
    packed: list[int] = []

    def saved(layers: int) -> int:
        """Return the bytes that hooks, as those of TRL and DeepSpeed, get in a forward pass with checkpointing."""
        config.num_hidden_layers = layers
        model = transformers.LlamaForCausalLM(config).train()
        model.activation_checkpointing_enable({"use_reentrant": False})
        own = {parameter.data_ptr() for parameter in model.parameters()}
        packed.clear()
        pack = lambda each: (packed.append(each.nbytes if each.data_ptr() not in own else 0), each)[1]  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            model(torch.zeros(2, 32, dtype=torch.long), use_cache=False)
        return sum(packed)

    shape: ModelShape = shapes.from_config(config.to_dict(), "small")
    engine = Engine("torch", 0, 1, "fp32", 4)
    job = StepConfig(2, 32, activation_checkpointing="offload")
    assert saved(4) - saved(2) == 2 * computation.checkpoint_bytes(shape, engine, job)
    assert computation.offloaded_bytes(shape, engine, job) == 4 * 2 * 32 * 64 * 4
