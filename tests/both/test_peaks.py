"""Test theoretical peaks against measured peaks and against peaks that others published."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import launching
import pytest

from study.accuracy import published_rows
from study.compare import memory_views
from study.compare import predicted as view
from study.records import find as records
from study.records.schema import Record
from zero_study.strategy import file, theory_engine
from zero_study.theory import hardware, measured_by_others, peaks, prediction, shapes
from zero_study.theory.engine import Engine, StepConfig

RECORDS = Path(__file__).resolve().parents[2] / "reports" / "cpu" / "records"
REAL = RECORDS / "peaks-real"  # measured after theory was last mended
ADAPTERS = RECORDS / "lora"
OLDER = tuple(folder for folder in sorted(RECORDS.iterdir()) if folder not in (REAL, ADAPTERS))
errors = cache(memory_views.errors)  # all of them take seconds


def test_every_peak_is_where_theory_says():
    """Over all committed runs: as predicted, but for what gloo's threads made the count too large, at most."""
    result = errors(OLDER).peaks
    assert len(result) >= 756
    assert max(abs(e.beyond) for e in result) <= 0.06
    exact = [e for e in result if e.overcount <= 0.01]  # where little is, nothing is explained by it
    assert len(exact) >= 78
    assert max(abs(e.error) for e in exact) <= 0.04
    # Repeats, and rates of a network, are no further cases.
    assert len({(e.strategy, round(e.error, 4)) for e in exact if abs(e.error) > 0.03}) <= 5


