"""Sequences that several GPUs share, and hybrid sharding: theory beside the real engines, and what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import shared_sequences as shared
from refusing import refusal

from zero_study import cli, planner
from zero_study.planner import launch
from zero_study.planner.request import Request
from zero_study.ranks import forks
from zero_study.strategy import file
from zero_study.theory import communication, computation, peaks, prediction
from zero_study.theory.engine import StepConfig

# Of norms, which depend on the trainer, and not on who shares a sequence.
OF_THE_TRAINER = ("all_reduce", "subgroup_all_reduce")


def check_calls(answer: dict[str, Any], engine: Any, shape: Any, job: StepConfig) -> None:
    """Check that the collectives of a step are those of theory, by kind, with their number and their bytes."""
    expected = {call.kind: (call.count, call.bytes) for call in communication.collectives(engine, shape, job)}
    counted = shared.by_kind(answer["calls"])
    for calls in (expected, counted):
        for kind in OF_THE_TRAINER:
            calls.pop(kind, None)
    assert counted == expected


RECOMPUTED = {"activation_checkpointing": True}
CASES = [
    ("cp", 4, 2, "fp32", {}), ("sp", 4, 2, "fp32", {}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("cp", 4, 4, "bf16", {}), ("cp", 4, 2, "bf16", RECOMPUTED),
        ("sp", 4, 4, "bf16", {}), ("sp", 4, 2, "bf16", RECOMPUTED),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "world_size", "ranks", "precision", "settings"), CASES)
def test_a_pretended_rank_sends_and_needs_what_theory_says(
    tmp_path: Path, kind: str, world_size: int, ranks: int, precision: str, settings: dict[str, Any]
) -> None:
    shape = shared.shape_of(tmp_path, hidden_size=256, intermediate_size=512)
    job = StepConfig(2, 2 * shared.LENGTH, 1, sequence_ranks=ranks, device="cpu", **settings)
    path = shared.strategy(tmp_path, kind, world_size, ranks)
    (answer,) = shared.run(path, shape, job, world_size, precision).values()
    engine = shared.engine_of(kind, world_size, ranks, precision)
    check_calls(answer, engine, shape, job)
    buckets = peaks.states(engine, shape, "resting").device["communication_buffers"]
    predicted = peaks.peak(shape, engine, job, 0).total - buckets
    assert predicted == pytest.approx(answer["peak_bytes"] - buckets, rel=0.15)


def test_stage_2_reduces_in_fp32_too(tmp_path: Path) -> None:
    shape, job = shared.shape_of(tmp_path), StepConfig(1, shared.LENGTH, 1, sequence_ranks=2, device="cpu")
    path = shared.strategy(tmp_path, "sp", 4, 2, zero_stage=2)
    (answer,) = shared.run(path, shape, job, 4, "bf16").values()
    expected = {call.kind: call.bytes for call in communication.collectives(
        shared.engine_of("sp", 4, 2, "bf16", stage=2), shape, job)}  # fmt: skip
    counted = shared.by_kind(answer["calls"])
    assert counted["subgroup_all_to_all"][1] == expected["subgroup_all_to_all"]
    assert counted["all_reduce"][1] == pytest.approx(expected["all_reduce"], abs=32)


def test_hybrid_sharding_sends_and_needs_what_theory_says(tmp_path: Path) -> None:
    shape, job = shared.shape_of(tmp_path, hidden_size=256), StepConfig(2, shared.LENGTH, 1, device="cpu")
    (answer,) = shared.run(file.find_strategy("fsdp2_hybrid"), shape, job, 4, "bf16").values()
    engine = shared.engine_of("cp", 4, 1, "bf16")
    engine = shared.dataclasses.replace(engine, replicas=2)
    counted = shared.by_kind(answer["calls"])
    for call in communication.collectives(engine, shape, job):
        assert counted[call.kind][1] == pytest.approx(call.bytes, abs=1024), call.kind
    assert peaks.peak(shape, engine, job, 0).total == pytest.approx(answer["peak_bytes"], rel=0.15)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("sp", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("cp", 2), ("cp", 4), ("sp", 4)))],
)
def test_gloo_ranks_save_and_send_what_theory_says(tmp_path: Path, kind: str, ranks: int) -> None:
    shape = shared.shape_of(tmp_path)
    whole, job = StepConfig(2, shared.LENGTH), StepConfig(2, shared.LENGTH, sequence_ranks=ranks)

    def kept(job: StepConfig) -> tuple[int, list[float]]:
        path = shared.strategy(tmp_path, kind, ranks, job.sequence_ranks)
        answers = shared.run(path, shape, job, ranks, "fp32", tmp_path, shared.saving(shape, job)).values()
        return max(shared.of_tokens(each["saved"], job) for each in answers), [each["loss"] for each in answers]

    engine = shared.engine_of(kind, ranks, ranks, "fp32")
    predicted = [shape.layers * computation.block_bytes(shape, engine, each) for each in (whole, job)]
    (alone, losses), (together, shared_losses) = kept(whole), kept(job)
    more = predicted[1] - predicted[0] / ranks  # what is saved only because ranks share the sequence
    assert together == pytest.approx(alone / ranks + more, rel=0.01)
    assert shared_losses == pytest.approx(losses, rel=1e-5)  # of a batch in which all tokens are the same


@pytest.mark.parametrize("kind", ["cp", pytest.param("sp", marks=pytest.mark.slow)])
def test_gloo_ranks_issue_the_calls_of_pretended_ranks(tmp_path: Path, kind: str) -> None:
    shape, job = shared.shape_of(tmp_path), StepConfig(2, shared.LENGTH, 1, sequence_ranks=2, device="cpu")
    path = shared.strategy(tmp_path, kind, 2, 2)
    real = shared.run(path, shape, job, 2, "fp32", tmp_path)[0]
    (pretended,) = shared.run(path, shape, job, 2, "fp32").values()
    assert [call | {"line": ""} for call in real["calls"]] == [call | {"line": ""} for call in pretended["calls"]]
    check_calls(real, shared.engine_of(kind, 2, 2, "fp32"), shape, job)


def test_the_ring_on_a_cpu_computes_attention(tmp_path: Path) -> None:
    """Its kernel is not torch's choice, so its values are compared with those of attention in one process."""
    answers = forks.run(shared.ring_errors, shared.gloo_places(tmp_path, 2), at_once=2)
    for answer in answers.values():
        assert max(answer["errors"]) < 1e-5


