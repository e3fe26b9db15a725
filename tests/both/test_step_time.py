"""Test the model of step times against PyTorch's FLOP count, published throughput and basic physics."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import get_args

import cross_validation
import numpy as np
import planner_accuracy
import pytest

from study.accuracy import published_rows
from study.compare import predicted
from study.public_runs import archive
from study.records import find as records
from zero_study.theory import communication, computation, hardware, intervals, measured_by_others, shapes, step_time
from zero_study.theory.engine import Engine, StepConfig

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "reports").glob("*/records"))
ROWS = measured_by_others.cases_of("mpt_throughput")

GPT2_XL = shapes.find("gpt2-xl")
BOX = hardware.typical_box(hardware.find_gpu("a100-80gb"), 8)
BUCKETS = {"reduce_bucket_size": 5 * 10**8, "max_live_parameters": 10**9, "max_reuse_distance": 10**9}
ENGINES = {
    "ddp": Engine("ddp", 0, 8, "bf16-autocast", 4),
    "zero0": Engine("deepspeed", 0, 8, "bf16-autocast", 4, **BUCKETS),
    "zero1": Engine("deepspeed", 1, 8, "bf16", 4, **BUCKETS),
    "zero2": Engine("deepspeed", 2, 8, "bf16", 4, **BUCKETS),
    "zero2_overlapped": Engine("deepspeed", 2, 8, "bf16", 4, overlap_comm=True, **BUCKETS),
    "zero3": Engine("deepspeed", 3, 8, "bf16", 4, overlap_comm=True, **BUCKETS),
    "zero3_cpu_offload": Engine("deepspeed", 3, 8, "bf16", 4, "cpu", "cpu", overlap_comm=True, **BUCKETS),
    "zero3_nvme_offload": Engine("deepspeed", 3, 8, "bf16", 4, "nvme", "nvme", overlap_comm=True, **BUCKETS),
    "fsdp2": Engine("fsdp", 3, 8, "bf16-autocast", 4),
    "fsdp2_deferred": Engine("fsdp", 3, 8, "bf16", 4, syncs_each_micro_step=False),
}


# ---------------------------------------------------------------- FLOPs


def test_flops_are_those_that_pytorch_counted():
    counted = [file.record for file in records.find(RECORDS) if file.record.model_flops_per_sequence is not None]
    assert {run.workload for run in counted} == {"bert-imdb", "gpt-wikitext"}
    for run in counted:
        found = computation.model_flops_per_sequence(predicted.shape_of(run), run.config["sequence_length"])
        if run.config["lora_rank"] is None:
            assert found == run.model_flops_per_sequence, run.run_id
        else:  # theory also counts products that need no gradient of their input
            assert 1 <= found / run.model_flops_per_sequence < 1.01, run.run_id


def test_published_mfu_follows_from_published_throughput():
    """So that the rows are read with the right shapes, peaks and FLOPs."""
    published = {run.totals["tokens_per_second_per_gpu"]: run.totals for run in archive.source("llm-foundry")}
    for row in ROWS:
        # As LLM Foundry's README counts: 6 per parameter, embeddings too, and attention as if nothing were masked.
        shape = row.shape
        per_token = 6 * shape.num_params + 12 * shape.layers * shape.hidden * row.job.sequence_length
        peak = row.box.gpu.peak_flops_per_second["fp8" if row.outside else "bf16"]
        found = 100 * row.published * per_token / peak
        assert found == pytest.approx(published[row.published]["mfu_percent"], rel=2e-3), row.name  # rounded


# ---------------------------------------------------------------- published throughput


@pytest.fixture(scope="module")
def times() -> list[cross_validation.Timed]:
    return cross_validation.published()


@pytest.fixture(scope="module")
def fitted(times) -> cross_validation.Fitted:
    pytest.importorskip("scipy")
    return cross_validation.fit(times)


@pytest.fixture(scope="module")
def judged(times) -> list[cross_validation.Judged]:
    pytest.importorskip("scipy")
    return cross_validation.judge(times)


def test_the_committed_validation_is_of_the_models_as_they_are():
    """Where this fails: python tools/derive/planner_accuracy.py --write."""
    committed = published_rows.load()
    assert planner_accuracy.is_same(planner_accuracy.compared(), committed["cases"])


def test_errors_on_the_published_rows_are_small_in_sample():
    errors = [abs(planner_accuracy.compare(row)["error"]) for row in ROWS if not row.outside]
    assert len(errors) == 103
    assert np.median(errors) < 0.04
    assert np.quantile(errors, 0.9) < 0.12


def test_the_constants_are_what_a_fit_gives(fitted):
    assert set(fitted.constants) == set(step_time.FITTED) == set(intervals.GENERATIONS)
    for name, constants in fitted.constants.items():
        expected = pytest.approx(dataclasses.astuple(constants), rel=0.03)
        assert dataclasses.astuple(step_time.FITTED[name]) == expected, name
    assert pytest.approx(fitted.host_thread_bandwidth, rel=0.03) == step_time.HOST_THREAD_BANDWIDTH


def test_an_answer_says_what_of_it_no_published_row_has():
    shape, box = shapes.find("gpt2"), hardware.typical_box(hardware.find_gpu("a100-80gb"), 128)
    engine = Engine("deepspeed", 3, 128, "bf16", 2, optimizer="muon")
    sentence = intervals.evidence(shape, engine, box, StepConfig(1, 1024)).sentence
    missing = sentence.partition("no published time for ")[2]
    assert "optimizer muon" in missing
    assert "ZeRO-3 on 128 Ampere GPUs" in missing
    known = dataclasses.replace(engine, zero_stage=1, optimizer="adamw")
    assert "no published time" not in intervals.evidence(shape, known, box, StepConfig(1, 1024)).sentence


def test_nothing_of_what_is_left_out_is_fitted(times, monkeypatch):
    """Neither by the planner's model nor by the rules of thumb; and every time is judged by every split."""
    seen = []
    monkeypatch.setattr(cross_validation, "fit", lambda kept: seen.append(kept))
    monkeypatch.setattr(cross_validation, "_errors", lambda fitted, timed: {"planner": 0.0})
    judged = cross_validation.judge(times)
    everything, *others = seen
    assert everything == times
    absent = [{id(timed) for timed in times} - {id(timed) for timed in kept} for kept in others]
    cards = {(one.timed.generation, one.timed.box.gpu.name) for one in judged if one.timed.fitted}
    for one in judged:
        mine = one.timed.generation, one.timed.box.gpu.name
        of_card = any(generation == mine[0] for generation, _ in cards - {mine})
        kept = set() if of_card else {"card"}
        assert set(one.left_out) == set(cross_validation.GROUP_OF) - kept
    for split, group in cross_validation.GROUP_OF.items():
        for name in {group(one.timed) for one in judged if split in one.left_out}:
            assert {id(timed) for timed in times if group(timed) == name} in absent, (split, name)


