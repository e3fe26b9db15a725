"""Test that the formulas give the bytes that engines were observed to use and to send."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from study.compare import predicted
from study.records import find as records
from study.records import schema
from zero_study.theory import hardware, shapes
from zero_study.theory.communication import collectives, paper_volume
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.hardware import GPUS, Cluster, find_gpu, typical_box, usable_memory_bytes
from zero_study.theory.model_states import STATE_PARTS, engine_differences, paper_bytes, paper_bytes_by_place
from zero_study.theory.shapes import ModelShape, ParameterSizes

FIXTURES = Path(__file__).parents[1] / "fixtures" / "records"
COMMITTED = Path(__file__).parents[2] / "reports" / "cpu" / "records"


def differences(engine: Engine, sizes: ParameterSizes, rank: int, moment: str) -> dict[tuple[str, str], float]:
    return {(d.part, d.reason): d.num_bytes for d in engine_differences(engine, sizes, rank, moment)}


def test_padding_of_stage_2_by_hand():
    """Three ranks align a group to 6 elements: 7 become 12, so 4 each; 1 becomes 6, so 2 each."""
    sizes = ParameterSizes(matrices=(7,), vectors=(1,))
    engine = Engine("deepspeed", zero_stage=2, world_size=3, precision="bf16", accumulation_bytes=4)
    result = differences(engine, sizes, 2, "stepping")
    assert result[("parameters", "padding")] == 2 * (18 - 8)
    assert result[("optimizer_states", "padding")] == pytest.approx(12 * (6 - 8 / 3))
    assert result[("gradients", "padding")] == pytest.approx(2 * (6 - 8 / 3))
    assert result[("gradients", "fp32-gradients")] == 2 * 6
    assert len(result) == 4


def test_ddps_buckets_by_hand():
    """150 parameters in fp32. With views the gradients are in the buckets, which are there between steps too."""
    sizes = ParameterSizes(matrices=(100,), vectors=(50,))
    for precision in ("fp32", "bf16-autocast"):
        engine = Engine("ddp", 0, world_size=2, precision=precision, accumulation_bytes=4)
        views = dataclasses.replace(engine, gradient_as_bucket_view=True)
        for moment in ("stepping", "resting"):
            assert differences(engine, sizes, 0, moment) == {("communication_buffers", "ddp-buckets"): 600}
        assert differences(views, sizes, 0, "stepping") == {}
        assert differences(views, sizes, 0, "resting") == {("communication_buffers", "ddp-buckets-stay"): 600}


def test_stage_3_by_hand():
    """Two ranks, halves of everything; vectors of 10 elements are below the threshold of 10."""
    sizes = ParameterSizes(matrices=(100, 50), vectors=(10, 10))
    engine = Engine("deepspeed", 3, 2, "fp32", 4, reduce_bucket_size=5, persistence_threshold=10)
    always = {("communication_buffers", "reduce-bucket"): 4 * 5, ("optimizer_states", "master-copy"): 4 * 85}
    assert differences(engine, sizes, 0, "stepping") == {**always, ("gradients", "flat-gradient-copy"): 4 * 75}
    assert differences(engine, sizes, 0, "resting") == {
        **always,
        ("gradients", "stage3-gradients-stay"): 4 * 85,
        ("parameters", "persistent-parameters"): 4 * 20,
    }


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*/record.json")), ids=lambda path: path.parent.name)
def test_the_engines_bytes_are_those_measured(path):
    """To the byte, but for Adam's step counters, 4 bytes a tensor, and one element in place of what is on the disk."""
    result = schema.read(path)
    engine, sizes = predicted.engine_of(result), predicted.shape_of(result).parameters
    uncounted = {"optimizer_states": 4 * (len(sizes.matrices) + len(sizes.vectors)), "parameters": 2}
    for moment, ranks in (("stepping", result.model_state_bytes), ("resting", result.resting_state_bytes)):
        for rank, measured in enumerate(ranks):
            known = engine_differences(engine, sizes, rank, moment)
            for part in STATE_PARTS:
                num_bytes = getattr(paper_bytes(engine, sizes.num_params, moment), part)
                num_bytes += sum(d.num_bytes for d in known if d.part == part)
                beyond = getattr(measured, part) - num_bytes
                assert 0 <= beyond <= uncounted.get(part, 0), (moment, rank, part)


@pytest.mark.parametrize(
    ("stage", "optimizer", "param", "expected"),
    [
        (2, "none", "none", (5.5, 0, 0)),  # 2 + 14 / 4
        (2, "cpu", "none", (2, 4, 0)),  # masters and moments, 12 / 4, and fp32 gradients
        (3, "cpu", "cpu", (0, 4.5, 0)),
        (3, "nvme", "nvme", (0, 0, 4.5)),
        (3, "nvme", "cpu", (0, 0.5, 4)),
    ],
)
def test_offload_by_the_papers(stage, optimizer, param, expected):
    engine = Engine("deepspeed", stage, 4, "bf16", 4, offload_optimizer=optimizer, offload_param=param)
    places = paper_bytes_by_place(engine, 1000)
    assert (places.device, places.host, places.disk) == tuple(1000 * value for value in expected)