def test_torch_has_no_ring_for_a_cpu() -> None:
    """If this fails, torch has one, and `ring_attention_on_cpu` can go."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    operators = {str(operator) for operator in _attention.custom_ops}
    assert "aten._scaled_dot_product_flash_attention.default" in operators
    assert not any("for_cpu" in operator for operator in operators)
    assert _attention._cp_options.enable_load_balance  # as theory assumes
    assert _attention._cp_options.rotate_method.name == "ALL_GATHER"


# ---------------------------------------------------------------- the planner

LONG: dict[str, Any] = {"sequence_length": 131072, "loss_kernel": "chunked"}


def ask(model: str = "llama-3.1-8b", num_gpus: int = 8, **settings: Any) -> planner.Advice:
    return planner.advise(model, Request("h100-sxm", num_gpus, **LONG | settings))


@pytest.mark.parametrize(
    ("settings", "message"), [
        ({"context_parallel": 2, "sequence_parallel": 2}, "different engines"),
        ({"context_parallel": 2, "attention": "eager"}, "Use --attention sdpa"),
        ({"sequence_parallel": 2, "attention": "eager"}, "Use --attention sdpa"),
        ({"context_parallel": 3, "sequence_length": 1200}, "--gpus 8 must be a multiple"),
        ({"context_parallel": 8, "sequence_length": 1000}, "must be a multiple of 16"),
        ({"sequence_parallel": 8, "sequence_length": 1004}, "must be a multiple of 8"),
        ({"sequence_parallel": 8, "model": "gpt2", "sequence_length": 1024}, "12 attention heads"),
        ({"sequence_parallel": 4, "lora_rank": 8}, "not predicted for adapters"),
        ({"context_parallel": 2, "model": "bert-base-uncased", "sequence_length": 512}, "full causal attention"),
        ({"context_parallel": 2, "strategy": "zero3"}, "needs FSDP2"),
        ({"context_parallel": 2, "sequence_parallel": 1, "strategy": "zero3"}, "needs FSDP2"),
        ({"sequence_parallel": 2, "strategy": "fsdp2"}, "needs stage 1, 2 or 3"),
        ({"context_parallel": 2, "strategy": "fsdp2_cpu_offload"}, "not predicted with offload"),
        ({"context_parallel": 4, "strategy": "fsdp2_hybrid", "shard_group_size": 4}, "larger multiple"),
        ({"context_parallel": 2, "stack": "torchtitan"}, "predicted for accelerate"),
    ],
)  # fmt: skip
def test_what_an_engine_refuses_is_refused_with_a_sentence(settings: dict[str, Any], message: str) -> None:
    assert message in refusal(ask, **settings)


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    settings = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    path.write_text(shared.json.dumps(shared.CONFIG | settings))
    for name in ("context_parallel", "sequence_parallel"):
        message = refusal(ask, model=str(path), sequence_length=1024, **{name: 2})
        assert "sliding window" in message


def test_ranks_that_share_a_sequence_hold_a_part_of_its_tokens() -> None:
    job = StepConfig(1, 4096, 2, activation_checkpointing=True)
    shared_job = shared.dataclasses.replace(job, sequence_ranks=4)
    shape = ask().shape
    engine = ask().options[0].prediction.engine
    assert shared_job.tokens * 4 == job.tokens
    assert computation.num_logits(shape, shared_job) * 4 == computation.num_logits(shape, job)
    box = Request("h100-sxm", 8).box()
    alone, together = (prediction.predict(shape, engine, each, box) for each in (job, shared_job))
    assert together.model_flops_per_step == pytest.approx(alone.model_flops_per_step / 4)
    assert alone.step.forward / 4 < together.step.forward < alone.step.forward  # weights are read as often


@pytest.mark.parametrize("settings", [
    {"context_parallel": 4}, {"sequence_parallel": 4},
    {"context_parallel": 2, "strategy": "fsdp2_hybrid", "shard_group_size": 4, "sequence_length": 8192},
])  # fmt: skip
def test_the_written_file_is_one_that_accelerate_and_the_doctor_accept(
    tmp_path: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    advice = ask(**settings)
    assert advice.recommended is not None
    (path, *_) = launch.write(advice, tmp_path / "mine.yaml")
    assert cli.run(["doctor", str(path)]) == 0
    capsys.readouterr()
    assert advice.recommended.is_rough
    for option in advice.options:
        job = option.prediction.job
        assert job.micro_batch_size * job.gradient_accumulation_steps * (8 // job.sequence_ranks) == 64
    variables = shared.world.launch_environment(path, 8)
    assert shared.world._parallelism(variables).total_size == 8


def test_an_older_accelerate_serves_files_without_parallelism(monkeypatch):
    """accelerate has ParallelismConfig since release 1.10, and FSDP2 since 1.6."""
    monkeypatch.delattr("accelerate.ParallelismConfig")
    monkeypatch.delattr("accelerate.utils.fsdp_utils.fsdp2_prepare_model")
    assert shared.world._parallelism({"ACCELERATE_USE_FSDP": "true"}) is None
    spec = importlib.util.find_spec("zero_study.dryrun.prepare")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_no_reshard", "fsdp2_hybrid"])
def test_hybrid_sharding_is_written_for_any_group_size(
    tmp_path: Path, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    advice = ask(strategy=strategy, shard_group_size=4, sequence_length=4096)
    (option,) = advice.options
    assert (option.prediction.engine.replicas, option.prediction.engine.num_shards) == (2, 4)
    (path, *_) = launch.write(advice, tmp_path / "mine.yaml")
    assert cli.run(["doctor", str(path)]) == 0
    capsys.readouterr()
    mesh = shared.world._parallelism(shared.world.launch_environment(path, 8))
    assert (mesh.dp_replicate_size, mesh.dp_shard_size) == (2, 4)


@pytest.mark.parametrize("path", shared.FILES.values(), ids=lambda path: path.stem)
def test_the_doctor_reads_the_examples(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", str(path)]) == 0
    assert "need no change" in capsys.readouterr().out