@pytest.mark.slow
def test_the_committed_evidence_is_what_cross_validation_finds(times, judged):
    """`advise` prints these intervals; tools/derive/planner_accuracy.py --write makes them and the errors of groups."""
    assert planner_accuracy.is_same(cross_validation.tables(judged), published_rows.load()["errors"])
    others = cross_validation.further()
    missed = cross_validation.predicted_apart(judged, others)
    found = planner_accuracy.evidence(times, others, cross_validation.intervals(missed))
    assert planner_accuracy.is_same(found, json.loads(planner_accuracy.EVIDENCE.read_text()))
    assert found["generations"] == sorted(step_time.FITTED)


def test_intervals_hold_most_times_of_other_sources():
    assert set(intervals.EVIDENCE) == set(get_args(intervals.TimingClass))
    known = intervals.EVIDENCE.values()
    assert sum(one.held for one in known) >= 0.9 * sum(one.cases for one in known)
    for kind, other in cross_validation.NOT_NARROWER.items():
        assert intervals.EVIDENCE[kind].spread >= intervals.EVIDENCE[other].spread


def test_an_interval_is_wider_for_few_sources(times):
    of_source: dict[str, list[cross_validation.Timed]] = {}
    for timed in times:
        of_source.setdefault(timed.measured_by, []).append(timed)

    def factor(*errors: list[float]) -> float:
        """Return the interval from the errors of the times of some sources."""
        ample = sorted(of_source.values(), key=len, reverse=True)
        pairs = [zip(own, rows, strict=False) for own, rows in zip(errors, ample, strict=False)]
        return cross_validation._bound([(timed, error) for pair in pairs for error, timed in pair])

    assert factor(*[[0.1]] * 16) == 1.15  # rounded up
    assert factor(*[[0.2]] * 16) < factor(*[[0.2]] * 4) < factor(*[[0.2]] * 2)
    assert factor(*[[0.62]], *[[0.1]] * 15) == 1.15  # one in ten may be outside
    assert factor(*[[0.62]] * 2, *[[0.1]] * 14) > 1.62
    # A source with many times weighs no more than ten.
    assert factor([0.62] * 40, *[[0.1] * 4] * 14) == factor([0.62] * 10, *[[0.1] * 4] * 14)