def test_peaks_of_real_sizes_are_mostly_where_theory_said():
    """They have not been fitted to: stage 2 in bf16 holds less than said, small buckets on four processes more."""
    result = sorted(abs(e.error) for e in errors((REAL,)).peaks)
    assert len(result) >= 112
    assert result[len(result) // 2] <= 0.005
    assert result[len(result) * 17 // 20] <= 0.06
    assert result[-1] <= 0.18


def test_states_and_messages_are_those_measured_in_every_run():
    older, real = errors(OLDER), errors((REAL,))
    states, messages = older.states + real.states, older.messages + real.messages
    assert len(states) >= 756
    assert len(messages) >= 630
    assert max(abs(e.error) for e in states + messages) <= 1e-5


def test_peaks_with_adapters_are_where_theory_says():
    """Four of these runs showed what stage 3 saves and gathers with frozen weights; nothing was fitted to the rest."""
    result = errors((ADAPTERS,)).peaks
    assert len(result) == 24
    assert sorted(abs(e.error) for e in result)[-2] <= 0.01
    assert max(abs(e.error) for e in result) <= 0.04  # fsdp2, of BERT-large


@pytest.mark.slow
@pytest.mark.launches
def test_a_small_classifier_needs_the_most_where_it_gathers_its_embedding():
    """Under stage 3 with frozen weights and activation checkpointing, in a run that is no part of the study lora."""
    run = launching.run(
        "zero3_tuned", workload="bert-imdb", size="mini", data="bundled", lora_rank=8, dropout=0.0,
        activation_checkpointing=True, micro_batch_size=4, global_batch_size=8,
    )  # fmt: skip
    result = view.step_peak(run.record)
    assert result.moment == "embedding"
    # gloo's threads may hold the gathered embedding for longer than the training does.
    assert result.measured - result.overcount <= 1.04 * result.predicted
    assert result.predicted <= 1.04 * result.measured


@pytest.mark.launches
@pytest.mark.parametrize(
    "strategy", ["zero2_tuned", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero3_tuned", "fsdp2"))]
)
def test_the_peak_is_exact_where_gloos_threads_are_waited_for(strategy):
    """Accumulated: each micro step leaves them tensors to let go of. Without the wait up to half of a peak is those."""
    run = launching.run(strategy, workload="bert-imdb", data="bundled", micro_batch_size=2, global_batch_size=16)
    result = view.step_peak(run.record)
    assert result.overcount <= 0.05 * result.measured
    assert result.measured - result.overcount <= 1.06 * result.predicted
    assert result.predicted <= 1.06 * result.measured


def test_every_published_row_fits():
    """All of them ran. And they are near the edge: their authors looked for the largest batch."""
    rows = measured_by_others.cases_of("mpt_throughput")
    free = [prediction.free_bytes(peaks.peak(row.shape, row.engine, row.job), row.box) for row in rows]
    assert min(free) > 0
    usable = [hardware.usable_memory_bytes(row.box.gpu, row.box.num_gpus) for row in rows]
    assert max(1 - left / whole for left, whole in zip(free, usable, strict=True)) > 0.9


# Trainings that ran, although they are predicted to need more than there is: model, GPU, tokens of a micro batch, and
# whether they checkpoint activations.
TOO_MUCH = {
    ("llama-2-13b", "a100-80gb", 8192, False), ("bert-large-mlm", "a100-40gb", 16384, False),
    ("qwen2.5-32b", "a100-80gb", 8192, True), ("bert-base-squad", "rtx-3090", 36864, False),
    ("bert-base-squad", "rtx-4090", 36864, False), ("bert-large-squad", "a10", 10752, False),
}  # fmt: skip


@pytest.mark.parametrize("case", measured_by_others.cases("memory"), ids=lambda case: case.name)
def test_published_memory(case):
    predicted = prediction.predicted_memory(case)
    if case.quantity == "fits":
        # ZeRO-Infinity put gradients on the disk; today's DeepSpeed keeps them in the host's memory. The others are
        # predicted to need at most 5 % more than there is. Gemma 2 27B ran out of memory, but is predicted to fit.
        setting = case.shape.name, case.box.gpu.name, case.job.tokens, case.job.activation_checkpointing
        wrong = case.family == "ZeRO-Infinity" or setting in TOO_MUCH
        assert predicted == ((case.published and not wrong) or case.shape.name == "gemma2-27b")
    elif case.quantity == "peak_allocated_bytes":
        # Whose modules are not transformers': keys of one head for all, and without checkpointing the masters' model.
        other_blocks = case.shape.name == "santacoder" or case.family == "DeepSpeed bf16 masters"
        other_blocks |= case.family == "KempnerForge" and case.engine.world_size == 1  # 11 GiB more than with two GPUs
        other_blocks |= case.family == "NeMo Automodel checkpointing" and bool(case.job.activation_checkpointing)
        assert predicted == pytest.approx(case.published, rel=0.3 if other_blocks else 0.12)
    elif case.quantity == "peak_unknown_bytes" and case.family == "Baisya":  # counts fewer bytes a block than is kept
        assert predicted > 3 * case.published
    else:  # with caches, workspaces, or gradients that FSDP1 keeps between steps; three releases reserved 31 to 48 GiB
        assert predicted == pytest.approx(case.published, rel=0.8 if case.job.compiled else 0.6)


def test_what_is_reserved_is_as_it_was_fitted():
    assert published_rows.fitted_reserve() == pytest.approx(prediction.RESERVED, abs=0.02)
    medians = published_rows.reserve_by_source().values()
    compiled = [
        case.published / float(peaks.peak(case.shape, case.engine, case.job).total)
        for case in published_rows.amounts()
        if case.quantity == "peak_reserved_bytes" and case.job.compiled
    ]
    assert (round(min(compiled), 1), round(max(medians), 1)) == prediction.RESERVED_RANGE


def test_autocast_keeps_casts_and_fsdp_none():
    """Whatever the kernels: autocast copies what it multiplies, FSDP2's mixed precision has no other weights."""
    shape, job = shapes.find("gpt2-xl"), StepConfig(1, 128, kernels="fused")
    ddp, halves = Engine("ddp", 0, 4, "bf16-autocast", 4), Engine("ddp", 0, 4, "pure-bf16", 2)
    more = peaks.peak(shape, ddp, job).parts["activations"] - peaks.peak(shape, halves, job).parts["activations"]
    assert more > 2 * shape.layers * shape.block_params
    fsdp = dataclasses.replace(ddp, kind="fsdp", zero_stage=3)
    assert peaks.peak(shape, fsdp, StepConfig(1, 128)).parts["activations"] < 2 * shape.layers * shape.block_params


def test_views_save_ddps_second_gradients_only_where_they_are_all_there():
    """As the optimizer steps, which is highest for a large model and one short sequence; not as backward begins."""
    shape = shapes.find("bert-large")
    ddp = Engine("ddp", 0, 4, "fp32", 4)
    views = dataclasses.replace(ddp, gradient_as_bucket_view=True)
    for job, saved in ((StepConfig(1, 16), 4), (StepConfig(64, 512), 0), (StepConfig(64, 512, 4), 0)):
        less = peaks.peak(shape, ddp, job).total - peaks.peak(shape, views, job).total
        assert less == pytest.approx(saved * shape.num_params, rel=0.15, abs=0), job


def test_the_engine_of_a_file_is_the_engine_that_was_proved():
    """What advice is computed for is what a run with that file turns out to be."""
    proved = {}
    for folder in ("cpu", "model-states"):
        for _, r, _ in records.find([RECORDS / folder]):
            if r.status == "ok":
                proved.setdefault((r.strategy, r.proof.precision, r.world_size), r)
    unproved = set(file.names()) - {name for name, *_ in proved}
    assert unproved <= {"fsdp2_cpu_offload"}  # needs a GPU
    for (name, precision, world_size), r in proved.items():
        chosen = file.read_strategy(file.find_strategy(name))
        hidden = view.shape_of(r).hidden
        expected = theory_engine.engine_of_strategy(chosen, hidden, world_size, precision)
        message = dataclasses.replace(view.engine_of(r), sub_group_size=expected.sub_group_size)
        assert message == expected, name


@pytest.mark.parametrize(
    ("peaks_of", "ddps", "said"),
    [((5, 5, 5), (4, 6, 8), "tiny"), ((1, 1, 1), (4, 6, 8), "from the smallest"), ((9, 5, 9), (4, 6, 8), "not up to")],
)
def test_a_strategy_saves_from_the_size_on_from_which_all_larger_are_below(peaks_of, ddps, said):
    def held(size, num_params, peak):
        return memory_views.RunPeak(Record.model_construct(size=size, num_params=num_params), [], peak, peak, None)

    sizes = (("toy", 10), ("tiny", 20), ("mini", 30))
    pairs = [(held(*s, one), held(*s, ddp)) for s, one, ddp in zip(sizes, peaks_of, ddps, strict=True)]
    assert memory_views._crossing_size(pairs[::-1], "peak").startswith(said)


def test_the_parts_of_a_peak_are_what_rests_and_what_comes_on_top():
    lines = memory_views.PEAK_PARTS.page([RECORDS / "bert-large"]).splitlines()
    rows = {cells[1]: [float(cell) for cell in cells[2:]] for line in lines if len(cells := line.split(" | ")) > 8
            and (cells := [each.strip(" |") for each in ("", *cells)])[2][0].isdigit()}  # fmt: skip
    assert {"ddp", "zero3", "fsdp2"} <= rows.keys()
    for peak, theory, _, *parts in rows.values():
        assert sum(parts) == pytest.approx(peak, abs=0.03)
        assert 0.7 * peak < theory < 1.05 * peak