# ---------------------------------------------------------------- what a step sends, and the paper's section 7

HIDDEN, WORDS, POSITIONS = 8, 16, 4
LOOKUPS = [WORDS * HIDDEN, POSITIONS * HIDDEN]
GPT_BLOCK = 12 * HIDDEN**2 + 13 * HIDDEN
PSI = sum(LOOKUPS) + 2 * GPT_BLOCK + 2 * HIDDEN


def shape(architecture: str = "gpt2", layers: int = 2) -> ModelShape:
    return shapes.decoder_shape(
        architecture, architecture, layers, HIDDEN, heads=2, positions=POSITIONS, vocabulary=WORDS
    )


def engine(zero_stage: int, **settings) -> Engine:
    whole = {"kind": "deepspeed", "world_size": 2, "precision": "fp32", "accumulation_bytes": 4}
    room = {"reduce_bucket_size": 10**6, "max_live_parameters": 10**9, "max_reuse_distance": 10**9}
    return Engine(zero_stage=zero_stage, **{**whole, **room, "prefetch_bucket_size": 10**6, **settings})


def step(engine: Engine, shape: ModelShape, **job) -> dict[str, tuple[int, int]]:
    result = collectives(engine, shape, StepConfig(micro_batch_size=1, sequence_length=4, **job))
    return {c.kind: (c.count, c.bytes) for c in result}


def test_volumes_with_accumulation():
    """Section 7: 2 or 3 Psi. And sharded gradients are not there to be added to: they move at every micro step."""
    volumes = [[paper_volume(stage, 10, steps) for steps in (1, 4)] for stage in range(4)]
    assert volumes == [[20, 20], [20, 20], [20, 50], [30, 120]]
    with pytest.raises(ValueError, match="zero_stage 4"):
        paper_volume(4, 10)


def test_gathers_of_partitions_are_padded():
    """Three ranks align a group to 6 elements."""
    matrices, vectors = (sum(group) for group in shape().parameters.groups)
    padded = sum(-(-elements // 6) * 6 for elements in (matrices, vectors))
    assert padded > PSI
    assert step(engine(2, world_size=3), shape())["all_gather"] == (2, 4 * padded)


def test_buckets_of_stage_2_follow_the_backward_pass():
    """A bucket takes what fits; each of the block's two wide matrices, of 256, is more than that and alone."""
    buckets = engine(2, reduce_bucket_size=200)
    # Last norm and output bias (24), the matrix; inner bias (32), the matrix; norm and bias (24) and 64; then 24 beside
    # 192, which do not fit; norm and positions (48); the words (128), which do.
    assert step(buckets, shape(layers=1))["all_reduce"] == (2 + 7, 8 + 4 * (PSI - GPT_BLOCK))


def test_stage_3_that_lets_go_gathers_twice_and_a_tied_embedding_four_times():
    """Each module by itself; nine have parameters besides the two lookups and the last norm and the output layer."""
    lean = engine(3, max_live_parameters=0, max_reuse_distance=0)
    modules = 2 + 2 * 6 + 1 + 1
    result = step(lean, shape())
    assert result["all_gather"] == (2 * modules, 4 * 2 * (PSI + LOOKUPS[0]))
    assert result["reduce_scatter"] == (1, 4 * PSI)
    four = step(lean, shape(), gradient_accumulation_steps=4)
    for kind in ("all_gather", "reduce_scatter"):
        assert four[kind] == tuple(4 * value for value in result[kind])


def test_persistent_parameters_are_gathered_once_in_a_step_one_by_one():
    threshold = 3 * HIDDEN**2  # below are all vectors, positions, words and each block's projection
    lean = engine(3, max_live_parameters=0, max_reuse_distance=0, persistence_threshold=threshold)
    result = step(lean, shape(), gradient_accumulation_steps=2)
    small = 2 + 2 * 2 + len(shape().parameters.vectors)
    partitioned = 2 * 2 * 4 * HIDDEN**2
    assert result["all_gather"] == (small + 2 * 2 * 2 * 2, 4 * (PSI - partitioned + 2 * 2 * partitioned))


def test_a_secondary_copy_serves_every_gather_after_the_first():
    """Of a parameter, until the optimizer steps; a group as large as the world is no group of its own."""
    released = {"world_size": 4, "max_live_parameters": 0, "max_reuse_distance": 0}
    engines = [engine(3, **released, secondary_partition_size=size) for size in (1, 2, 4)]
    for accumulation in (1, 4):
        plain, grouped, whole = (step(each, shape(), gradient_accumulation_steps=accumulation) for each in engines)
        assert whole == plain
        (count, sent), (count_within, sent_within) = grouped.pop("all_gather"), grouped.pop("subgroup_all_gather")
        assert (count + count_within, sent + sent_within) == plain.pop("all_gather")
        assert grouped == plain
        assert sent == pytest.approx(4 * PSI, rel=0.01)
    kept = step(engine(3, world_size=4, secondary_partition_size=2), shape())
    assert kept == step(engine(3, world_size=4), shape())  # nothing is released before backward


@pytest.fixture(scope="module")
def cells() -> list[predicted.Messages]:
    result = [file.record for file in records.find([COMMITTED, FIXTURES])]
    return [predicted.messages(r) for r in result if r.status == "ok" and r.collectives_per_step]


def test_bytes_of_adapters_are_known(cells):
    """Collectives of a few bytes are neglected. zero3_tuned keeps some weights that theory gathers twice."""
    of_adapters = [cell for cell in cells if cell.record.config["lora_rank"] is not None]
    assert len(of_adapters) == 16
    for cell in of_adapters:
        limit = 0.15 if cell.record.strategy == "zero3_tuned" else 0.01
        assert abs(cell.predicted_sent / cell.sent.measured - 1) < limit


def test_counts_are_equal_but_for_what_no_record_tells(cells):
    """Stage 0 before the study took its norm, and the smaller sub-groups of NVMe offload."""
    whole = [cell for cell in cells if cell.record.config["lora_rank"] is None]
    other = {cell.record.strategy for cell in whole if not cell.is_equal_in_counts}
    assert other <= {"zero0", "zero3_nvme_offload"}
    for cell in whole:
        if not cell.is_equal_in_counts:
            assert cell.measured["all_reduce"][0] > cell.predicted["all_reduce"][0]
            assert {k: v for k, v in cell.measured.items() if k != "all_reduce"} == {
                k: v for k, v in cell.predicted.items() if k != "all_reduce"
            }


# ---------------------------------------------------------------- facts of GPUs, by the names that torch and people use


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16-autocast", False, 312),
        ("NVIDIA A100 80GB PCIe", "fp32", False, 19.5),
        ("NVIDIA A100 80GB PCIe", "fp32", True, 156),
        ("NVIDIA H100 80GB HBM3", "pure-bf16", None, 989),
        ("Tesla T4", "bf16", False, None),  # it has no unit for it
        ("Tesla V100-SXM2-32GB", "fp32", True, None),  # nor this one for TF32
    ],
)
def test_peak_is_that_of_the_type_a_run_multiplies_in(name, precision, tf32, tera):
    peak = hardware.peak_flops_per_second(hardware.find(name), precision, tf32)
    assert peak == (None if tera is None else tera * 1e12)