def test_single_published_numbers_are_of_the_right_size():
    """Nine of ten of grades A and B that the model describes within the interval of their kind, as constants stand."""
    found = [planner_accuracy.compare(case) for case in measured_by_others.cases()]
    sure = [result for result in found if result["grade"] != "C" and not result["outside"]]
    assert (len(found), len(sure)) == (284, 226)
    assert sum(result["inside_interval"] for result in sure) >= 0.9 * len(sure)
    assert max(abs(result["error"]) for result in sure) < 0.8


# ---------------------------------------------------------------- physics


def seconds(
    engine: Engine = ENGINES["zero3"], job: StepConfig | None = None, box: hardware.Cluster = BOX
) -> step_time.StepTime:
    return step_time.seconds(GPT2_XL, engine, job or StepConfig(4, 1024), box)


def communicated(engine: Engine, job: StepConfig, box: hardware.Cluster = BOX) -> float:
    """Return the seconds of all collectives of a step, hidden or not."""
    moved = step_time._communication(GPT2_XL, engine, job, box, step_time.AMPERE.hop_seconds)
    micro_steps = job.gradient_accumulation_steps
    return moved.overlapped(micro_steps) + micro_steps * moved.serial + moved.step


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_sent_takes_its_time(name):
    """The seconds are of the collectives that theory/communication/ lists, an all-reduce passing its bytes twice."""
    engine = ENGINES[name]
    job = StepConfig(4, 1024, 4)
    listed = communication.collectives(engine, GPT2_XL, job)
    rate = step_time.LINK_EFFICIENCY * BOX.gpu.link_bandwidth * engine.world_size / (engine.world_size - 1)
    expected = sum(one.moved_bytes / rate + one.count * step_time.COLLECTIVE_SECONDS for one in listed)
    assert communicated(engine, job) == pytest.approx(expected)


def test_newer_kernels_of_attention_take_less_time_on_hopper():
    h100 = hardware.typical_box(hardware.find_gpu("h100"), 8)
    lengths = {length: [] for length in (2**20, 2**21)}  # so long that attention takes nearly all of the time
    for length, found in lengths.items():
        for kernel in ("flash-2", "sdpa", "flash-3"):
            found.append(seconds(ENGINES["zero3"], StepConfig(1, length, attention=kernel), h100).total)
    # without what is proportional to the length
    slow, *fast = (twice - 2 * once for once, twice in zip(*lengths.values(), strict=True))
    expected = [step_time.FASTER_THAN_FLASH_2[kernel] for kernel in ("sdpa", "flash-3")]
    assert [slow / each for each in fast] == pytest.approx(expected, rel=0.01)


def test_an_optimizer_step_streams():
    """The bytes of AdamW and of clipping, in fp32."""
    fused = Engine("ddp", 0, 8, "fp32", 4)
    num_bytes = (step_time.FUSED_BYTES["adamw"] + step_time.CLIPPING_BYTES) * GPT2_XL.num_params
    rate = BOX.gpu.memory_bandwidth * step_time.STREAM_EFFICIENCY
    assert seconds(fused).optimizer == pytest.approx(num_bytes / rate)
    foreach = dataclasses.replace(fused, optimizer_kernel="foreach")
    num_bytes = (step_time.FOREACH_BYTES + step_time.CLIPPING_BYTES) * GPT2_XL.num_params
    assert seconds(foreach).optimizer == pytest.approx(num_bytes / rate)
    zero1 = ENGINES["zero1"]  # whose optimizer can be torch's too
    assert seconds(dataclasses.replace(zero1, optimizer_kernel="foreach")).optimizer > seconds(zero1).optimizer


