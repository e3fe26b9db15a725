"""Do the formulas give the bytes that the engines were seen to hold? (test_claims.py: the papers' figures.)"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from study.compare import expected
from study.records import schema
from study.theory.case import Engine
from study.theory.model_states import PARTS, engine_differences, paper_bytes, paper_bytes_by_place
from study.theory.shapes import ParameterSizes

RECORDS = sorted((Path(__file__).parent / "fixtures" / "records").glob("*/record.json"))


def differences(engine: Engine, sizes: ParameterSizes, rank: int, moment: str) -> dict[tuple[str, str], float]:
    return {(d.part, d.reason): d.num_bytes for d in engine_differences(engine, sizes, rank, moment)}


def test_padding_of_stage_2_by_hand():
    """Three ranks align a group to 6 elements: 7 become 12, so 4 each; 1 becomes 6, so 2 each."""
    sizes = ParameterSizes(matrices=(7,), vectors=(1,))
    engine = Engine("deepspeed", zero_stage=2, world_size=3, precision="bf16", accumulation_bytes=4)
    found = differences(engine, sizes, 2, "stepping")
    assert found[("parameters", "padding")] == 2 * (18 - 8)
    assert found[("optimizer_states", "padding")] == pytest.approx(12 * (6 - 8 / 3))
    assert found[("gradients", "padding")] == pytest.approx(2 * (6 - 8 / 3))
    assert found[("gradients", "fp32-gradients")] == 2 * 6
    assert len(found) == 4


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


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_the_engines_bytes_are_those_measured(path):
    """To the byte, but for Adam's step counters, 4 bytes a tensor, and one element in place of what is on the disk."""
    found = schema.read(path)
    engine, sizes = expected.engine_of(found), expected.shape_of(found).parameters
    uncounted = {"optimizer_states": 4 * (len(sizes.matrices) + len(sizes.vectors)), "parameters": 2}
    for moment, ranks in (("stepping", found.model_state_bytes), ("resting", found.resting_state_bytes)):
        for rank, measured in enumerate(ranks):
            known = engine_differences(engine, sizes, rank, moment)
            for part in PARTS:
                predicted = getattr(paper_bytes(engine, sizes.num_params, moment), part)
                predicted += sum(d.num_bytes for d in known if d.part == part)
                beyond = getattr(measured, part) - predicted
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
