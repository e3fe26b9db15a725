"""Test that the fuzzer draws only valid cells, draws every feature, and shrinks a failure to its cause."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
from collections.abc import Sequence
from typing import Any

import fuzz_conformance
import plain_training
import pytest
import samples
import torch

from zero_study.conformance import cells, fuzz, reference, results, toy
from zero_study.conformance.cells import Cell
from zero_study.upgrade import faults

PLAIN = Cell("zero2", "fp32", 2, 1, False)
DRAWN = list(itertools.islice(fuzz.drawn(1), 1500))


# ---------------------------------------------------------------- drawing


def test_the_seed_determines_the_cells():
    assert list(itertools.islice(fuzz.drawn(1), 50)) == DRAWN[:50]
    assert list(itertools.islice(fuzz.drawn(2), 50)) != DRAWN[:50]
    assert len({cell.name for cell in DRAWN}) == len(DRAWN)


def test_every_drawn_cell_is_valid():
    assert all(map(fuzz.is_valid, DRAWN))


def test_every_feature_is_drawn():
    assert {cell.engine for cell in DRAWN} == set(fuzz.ENGINES)
    assert {cell.optimizer for cell in DRAWN} == set(fuzz.OPTIMIZERS)
    assert {word for cell in DRAWN for word in fuzz.variations(cell)} == set(fuzz.VARIATIONS)
    assert {cell.precision for cell in DRAWN} == {*cells.PRECISIONS, "fp16"}
    assert {cell.accumulation for cell in DRAWN} == set(fuzz.ACCUMULATIONS)
    assert {(cell.num_ranks, cell.clipping) for cell in DRAWN} == {(1, False), (1, True), (2, False), (2, True)}
    assert max(len(fuzz.variations(cell)) for cell in DRAWN) == fuzz.MOST_VARIATIONS


def test_every_fixed_cell_that_is_not_on_a_disk_is_valid_or_left_out_on_purpose():
    fixed = [*cells.matrix((1, 2)), *cells.of_optimizers(fuzz.OPTIMIZERS)]
    left_out = [cell for cell in fixed if not cell.is_large and not fuzz.is_valid(cell)]
    on_purpose = [
        (cell.optimizer in fuzz.UNLIKE_THE_REFERENCE and cell.is_deepspeed) or cell.precision == "autocast_fp16"
        for cell in left_out
    ]
    assert all(on_purpose)


@pytest.mark.parametrize(
    "cell",
    [
        dataclasses.replace(PLAIN, variation="zero_init"),
        dataclasses.replace(PLAIN, variation="skipped"),
        dataclasses.replace(PLAIN, variation="loader"),
        dataclasses.replace(PLAIN, variation="checkpointing+reentrant"),
        dataclasses.replace(PLAIN, variation="clipping_absent", clipping=True),
        dataclasses.replace(PLAIN, variation="clipping_absent", engine="ddp"),
        dataclasses.replace(PLAIN, variation="buckets", engine="fsdp2"),
        dataclasses.replace(PLAIN, optimizer="muon", engine="ddp"),
        dataclasses.replace(PLAIN, optimizer="torch_muon"),
        dataclasses.replace(PLAIN, precision="fp16", engine="ddp"),
        dataclasses.replace(PLAIN, variation="loader", engine="accelerate_ddp", accumulation=5),
    ],
    ids=lambda cell: cell.name,
)
def test_an_invalid_cell_is_not_valid(cell):
    assert not fuzz.is_valid(cell)


# ---------------------------------------------------------------- the reference of combined variations


def _questions(number: int) -> list[Cell]:
    """Drawn cells with different references that PyTorch can train in fp64 without an engine."""
    exact = {cells.ADAMW, "sgd", "adafactor"}
    questions = [dataclasses.replace(cell.reference_key, precision="fp32") for cell in DRAWN]
    chosen = [cell for cell in questions if cell.optimizer in exact and "+" in cell.variation]
    return list(dict.fromkeys(chosen))[:number]


def _features(cell: Cell) -> list[str]:
    return [*fuzz.variations(cell), f"optimizer {cell.optimizer}", f"clipping {cell.clipping}"]


@pytest.mark.computes
@pytest.mark.parametrize("cell", samples.with_every_feature(_questions(40), _features), ids=lambda cell: cell.name)
def test_the_reference_of_combined_variations_is_what_torch_gives_in_fp64(cell, monkeypatch):
    monkeypatch.setattr(reference, "NUM_DRAWS", 0)
    model = toy.Toy(cell).double()
    expected = reference.expect(cell)
    for step, trained in enumerate(plain_training.steps(cell, model)):
        assert float(expected.losses[step]) == pytest.approx(trained.loss, rel=1e-11)
        assert float(expected.norms[step]) == pytest.approx(trained.norm, rel=1e-11)
        for name, parameter in model.named_parameters():
            assert torch.allclose(expected.masters[name][step], parameter.detach(), rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- shrinking


def _right() -> dict[str, Any]:
    return {"verdict": "same", "share_of_bound": 0.1, "of": "loss"}


def _wrong(beyond: Sequence[str] = ("loss",)) -> dict[str, Any]:
    return {
        "verdict": "wrong", "share_of_bound": 9.0, "of": "loss", "beyond": list(beyond), "ranks_apart": False,
        "first_step": 1, "norm_scale": [None] * 4, "update_scale": [0.5] * 4,
    }  # fmt: skip


def _crashed(message: str) -> dict[str, Any]:
    return {"verdict": "crashed", "stage": "trained", "message": message}


class Planted:
    """An `examine` that trains nothing: cells with a feature of the planted faults fail."""

    def __init__(self) -> None:
        self.examined: list[Cell] = []

    def __call__(self, requested: Sequence[Cell]) -> dict[str, dict[str, Any]]:
        self.examined += requested
        return {cell.name: self.verdict(cell) for cell in requested}

    def verdict(self, cell: Cell) -> dict[str, Any]:
        if cell.does("dropout") and cell.does("reentrant"):
            return _crashed(f"RuntimeError: size {cell.accumulation} is wrong")
        if cell.does("tied") and cell.accumulation > 1 and "zero" in cell.engine:
            return _wrong()
        if cell.does("groups") and cell.clipping and cell.precision != "fp32" and cell.num_ranks == 2:
            return _wrong()
        return _wrong(["norm"]) if cell.optimizer == "sgd" and "zero3" in cell.engine else _right()


@pytest.mark.parametrize(
    ("failed", "minimal"),
    [
        (
            Cell("accelerate_zero3_cpu_offload", "bf16", 2, 5, True, "tied+frozen+schedule", "adamw_fused"),
            "zero0/fp32/1-rank/accumulation-2/tied",
        ),
        (
            Cell("zero2", "bf16_fp32_sum", 2, 3, True, "frozen+used_twice+groups"),
            "zero1/bf16/2-ranks/accumulation-1/clipped/groups",
        ),
        (
            Cell("zero3_cpu_offload", "autocast", 2, 2, True, "resume+groups+schedule", "sgd"),
            "zero0/autocast/2-ranks/accumulation-1/clipped/groups",
        ),
        (Cell("zero3_cpu_offload", "bf16", 2, 2, True, "resume", "sgd"), "zero3/fp32/1-rank/accumulation-1/sgd"),
        (
            Cell("accelerate_fsdp2", "bf16", 2, 4, False, "uneven+reentrant+schedule+dropout", "adafactor"),
            "fsdp2/fp32/1-rank/accumulation-1/reentrant+dropout",
        ),
    ],
)
def test_a_failed_cell_shrinks_to_the_planted_cause(failed, minimal):
    examine = Planted()
    verdicts = examine([failed])
    shrunk = fuzz.shrink([failed], verdicts, examine)
    assert [cell.name for cell in shrunk.values()] == [minimal]
    assert fuzz.kind_of(verdicts[minimal]) == fuzz.kind_of(verdicts[failed.name])
    assert len(examine.examined) == len(set(examine.examined)) < 100
    assert all(map(fuzz.is_valid, examine.examined))
    assert fuzz.has_all_features(failed, next(iter(shrunk.values())))


def test_a_cell_that_fails_in_another_way_is_no_simpler_form():
    examine = Planted()
    failed = Cell("zero3", "fp32", 2, 2, False, "tied", "sgd")  # without `tied`, only its norm is wrong
    shrunk = fuzz.shrink([failed], examine([failed]), examine)
    assert shrunk[failed].name == "zero0/fp32/1-rank/accumulation-2/tied"


def test_ranks_that_differ_are_one_kind_in_every_precision():
    """In 16 bits, each rank may be within its bound, although the ranks have different weights."""
    difference = {"step": 1, "of": ["w"]}
    kinds = {fuzz.kind_of(_wrong(beyond) | {"ranks_apart": difference}) for beyond in ([], ["norm"], ["loss", "norm"])}
    assert len(kinds) == 1
    assert kinds != {fuzz.kind_of(_wrong())}
    assert fuzz.kind_of(_wrong(["norm"])) != fuzz.kind_of(_wrong())
    assert fuzz.kind_of(_right()) == ""


def test_a_cell_of_a_higher_stage_does_not_shrink_to_stage_0_in_16_bits():
    """There every cell fails, so this would explain nothing."""
    assert all(not fuzz.is_stage_0_in_16_bits(cell) for cell in fuzz.simpler(Cell("zero1", "bf16", 2, 2, True)))
    assert any(map(fuzz.is_stage_0_in_16_bits, fuzz.simpler(Cell("zero0", "bf16", 2, 2, True))))


def test_simpler_cells_are_valid_and_never_grow_again():
    for cell in DRAWN[:300]:
        for simple in fuzz.simpler(cell):
            assert fuzz.is_valid(simple)
            assert fuzz.has_all_features(cell, simple)
            assert not fuzz.has_all_features(simple, cell)


# ---------------------------------------------------------------- a campaign


def test_a_campaign_counts_the_drawn_cells_of_each_cause():
    examine = Planted()
    campaign = fuzz.Campaign(1, examine)
    campaign.draw(100)
    campaign.draw(100)
    assert campaign.drawn == DRAWN[:200]
    failed = [cell for cell in DRAWN[:200] if examine.verdict(cell)["verdict"] in results.FAILED]
    assert sorted(itertools.chain(*campaign.minimal.values()), key=str) == sorted(failed, key=str)
    assert 0 < len(campaign.minimal) < len(failed)
    assert len({cell.name for cell in examine.examined}) == len(examine.examined)  # no cell was trained twice
    report = campaign.report()
    assert sum(report["verdicts"].values()) == report["cells_drawn"] == 200
    assert sum(failure["cells_drawn"] for failure in report["failures"]) == len(failed)
    json.dumps(report, allow_nan=False)


def test_known_failures_name_faults_of_the_list():
    ids = {fault.id for fault in faults.read()}
    listed = {name for entry in fuzz.read_known() for name in entry.faults}
    assert listed
    assert listed <= ids


def test_known_failures_are_named_and_others_are_not():
    def reason(cell: Cell, verdict: dict[str, Any]) -> str | None:
        return fuzz.known_reason(cell, fuzz.kind_of(verdict))

    assert reason(Cell("zero1", "fp32", 1, 1, False, optimizer="muon"), _wrong(["norm"]))
    assert reason(Cell("zero1", "fp32", 1, 1, False, optimizer="muon"), _wrong()) is None
    assert reason(Cell("zero0", "bf16", 1, 1, False), _wrong())  # faults.json
    assert reason(Cell("zero0", "fp32", 1, 1, False), _wrong()) is None
    two_backward = Cell("zero1", "fp32", 2, 3, False, "two_backward")
    assert reason(two_backward, _wrong(["loss", "norm"]))  # the fixed cell has one micro batch
    assert reason(two_backward, _crashed("RuntimeError: something new")) is None


def test_the_tool_writes_a_report_and_fails_if_a_failure_is_new(tmp_path, monkeypatch, capsys):
    output = tmp_path / "fuzz.json"
    monkeypatch.setattr(fuzz_conformance, "_examine", Planted())
    assert fuzz_conformance.main(1, 0, output, cells_per_batch=60) == 1
    report = json.loads(output.read_text())
    assert (report["seed"], report["cells_drawn"]) == (1, 60)
    assert "NEW: " in capsys.readouterr().out
    monkeypatch.setattr(fuzz_conformance, "_examine", lambda requested: {cell.name: _right() for cell in requested})
    assert fuzz_conformance.main(1, 0, output, cells_per_batch=60) == 0
    assert json.loads(output.read_text())["verdicts"] == {"same": 60, "wrong": 0, "refused": 0, "crashed": 0}


def test_the_committed_report_is_of_this_program():
    """Its failures are known by now, and each is the smallest of its kind."""
    for path in fuzz.KNOWN.parent.glob("*.json"):
        report = json.loads(path.read_text())
        assert sum(report["verdicts"].values()) == report["cells_drawn"]
        assert all(failure["known"] for failure in report["failures"])


@pytest.mark.nightly
@pytest.mark.launches
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_few_drawn_cells_are_trained(tmp_path):
    output = tmp_path / "fuzz.json"
    assert fuzz_conformance.main(20261127, 0, output, cells_per_batch=3) in (0, 1)
    report = json.loads(output.read_text())
    assert report["verdicts"]["same"] > 0
    assert report["cells_examined"] >= report["cells_drawn"] == 3