def test_fsdp2_that_reduces_in_the_last_micro_step_sends_less():
    """Gathers are the same in every micro step. Without accumulation, there is no difference."""
    deferred = ENGINES["fsdp2_deferred"]
    synced = dataclasses.replace(deferred, syncs_each_micro_step=True)

    def sent(engine: Engine, steps: int) -> dict[str, float]:
        return {one.kind: one.bytes for one in communication.collectives(engine, GPT2_XL, StepConfig(4, 1024, steps))}

    assert sent(deferred, 1) == sent(synced, 1)
    assert sent(deferred, 4)["all_gather"] == sent(synced, 4)["all_gather"]
    assert sent(deferred, 4)["reduce_scatter"] == sent(synced, 4)["reduce_scatter"] / 4
    assert seconds(deferred, StepConfig(4, 1024, 4)).total < seconds(synced, StepConfig(4, 1024, 4)).total
    assert seconds(deferred).total == pytest.approx(seconds(synced).total, rel=1e-3)
    offloaded = dataclasses.replace(deferred, offload_optimizer="cpu", offload_param="cpu")
    pcie = step_time._pcie(GPT2_XL, offloaded, StepConfig(4, 1024, 4), BOX)
    assert pcie.backward == pcie.forward == pcie.last_backward  # gathers twice, gradients once


def test_the_interval_is_that_of_the_kind_of_case():
    job = StepConfig(32, 1024, kernels="fused")

    def kind(engine: Engine, box: hardware.Cluster = BOX) -> tuple[str, bool]:
        evidence = seconds(dataclasses.replace(engine, world_size=box.num_gpus), job, box).evidence
        spread = intervals.EVIDENCE[evidence.kind].spread * (intervals.FAR if evidence.is_far else 1)
        assert evidence.spread == pytest.approx(spread)
        return evidence.kind, evidence.is_far

    def box_of(gpu: str, num_gpus: int = 8) -> hardware.Cluster:
        return dataclasses.replace(BOX, gpu=hardware.find_gpu(gpu), num_gpus=num_gpus)

    for name in ("ddp", "zero1", "zero3", "fsdp2"):
        assert kind(ENGINES[name]) == ("one node", False)
    assert kind(ENGINES["fsdp2"], box_of("a100-80gb", 128)) == ("several nodes", False)
    half = dataclasses.replace(ENGINES["fsdp2"], precision="fp16")
    assert kind(half, box_of("v100-32gb")) == ("Volta", True)  # nobody published FSDP on V100
    assert kind(ENGINES["fsdp2"], box_of("l4")) == ("several workstation cards", False)
    assert kind(ENGINES["ddp"], box_of("rtx-4090", 1)) == ("one workstation card", False)
    assert kind(ENGINES["fsdp2"], box_of("h200")) == ("one node", False)  # another card of a known generation
    assert kind(ENGINES["fsdp2"], box_of("b200")) == ("one node", True)
    assert kind(ENGINES["fsdp2"], box_of("a100-80gb", 2048)) == ("several nodes", True)
    assert kind(ENGINES["zero3_cpu_offload"]) == ("offload", False)
    assert kind(dataclasses.replace(ENGINES["ddp"], precision="tf32")) == ("other arithmetic", False)
    job = StepConfig(32, 1024, compiled=True)
    assert kind(ENGINES["zero1"]) == ("compiled", False)
    job = StepConfig(1, 128)
    assert kind(ENGINES["zero1"]) == ("launching", False)
    times = seconds(ENGINES["zero3"], job)
    assert times.high / times.total == pytest.approx(times.total / times.low) == times.evidence.spread


def test_a_process_launches_no_faster_than_it_can():
    """Small steps take as long as their launches, with more for checkpointing and FSDP1, and none if compiled."""
    small = StepConfig(1, 64)
    least = GPT2_XL.layers * step_time.LAUNCHING_SECONDS
    assert seconds(job=small).total == pytest.approx(least)
    assert seconds(job=dataclasses.replace(small, gradient_accumulation_steps=3)).total == pytest.approx(3 * least)
    assert seconds(job=dataclasses.replace(small, activation_checkpointing=True)).total == pytest.approx(4 / 3 * least)
    fsdp1 = dataclasses.replace(ENGINES["fsdp2"], is_fsdp1=True)
    assert seconds(fsdp1, small).total == pytest.approx(least + GPT2_XL.layers * step_time.FSDP1_SECONDS)
    compiled = seconds(job=dataclasses.replace(small, compiled=True))
    assert (compiled.launching, compiled.high) == (0, np.inf)
    assert seconds(job=StepConfig(8, 1024)).launching == 0