def test_dense_peaks_do_not_count_sparsity():
    """Each narrower type is twice as fast on tensor cores, and none is slower than fp32."""
    for gpu in GPUS.values():
        peaks = gpu.peak_flops_per_second
        wide = peaks.get("bf16") or peaks["fp16"]
        assert wide > peaks.get("fp32", 0)
        if "fp16" in peaks and "bf16" in peaks:
            assert peaks["bf16"] == peaks["fp16"]
        if "tf32" in peaks:
            assert wide / peaks["tf32"] == pytest.approx(2, rel=0.03)
        if "fp8" in peaks:
            assert peaks["fp8"] / wide == pytest.approx(1 if gpu.name == "gaudi3" else 2, rel=0.015), gpu.name


def test_torch_and_people_name_the_same_gpu():
    for name, gpu in GPUS.items():
        vendor = "Tesla" if name.startswith(("t4", "v100")) else "AMD" if name.startswith("mi") else "NVIDIA"
        torch_name = gpu.torch_name if name.startswith("gaudi") else f"{vendor} {gpu.torch_name}"
        assert hardware.find(torch_name) is find_gpu(torch_name) is find_gpu(name) is gpu


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a100_40gb", "a100-40gb"),  # as the published throughputs have it
        (" H100 ", "h100-sxm"),
        ("a100-sxm-80gb", "a100-80gb"),
        ("nvidia h200", "h200"),
    ],
)
def test_a_gpu_is_found_however_it_is_spelled(text, name):
    assert find_gpu(text) is GPUS[name]


def test_memory_for_torch_is_about_what_it_was_seen_to_get():
    """Of processes that ran out of memory: what torch's allocator held, in GiB, as public issues and logs have it."""
    seen = {"t4": 14.35, "v100-32gb": 31.17, "l4": 21.77, "a100-40gb": 38.59, "h200": 138.66, "b200": 177.04}
    result = {name: usable_memory_bytes(GPUS[name]) / 2**30 for name in seen}
    assert result == pytest.approx(seen, rel=0.015)


@pytest.mark.parametrize(
    ("num_gpus", "says"),
    [(0, "number of GPUs is 0"), (12, "12 GPUs cannot be divided equally .* 8 GPUs. Use a multiple")],
)
def test_impossible_boxes_are_refused(num_gpus, says):
    with pytest.raises(ValueError, match=says):
        Cluster(GPUS["a100-80gb"], num_gpus)
    with pytest.raises(ValueError, match=says):
        typical_box(GPUS["a100-80gb"], num_gpus)