def test_a_network_without_rdma_sends_what_the_kernel_copies():
    fast = dataclasses.replace(BOX, num_gpus=32)
    slow = dataclasses.replace(fast, node_bandwidth=100e9 / 8)
    tcp = dataclasses.replace(slow, network="tcp")
    engine = dataclasses.replace(ENGINES["zero3"], world_size=32)
    faster = dataclasses.replace(tcp, node_bandwidth=400e9 / 8)
    moved = [communicated(engine, StepConfig(4, 1024), box) for box in (fast, slow, tcp, faster)]
    assert moved[0] < moved[1] < 3 * moved[1] < moved[2]
    assert moved[3] == moved[2]
    time = seconds(engine, box=tcp)
    assert (time.evidence.guessed, time.high) == (intervals.TCP, np.inf)
    one_node = dataclasses.replace(BOX, network="tcp")
    assert seconds(box=one_node) == seconds()


def test_checkpointing_gathers_once_more_under_fsdp1():
    fsdp2, job = ENGINES["fsdp2"], StepConfig(4, 1024, activation_checkpointing=True)
    fsdp1 = dataclasses.replace(fsdp2, is_fsdp1=True)
    once, more = ({e.kind: e for e in communication.collectives(each, GPT2_XL, job)} for each in (fsdp2, fsdp1))
    assert more["all_gather"].bytes / once["all_gather"].bytes == pytest.approx(1.5, rel=0.03)
    assert more["reduce_scatter"] == once["reduce_scatter"]


def test_eager_attention_is_slow_if_tensor_cores_cannot_read_the_heads():
    """Of 24 instead of 25 heads with 1,600 values in all; fused attention fills them up."""
    odd = shapes.replace_parts(GPT2_XL, heads=20, kv_heads=20, head_size=80), 80
    uneven = shapes.replace_parts(GPT2_XL, hidden=1640, heads=20, kv_heads=20, head_size=82), 82
    for attention, least in (("eager", 1.3), ("sdpa", 1.0)):
        job = StepConfig(8, 512, attention=attention)
        aligned, unaligned = (step_time.seconds(shape, ENGINES["ddp"], job, BOX).total for shape, _ in (odd, uneven))
        assert least < unaligned / aligned < 1.1 * least + 0.5 * (attention == "eager")


def test_the_time_of_a_mixture_has_no_upper_end():
    mixture = shapes.replace_parts(shapes.find("mistral-7b"), architecture="mixtral", experts=8, experts_per_token=2)
    time = step_time.seconds(mixture, ENGINES["zero3"], StepConfig(4, 1024), BOX)
    assert time.evidence.is_rough
    assert (time.low < time.total, time.high) == (True, np.inf)
    assert "no published time for a mixture of experts" in time.evidence.sentence
    assert not seconds().evidence.is_rough


def test_offloaded_gradients_cross_pcie_as_deepspeed_sends_them():
    """Stage 2: every micro step down, all but the first up before; stage 3: both, always; fp32 at the end."""

    def crossed(stage: int, micro_steps: int) -> float:
        engine = Engine("deepspeed", stage, 8, "bf16", 2, "cpu", **BUCKETS)
        pcie = step_time._pcie(GPT2_XL, engine, StepConfig(4, 1024, micro_steps), BOX)
        rate = step_time.PCIE_EFFICIENCY * BOX.gpu.pcie_bandwidth * 8 / GPT2_XL.num_params
        return float(micro_steps * (pcie.forward + pcie.backward) + pcie.last_backward) * rate

    assert [crossed(1, 1), crossed(1, 4), crossed(2, 1)] == pytest.approx([4, 4, 4])  # bytes per parameter of a rank
    assert crossed(2, 4) == pytest.approx(4 * 2 + 3 * 2 + 4)
    assert [crossed(3, 1), crossed(3, 4)] == pytest.approx([2 + 2 + 4, 4 * (2 + 2) + 4])
