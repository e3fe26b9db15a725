"""Test that the conformance matrix accepts correct engines and rejects wrong ones."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import add_cells
import conformance_faults
import effects
import launching
import plain_training
import pytest
import torch

from study import run as run_module
from study.config import build_config
from study.running import checks
from zero_study import cli
from zero_study.conformance import adapters, cells, judge, matrix_file, probe, reference, refusals, results, toy
from zero_study.conformance import matrix as conformance_matrix
from zero_study.conformance.cells import Cell
from zero_study.engines import optimizer_formulas
from zero_study.engines.strategy_names import StrategyName
from zero_study.errors import Refusal
from zero_study.strategy import file
from zero_study.upgrade import faults as known_faults

PLAIN = Cell("ddp", "fp32", 2, 2, False)


# ---------------------------------------------------------------- cells


def test_the_matrix_asks_each_cell_once():
    requested = cells.matrix((1, 2, 4))
    assert len({cell.name for cell in requested}) == len(set(requested)) == len(requested)
    assert {cell.engine for cell in requested} == set(cells.ENGINES)
    variations = {cells.PLAIN, *cells.VARIATIONS, *cells.NEWER_VARIATIONS, *cells.LOSS_SCALE_VARIATIONS}
    assert {cell.variation for cell in requested} == variations


def test_clipping_of_every_kind_is_asked_under_every_loss_scale():
    requested = cells.of_loss_scales((1, 2), tuple(cells.ENGINES))
    asked = {(cell.engine, cell.precision, cell.num_ranks, cell.accumulation, cell.max_norm) for cell in requested}
    norms = (cells.MAX_NORM, cells.DEFAULT_MAX_NORM, cells.HIGH_MAX_NORM, math.inf)
    stages = ("zero0", "zero1", "zero2", "zero3")
    assert asked >= set(itertools.product(stages, cells.WITH_LOSS_SCALE, (2,), (1, 2), norms))
    assert asked >= set(itertools.product(stages, cells.WITH_LOSS_SCALE, (1,), (1,), norms))
    for cell in requested:
        settings = adapters.config(cell, Path())
        written = settings.get("gradient_clipping", cells.DEFAULT_MAX_NORM)
        assert (written or math.inf) == cell.max_norm
        assert ("gradient_clipping" in settings) is not cell.does("clipping_absent")
        assert {"fp16", "torch_autocast"} & set(settings) == {"fp16" if cell.precision == "fp16" else "torch_autocast"}


def test_every_optimizer_is_asked_what_its_engines_offer():
    requested = cells.of_optimizers(cells.OPTIMIZERS)
    assert len({cell.name for cell in requested}) == len(set(requested)) == len(requested)
    under = {(cell.optimizer, cell.engine) for cell in requested}
    everywhere = set(itertools.product(cells.OPTIMIZERS, cells.UNDER))
    assert everywhere - under == set(itertools.product(cells.OF_DEEPSPEED_ALONE, ("ddp", "fsdp2")))
    assert {cell.variation for cell in requested} == {cells.PLAIN, "groups", "resume", *cells.OPTIMIZER_VARIATIONS}
    assert {(cell.accumulation, cell.clipping) for cell in requested} == set(itertools.product((1, 4), (False, True)))


@pytest.mark.parametrize("cell", [cell for cell in cells.matrix((1, 2, 4)) if cell.engine == "ddp"], ids=str)
def test_micro_batches_are_the_whole_batch(cell):
    parts = [part for rank in range(cell.num_ranks) for part in cell.micro_batches(rank)]
    assert sorted(i for part in parts for i in part) == list(range(cell.batch_size))
    assert all(len(cell.micro_batches(rank)) == cell.accumulation for rank in range(cell.num_ranks))
    assert min(map(len, parts)) > 0 or cell.batch_size < len(parts)


# ---------------------------------------------------------------- the toy


def test_the_toy_begins_with_the_same_numbers_everywhere():
    """Written out, since another release of torch must draw them, too."""
    assert toy.uniform((4,), 0).tolist() == pytest.approx(FIRST, abs=1e-15)


FIRST = [0.8603825033666348, 0.6622936126246195, 0.7260294264897311, -0.055561812636884866]


def test_adapters_are_asked_of_every_engine_once():
    requested = cells.of_adapters()
    assert len({cell.name for cell in requested}) == len(set(requested)) == len(requested)
    assert {cell.engine for cell in requested} == {engine for engine in cells.ENGINES if "nvme" not in engine}
    assert {cell.variation for cell in requested} == {*cells.ADAPTER_VARIATIONS}
    trained = [name for name, parameter in toy.Toy(requested[0]).named_parameters() if parameter.requires_grad]
    assert trained == ["block.lora_a.weight", "block.lora_b.weight"]


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize(
    "cell",
    [
        PLAIN,
        dataclasses.replace(PLAIN, clipping=True),
        *(
            dataclasses.replace(PLAIN, variation=variation)
            for variation in ("tied", "frozen", "uneven", "two_backward")
        ),
        *(dataclasses.replace(PLAIN, variation=variation) for variation in (*cells.NEWER_VARIATIONS, "adapter")),
        *(
            dataclasses.replace(PLAIN, optimizer=optimizer, accumulation=4, variation=variation)
            for optimizer, variation in itertools.product(("sgd", "adafactor"), (cells.PLAIN, "groups"))
        ),
    ],
    ids=str,
)
def test_the_reference_is_what_torch_gives_in_fp64(cell):
    model = toy.Toy(cell).double()
    expected = reference.expect(cell.reference_key)
    for step, trained in enumerate(plain_training.steps(cell, model)):
        assert float(expected.losses[step]) == pytest.approx(trained.loss, rel=1e-12)
        assert float(expected.norms[step]) == pytest.approx(trained.norm, rel=1e-12)
        assert trained.norm > cells.MAX_NORM  # or clipping would not act
        for name, parameter in model.named_parameters():
            assert torch.allclose(expected.masters[name][step], parameter.detach(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("optimizer", ["torch_muon", "lion", "bitsandbytes_adamw8bit"])
def test_the_formula_is_what_the_library_does(optimizer):
    """Muon computes in bf16, and bitsandbytes in fp32 and 8 bits: the formula stays within the bound of the draws."""
    cell = dataclasses.replace(PLAIN, optimizer=optimizer)
    expected = reference.expect(cell.reference_key)
    model, moved = toy.Toy(cell), 0.0
    for step, _ in enumerate(plain_training.steps(cell, model)):
        for name, parameter in model.named_parameters():
            way = (expected.masters[name][step] - expected.start[name]).norm()
            distance = (expected.masters[name][step] - parameter.detach()).norm()
            assert distance <= way * float(expected.bounds[f"masters/{name}"][step])
            moved += float(way)
    assert moved > 0


@pytest.mark.parametrize("precision", ["autocast", "autocast_fp16"])
@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_the_reference_is_what_torch_gives_under_autocast(precision, factor):
    """Gradients of plain PyTorch are within the bound, and those that are a tenth too short are not."""
    cell = dataclasses.replace(PLAIN, num_ranks=1, accumulation=1, precision=precision)
    expected = reference.expect(cell.reference_key)
    model = toy.Toy(cell)
    optimizer = torch.optim.AdamW(model.parameters(), **toy.settings(cell))
    dtype = reference.COMPUTED_IN.get(precision, torch.bfloat16)
    trace = _trace(expected, losses=[], weights=[], norms=[])
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    for step in range(cells.NUM_STEPS):
        tokens = toy.tokens(cell, step)
        with torch.autocast("cpu", dtype):
            outputs = model(tokens[:, :-1])
        (loss,) = toy.losses(cell, model, outputs, tokens)
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad *= factor / scale
        trace["losses"].append(float(loss.detach()))
        trace["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        optimizer.step()
        optimizer.zero_grad()
        trace["weights"].append({name: probe.sampled(value) for name, value in model.named_parameters()})
    assert judge.judge(cell, expected, [trace])["verdict"] == ("same" if factor == 1 else "wrong")


@pytest.mark.launches
def test_bounds_are_the_same_in_every_process():
    requested = f"from zero_study.conformance import cells, reference; print(reference.expect(cells.{PLAIN}).bounds)"
    other = launching.attempt(["python", "-c", requested], env={"PYTHONHASHSEED": "1"}).stdout
    assert other == f"{reference.expect(PLAIN).bounds}\n"


# ---------------------------------------------------------------- verdicts


def _by_step(values: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: value[step].flatten().float() for name, value in values.items()} for step in range(cells.NUM_STEPS)]


def _trace(expected: reference.Expected, **changed: object) -> dict[str, object]:
    """What a rank leaves that trained as the reference did."""
    told = {"losses": expected.losses.tolist(), "norms": expected.norms.tolist(), "seconds": 0.1}
    masters = [{} for _ in range(cells.NUM_STEPS)]
    return {**told, "masters": masters, "weights": _by_step(expected.weights), **changed}


@pytest.mark.parametrize("wrong", [float("nan"), 1.001])
def test_a_loss_that_is_another_is_wrong(wrong):
    expected = reference.expect(PLAIN)
    losses = [*expected.losses.tolist()[:2], *(wrong * loss for loss in expected.losses.tolist()[2:])]
    verdict = judge.judge(PLAIN, expected, [_trace(expected), _trace(expected, losses=losses)])
    assert (verdict["verdict"], verdict["first_step"], verdict["beyond"]) == ("wrong", 3, ["loss"])
    assert verdict["ranks_apart"] is False
    assert "wrong from step 3" in results.explanation(verdict)
    json.dumps(verdict, allow_nan=False)


def test_weights_that_are_not_the_masters_are_wrong():
    cell = dataclasses.replace(PLAIN, engine="zero2", precision="bf16")
    expected = reference.expect(cell)
    trace = _trace(expected, masters=_by_step(expected.masters))
    assert judge.judge(cell, expected, [trace])["verdict"] == "same"
    trace["weights"][3]["head.weight"] = trace["weights"][2]["head.weight"]
    verdict = judge.judge(cell, expected, [trace])
    assert (verdict["verdict"], verdict["first_step"], verdict["beyond"]) == ("wrong", 4, ["weights/head.weight"])


def test_replicas_that_differ_are_wrong_however_near():
    cell = dataclasses.replace(PLAIN, precision="autocast")
    expected = reference.expect(cell)
    one, other = _trace(expected), _trace(expected)
    for weights in other["weights"][2:]:
        weights["head.weight"][5] = torch.nextafter(weights["head.weight"][5], torch.tensor(9.0))
    verdict = judge.judge(cell, expected, [one, other])
    assert verdict["verdict"] == "wrong"
    assert (verdict["first_step"], verdict["beyond"]) == (3, [])
    assert verdict["ranks_apart"] == {"step": 3, "of": ["head.weight"]}
    assert "ranks have different weights from step 3 (head.weight)" in results.explanation(verdict)


@pytest.mark.parametrize(
    ("precision", "changed", "unseen"),
    [
        ("fp32", {}, None),
        ("autocast", {"norms": [None] * cells.NUM_STEPS}, ["norm"]),
        ("fp32", {"norms": [None, *[0.5] * (cells.NUM_STEPS - 1)]}, ["norm"]),
        ("bf16", {}, ["masters"]),
    ],
)
def test_what_an_engine_does_not_show_is_written_down(precision, changed, unseen):
    cell = dataclasses.replace(PLAIN, precision=precision)
    expected = reference.expect(cell)
    verdict = judge.judge(cell, expected, [_trace(expected, **changed)])
    assert verdict.get("unseen") == unseen
    # A norm that is shown after some steps only is held against the reference after these.
    assert verdict["verdict"] == ("wrong" if 0.5 in changed.get("norms", ()) else "same")


REDUCED_TWICE = (
    "AssertionError: The parameter 3 has already been reduced. Multiple gradient reduction is currently not supported"
)


@pytest.mark.parametrize(
    ("message", "stage", "optimizer", "verdict"),
    [
        ("NotImplementedError: unsupported mix", "built", "adamw", "refused"),
        ("ValueError: Unknown mixed_precision mode: bogus", "built", "adamw", "refused"),
        ("AssertionError: ", "built", "adamw", "crashed"),
        ("RuntimeError: a bug", "built", "adamw", "crashed"),
        # After the engine was built, only named errors are refusals.
        ("AssertionError: a regression of the engine", "trained", "adamw", "crashed"),
        ("ValueError: a regression of the engine", "trained", "adamw", "crashed"),
        ("NotImplementedError: a regression of the engine", "saved and taken up", "adamw", "crashed"),
        (REDUCED_TWICE, "trained", "adamw", "refused"),
        (REDUCED_TWICE, "saved and taken up", "adamw", "crashed"),
        (REDUCED_TWICE.replace("AssertionError", "RuntimeError"), "trained", "adamw", "crashed"),
        ("ValueError: Param gradient must be a 2D matrix", "trained", "torch_muon", "refused"),
        ("ValueError: Param gradient must be a 2D matrix", "trained", "adamw", "crashed"),
        ("RuntimeError: The size of tensor a", "trained", "adamw", "crashed"),
        (REDUCED_TWICE, "ended", "adamw", "crashed"),
    ],
)
def test_only_a_named_error_refuses_after_the_engine_was_built(message, stage, optimizer, verdict):
    failure = conformance_matrix.Failure(message, stage)
    assert conformance_matrix.failure_verdict(failure, optimizer)["verdict"] == verdict


@pytest.mark.parametrize("path", sorted(results.PLACE.rglob("*.json")), ids=lambda path: path.stem)
def test_the_committed_verdicts_follow_the_rule_of_refusals(path):
    if path.parent.name in ("fuzzing", "effects"):
        return
    matrix = matrix_file.load(path)
    for name, cell in matrix["cells"].items():
        if "message" in cell:
            optimizer = name.rpartition("/")[2] if name.endswith(tuple(cells.OPTIMIZERS)) else cells.ADAMW
            is_refused = refusals.is_refusal(cell["message"], cell["stage"], optimizer)
            assert cell["verdict"] == ("refused" if is_refused else "crashed"), name
    # Nothing is new compared with itself.
    assert results.failed_cells(matrix, matrix) == []
    assert results.verdict(matrix, matrix).status == (
        0 if "same" in {c["verdict"] for c in matrix["cells"].values()} else 3
    )


REFUSED = {"verdict": "refused", "stage": "built", "message": "ValueError: not on \x1b[31mCPUs\nat all"}
SAME = {"verdict": "same", "share_of_bound": 0.5, "of": "loss"}
CRASHED = {"verdict": "crashed", "stage": "trained", "message": "RuntimeError: loss is nan"}
WRONG = {
    "verdict": "wrong", "share_of_bound": 2.0, "of": "loss", "first_step": 1, "beyond": ["loss"],
    "norm_scale": [1.0], "update_scale": [1.0], "ranks_apart": False,
}  # fmt: skip


def _matrix(**verdicts: dict[str, Any]) -> dict[str, Any]:
    return {"versions": {"torch": "2.13.0"}, "seconds": {"training": 1}, "cells": verdicts}


@pytest.mark.parametrize(
    ("verdicts", "known", "status", "said"),
    [
        ({"a": REFUSED, "b": REFUSED}, None, 3, "No configuration could be compared"),
        ({"a": REFUSED, "b": SAME}, None, 0, "No configuration is wrong (1 was compared"),
        ({**dict.fromkeys("abcdefghijk", REFUSED), "z": SAME}, None, 3, "Nearly all configurations were refused"),
        ({"a": SAME, "b": CRASHED}, None, 1, "1 of 2 configurations are wrong or crashed"),
        ({"a": REFUSED, "b": CRASHED}, None, 1, "1 of 2 configurations are wrong or crashed"),
        # Right before and refused now, or not one cell of the file: the comparison could not be made.
        ({"a": REFUSED, "b": SAME}, {"a": SAME, "b": SAME}, 3, "Could not be compared"),
        ({"a": SAME}, {"b": SAME}, 3, "Could not be compared"),
        ({"a": REFUSED, "b": SAME}, {"a": REFUSED, "b": SAME}, 0, "No configuration is wrong"),
        ({"a": CRASHED, "b": SAME}, {"a": CRASHED}, 0, "New failures compared with known.json: none."),
    ],
)
def test_nothing_compared_is_no_sound_matrix(verdicts, known, status, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(conformance_matrix, "run", lambda *requested, **how: _matrix(**verdicts))
    words = ["--output", "matrix.json"]
    if known is not None:
        Path("known.json").write_text(json.dumps(_matrix(**known)))
        words += ["--known", "known.json"]
    assert cli.run(["conformance", *words]) == status
    out = capsys.readouterr().out
    assert said in " ".join(out.split())
    assert ("No configuration is wrong" in out) <= (status in (0, 3))
    assert "\x1b" not in out
    written = json.loads(Path("matrix.json").read_text())
    assert (written["exit_status"], set(written["cells"])) == (status, set(verdicts))
    assert matrix_file.load(Path("matrix.json")) == written  # it can be a file of --known


@pytest.mark.parametrize(
    "content",
    [
        "[]", "{}", "null", '{"cells": []}', '{"cells": {}}', "NaN", "[" * 99,
        json.dumps({"cells": {"a": WRONG}}),
        json.dumps(_matrix()),
        json.dumps(_matrix(a={"verdict": "wrong"})),
        json.dumps(_matrix(a={"verdict": "known"})),
        json.dumps(_matrix(a={**CRASHED, "message": None})),
        json.dumps(_matrix(a={**WRONG, "share_of_bound": "1"})),
        json.dumps(_matrix(a={**WRONG, "beyond": {"a": 1}})),
        json.dumps(_matrix(a={**WRONG, "update_scale": []})),
        json.dumps(_matrix(a={**WRONG, "ranks_apart": {"step": 1, "of": []}})),
        json.dumps(_matrix(**{"a\x1b[31m\n": {"verdict": 3}})),
    ],
)  # fmt: skip
def test_a_file_that_is_no_matrix_is_refused(content, tmp_path):
    path = tmp_path / "known.json"
    path.write_text(content)
    with pytest.raises(Refusal, match=r"known\.json"):
        cli.run(["conformance", "--known", str(path)])


@pytest.mark.parametrize(
    ("precision", "clipping", "masters", "steps", "smallest"),
    [
        ("fp32", False, False, (1, 2, 3, 4), 0.000007),
        ("fp32", True, False, (4,), 0.00019),
        ("autocast", False, False, (4,), 0.46),
        ("bf16", True, True, (1, 2, 3, 4), 0.048),
        ("bf16", False, False, (1, 2, 3, 4), 0.155),
    ],
)
def test_the_smallest_wrong_scale_that_is_seen(precision, clipping, masters, steps, smallest, monkeypatch):
    """Of the gradients, in these steps, where the norm is told as it is right or not at all."""
    cell = dataclasses.replace(PLAIN, precision=precision, clipping=clipping)
    expected, right = reference.expect(cell), optimizer_formulas.adamw

    def share(lost: float) -> float:
        def updated(inputs):
            return right(inputs._replace(gradient=inputs.gradient * (1 - lost)) if inputs.number in steps else inputs)

        with monkeypatch.context() as patched:
            patched.setattr(reference, "NUM_DRAWS", 0)  # no rounding of its own
            patched.setattr(optimizer_formulas, "adamw", updated)
            faulty = reference.expect(cell)
        displayed = {"masters": _by_step(faulty.masters)} if masters else {}
        trace = _trace(faulty, norms=[None] * cells.NUM_STEPS, **displayed)
        return judge.judge(cell, expected, [trace])["share_of_bound"]

    assert share(smallest / 1.3) < 1 < share(smallest * 1.3)  # by the draws


# ---------------------------------------------------------------- launches

FAULTS = {
    "ddp/fp32/2-ranks/accumulation-2": "a dropped micro batch",
    "ddp/fp32/2-ranks/accumulation-2/clipped": "a doubled norm",
    "ddp/fp32/2-ranks/accumulation-3": "a wrong scale",
    "ddp/fp32/2-ranks/accumulation-1": "a missing all-reduce",
    "ddp/autocast/2-ranks/accumulation-2": "a dropped micro batch",
    "ddp/autocast/2-ranks/accumulation-3": "a wrong scale",
    "ddp/autocast/2-ranks/accumulation-1": "a missing all-reduce",
    "ddp/autocast/2-ranks/accumulation-2/clipped": "a drifting replica",
    "fsdp2/bf16_fp32_sum/2-ranks/accumulation-2": "a skipped master update",
    "fsdp2/bf16_fp32_sum/2-ranks/accumulation-1/clipped": "a doubled norm",
    "ddp/fp32/2-ranks/accumulation-2/buckets": "zeros beyond the first bucket",
    "ddp/autocast/2-ranks/accumulation-2/buckets": "zeros beyond the first bucket",
    "ddp/autocast/2-ranks/accumulation-2/part_outside": "a part whose gradients count twice",
    "ddp/autocast/2-ranks/accumulation-2/schedule": "a rate that stays",
    "ddp/autocast/2-ranks/accumulation-2/groups": "the decay of the other group",
    "ddp/autocast/2-ranks/accumulation-2/dropout+checkpointing": "another mask in the recomputation",
    "accelerate_ddp/fp32/2-ranks/accumulation-2": "a dropped micro batch",
    "accelerate_fsdp2/bf16/2-ranks/accumulation-2": "a dropped micro batch",
    "accelerate_fsdp2/fp32/2-ranks/accumulation-1/clipped": "a doubled norm",
}
# Of optimizers other than AdamW. Each cell without a fault in the same list is right.
FAULTS_OF_OPTIMIZERS = {
    "ddp/fp32/2-ranks/accumulation-1/sgd": "a wrong momentum",
    "ddp/fp32/2-ranks/accumulation-4/sgd": "a state in bf16",
    "ddp/fp32/2-ranks/accumulation-1/groups/sgd": "the decay of the other group",
    "fsdp2/fp32/2-ranks/accumulation-1/sgd": "a wrong momentum",
    "fsdp2/fp32/2-ranks/accumulation-1/groups/sgd": "the decay of the other group",
    "ddp/fp32/2-ranks/accumulation-1/torch_muon": "no orthogonalization",
    "ddp/fp32/2-ranks/accumulation-4/torch_muon": "a wrong momentum",
    "fsdp2/fp32/2-ranks/accumulation-1/torch_muon": "no orthogonalization",
    "fsdp2/fp32/2-ranks/accumulation-4/torch_muon": "a wrong momentum",
    "ddp/fp32/2-ranks/accumulation-1/lion": "a wrong momentum",
    "ddp/fp32/2-ranks/accumulation-1/groups/lion": "the decay of the other group",
    "ddp/fp32/2-ranks/accumulation-1/bitsandbytes_adamw8bit": "states that are not quantized",
    "ddp/fp32/2-ranks/accumulation-1/groups/bitsandbytes_adamw8bit": "the decay of the other group",
    "ddp/fp32/2-ranks/accumulation-1/groups/adamw_fused": "the decay of the other group",
    "zero1/fp32/2-ranks/accumulation-1/sgd": "a wrong momentum",
    "zero1/fp32/2-ranks/accumulation-1/groups/sgd": "the decay of the other group",
    "zero1/fp32/2-ranks/accumulation-1/groups/adamw_fused": "the decay of the other group",
}
FAULTS_OF_ADAPTERS = {
    "ddp/fp32/2-ranks/accumulation-1/adapter": "a frozen weight that moves",
    "ddp/fp32/2-ranks/accumulation-2/adapter": "a dropped micro batch",
    "ddp/fp32/2-ranks/accumulation-2/adapter+resume": "an adapter that is not loaded",
    "fsdp2/fp32/2-ranks/accumulation-1/adapter": "a frozen weight that moves",
    "fsdp2/fp32/2-ranks/accumulation-2/clipped/adapter": "a doubled norm",
    "fsdp2/fp32/2-ranks/accumulation-2/adapter+resume": "an adapter that is not loaded",
}
DIES = "accelerate_ddp/fp32/2-ranks/accumulation-2/clipped"


def cells_of_engines() -> list[Cell]:
    requested = cells.matrix((2,), ("ddp", "fsdp2", "accelerate_ddp", "accelerate_fsdp2"))
    # Variations through accelerate, which hands on what is computed, are asked in one class of precision alone.
    rare = {
        c
        for c in requested
        if c.variation in cells.NEWER_VARIATIONS or (c.through_accelerate and c.precision == "fp32")
    }
    return [cell for cell in requested if cell.name in FAULTS or cell.variation == cells.PLAIN or cell not in rare]


def cells_of_optimizers() -> list[Cell]:
    chosen = ("adamw_fused", "sgd", "lion", "torch_muon", "bitsandbytes_adamw8bit")
    return [cell for cell in cells.of_optimizers(chosen, ("ddp", "fsdp2", "zero1")) if cell.precision == "fp32"]


def cells_of_adapters() -> list[Cell]:
    engines = ("ddp", "fsdp2", "zero3", "accelerate_zero2")
    return [cell for cell in cells.of_adapters() if cell.engine in engines and cell.precision == "fp32"]


# Right ones of a few optimizers, and two that are refused.
SAMPLE_OF_OPTIMIZERS = {
    "ddp/fp32/2-ranks/accumulation-1/adamw_fused", "fsdp2/fp32/2-ranks/accumulation-1/resume/adamw_fused",
    "zero1/fp32/2-ranks/accumulation-4/clipped/adamw_fused", "ddp/fp32/2-ranks/accumulation-4/lion",
    "fsdp2/fp32/2-ranks/accumulation-1/bitsandbytes_adamw8bit", "zero1/fp32/2-ranks/accumulation-1/torch_muon",
}  # fmt: skip


def sampled(requested: list[Cell], faults: dict[str, str]) -> list[Cell]:
    """Return one cell with each fault, and of each engine one without a fault."""
    return [*{faults.get(cell.name, cell.engine): cell for cell in reversed(requested)}.values()]


def train_with_faults(requested: list[Cell], faults: dict[str, str]) -> dict[str, dict[str, Any]]:
    folder = str(Path(conformance_faults.__file__).parent)
    environment = os.environ | {"FAULTS": json.dumps(faults), "PYTHONPATH": folder}
    return conformance_matrix.run(requested, environment=environment, module="conformance_faults")["cells"]


def verdicts_of(result: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: cell["verdict"] for name, cell in result.items()}


def check_engines(requested: list[Cell], result: dict[str, dict[str, Any]]) -> None:
    said = "rank 1 was ended by SIGABRT: the last that it said"
    assert result[DIES] == {"verdict": "crashed", "stage": "ended", "message": said}
    result = {cell.name: result[cell.name] for cell in requested if cell.name != DIES}
    # DDP does not reduce the gradients of a second backward pass.
    twice = {name for name in result if "ddp" in name and "two_backward" in name}
    assert {name: cell for name, cell in result.items() if cell["verdict"] == "crashed"} == {}
    assert verdicts_of(result) == {name: "wrong" if name in {*FAULTS, *twice} else "same" for name in result}
    apart = {name for name, cell in result.items() if cell.get("ranks_apart")}
    of_one_rank = {"a missing all-reduce", "a drifting replica"}
    assert apart == {name for name in result if name in twice or FAULTS.get(name) in of_one_rank}
    # No rank alone is further off than rounding may carry it.
    drifting = [name for name in result if FAULTS.get(name) == "a drifting replica"]
    assert drifting
    assert all(result[name]["share_of_bound"] < 1 for name in drifting)


def check_optimizers(requested: list[Cell], result: dict[str, dict[str, Any]]) -> None:
    # bitsandbytes does not know sharded tensors, and torch's Muon does not know ZeRO's flat partitions.
    refused = {
        cell.name
        for cell in requested
        if (cell.engine == "fsdp2" and cell.optimizer in cells.LIBRARY_OF)
        or (cell.engine == "zero1" and cell.optimizer == "torch_muon")
    }
    assert refused
    result = {cell.name: result[cell.name] for cell in requested}
    assert verdicts_of(result) == {
        name: "wrong" if name in FAULTS_OF_OPTIMIZERS else "refused" if name in refused else "same" for name in result
    }
    of_states = {"a state in bf16", "states that are not quantized"}
    assert {name for name, cell in result.items() if "wrong_states" in cell} == {
        name for name in result if FAULTS_OF_OPTIMIZERS.get(name) in of_states
    }


def check_adapters(requested: list[Cell], result: dict[str, dict[str, Any]]) -> None:
    verdicts = {cell.name: result[cell.name]["verdict"] for cell in requested}
    assert verdicts == {cell.name: "wrong" if cell.name in FAULTS_OF_ADAPTERS else "same" for cell in requested}


@pytest.mark.launches
def test_each_planted_fault_is_called_wrong_and_each_engine_right():
    """In one launch: each fault in one cell, each engine without a fault, and a rank that dies."""
    engines = [*sampled(cells_of_engines(), FAULTS), *(cell for cell in cells_of_engines() if cell.name == DIES)]
    of_optimizers = cells_of_optimizers()
    faulty = [cell for cell in sampled(of_optimizers, FAULTS_OF_OPTIMIZERS) if cell.name in FAULTS_OF_OPTIMIZERS]
    optimizers = [*faulty, *(cell for cell in of_optimizers if cell.name in SAMPLE_OF_OPTIMIZERS)]
    adapters = sampled(cells_of_adapters(), FAULTS_OF_ADAPTERS)
    faults = FAULTS | FAULTS_OF_OPTIMIZERS | FAULTS_OF_ADAPTERS
    result = train_with_faults([*engines, *optimizers, *adapters], faults | {DIES: "a rank that dies"})
    check_engines(engines, result)
    check_optimizers(optimizers, result)
    check_adapters(adapters, result)
    assert {faults[name] for name in result if name in faults} == set(faults.values())


@pytest.mark.slow
@pytest.mark.launches
def test_planted_faults_are_called_wrong_right_engines_right_and_a_dead_rank_is_named():
    requested = cells_of_engines()
    check_engines(requested, train_with_faults(requested, FAULTS | {DIES: "a rank that dies"}))


@pytest.mark.slow
@pytest.mark.launches
def test_planted_faults_of_optimizers_are_called_wrong_and_right_optimizers_right():
    requested = cells_of_optimizers()
    check_optimizers(requested, train_with_faults(requested, FAULTS_OF_OPTIMIZERS))


@pytest.mark.slow
@pytest.mark.launches
def test_planted_faults_of_adapters_are_called_wrong_and_right_engines_right():
    requested = cells_of_adapters()
    check_adapters(requested, train_with_faults(requested, FAULTS_OF_ADAPTERS))


def test_what_an_earlier_matrix_has_is_no_failure(tmp_path, monkeypatch, capsys):
    first = results.failed_cells(NEWEST)[0]
    monkeypatch.setattr(conformance_matrix, "run", lambda *requested, **how: NEWEST)
    known = tmp_path / "known.json"
    assert cli.run(["conformance", "--output", str(known)]) == 1
    assert capsys.readouterr().out.splitlines() == results.summary_lines(json.loads(known.read_text()))
    assert cli.run(["conformance", "--known", str(known)]) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(f"New failures compared with {known}: none.")
    for verdict in (SAME, CRASHED if NEWEST["cells"][first]["verdict"] == "wrong" else WRONG):
        known.write_text(json.dumps(NEWEST | {"cells": NEWEST["cells"] | {first: verdict}}))
        assert cli.run(["conformance", "--known", str(known)]) == 1
        assert " ".join(capsys.readouterr().out.split()).startswith(f"New failures compared with {known}: {first}.")


@pytest.mark.parametrize(
    ("before", "after", "is_new"),
    [
        ({"share_of_bound": 1.1}, {"share_of_bound": 1e9}, True),
        ({"share_of_bound": 1.1}, {"share_of_bound": 2.0}, False),
        ({"share_of_bound": 1.1}, {"share_of_bound": None}, True),
        ({"share_of_bound": None}, {"share_of_bound": None}, False),
        ({"ranks_apart": False}, {"ranks_apart": {"step": 1, "of": ["w"]}}, True),
        # A loss that became NaN, where a frozen weight moved before.
        ({"share_of_bound": None}, {"share_of_bound": None, "not_finite": ["loss"]}, True),
        ({"share_of_bound": None, "update_scale": [None]}, {"share_of_bound": None, "not_finite": ["loss"]}, False),
        ({"share_of_bound": None, "deviation": 1e-3}, {"share_of_bound": None, "deviation": 1e3}, True),
        ({"share_of_bound": None, "deviation": 1e-3}, {"share_of_bound": None, "deviation": 2e-3}, False),
        ({"beyond": ["norm"]}, {"beyond": ["masters/w", "norm"]}, True),
        ({"beyond": ["masters/w", "norm"]}, {"beyond": ["loss", "masters/v", "norm"]}, False),
        ({"first_step": 3}, {"first_step": 1}, True),
        ({"norm_scale": [1.1]}, {"norm_scale": [3.0]}, True),
        ({"update_scale": [0.99]}, {"update_scale": [0.5]}, True),
        ({"wrong_states": []}, {"wrong_states": ["bfloat16 for 3 elements"]}, True),
        ({"message": "ValueError: the loss is 3"}, {"message": "ValueError: the loss is nan"}, True),
        ({"message": "RuntimeError: rank 0 at 0x7f"}, {"message": "RuntimeError: rank 1 at 0x8e"}, False),
        ({"message": "OSError: /tmp/tmpab3def_g/a.pt"}, {"message": "OSError: /scratch/tmpzz3yyy_x/a.pt"}, False),
        ({"message": "ValueError: a"}, {"message": "KeyError: a"}, True),
        ({"message": "ValueError: a"}, {"message": "ValueError: a", "stage": "saved and taken up"}, True),
    ],
)
def test_a_known_fault_hides_no_other_one(before, after, is_new):
    """A fault is known only if kind, message and size agree: one NaN or crash hid every other one of its type."""
    plain = CRASHED if "message" in after else {**WRONG, "beyond": ["masters/w"]}
    matrix, known = (_matrix(a=plain | change) for change in (after, before))
    assert results.failed_cells(matrix, known) == (["a"] if is_new else [])


def test_a_nan_is_written_down():
    expected = reference.expect(PLAIN)
    trace = _trace(expected, norms=[*expected.norms.tolist()[:3], float("nan")])
    verdict = judge.judge(PLAIN, expected, [_trace(expected), trace])
    assert (verdict["verdict"], verdict["not_finite"], verdict["deviation"]) == ("wrong", ["norm"], None)
    assert judge.judge(PLAIN, expected, [_trace(expected, losses=[9.0] * 4)])["not_finite"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "zero9"], "--only zero9: "),
        (["--ranks", "0"], "--ranks 0: these are not numbers of processes"),
        (["--release", "jax==1.0.0"], "--release jax==1.0.0: write deepspeed, accelerate or torch"),
        (
            ["--release", "torch==2.9.1", "--release", "torch==2.8.0"],
            "--release torch==2.8.0: torch==2.9.1 is requested",
        ),
        (["--output", "nowhere/matrix.json"], "the folder nowhere does not exist"),
        (["--optimizer", "sdg"], "--optimizer sdg: this optimizer is unknown"),
        (["--optimizer", "sgd", "--ranks", "2"], "--ranks 2: an optimizer is always checked on two processes"),
        (["--optimizer", "torchao_adamw8bit"], "torchao is not installed"),
        (["--adapters", "--ranks", "1"], "--ranks 1: an adapter is always checked on two processes"),
        (["--adapters", "--optimizer", "sgd"], "--adapters and --optimizer select different configurations"),
        (
            ["--release", "deepspeed==0.18.2", "--ranks", "2"],
            "--ranks 2: another release is always checked on two processes",
        ),
    ],
)
def test_bad_requests_are_one_line(words, said):
    with pytest.raises(Refusal, match=re.escape(said)):
        cli.run(["conformance", *words])


# ---------------------------------------------------------------- what is known

MATRICES = results.read()
NEWEST = results.newest()


def test_the_committed_matrices_are_of_the_releases_they_name():
    listed = {*MATRICES}
    for package in ("accelerate", "torch"):
        listed |= {f"{package}-{version}" for version, matrix in results.read(package).items() if matrix != NEWEST}
    assert {path.stem for path in results.PLACE.glob("*.json")} == listed
    pins = (launching.ROOT / "constraints.txt").read_text().splitlines()
    assert {f"{package}=={version.partition('+')[0]}" for package, version in NEWEST["versions"].items()} <= {*pins}


def test_the_committed_matrices_of_optimizers_are_of_the_releases_they_name():
    matrices = results.read("deepspeed", results.OPTIMIZERS)
    newest = results.newest(results.OPTIMIZERS)
    listed = {*matrices}
    for package in ("accelerate", "torch"):
        of_package = results.read(package, results.OPTIMIZERS)
        listed |= {f"{package}-{version}" for version, matrix in of_package.items() if matrix != newest}
    assert {path.stem for path in results.OPTIMIZERS.glob("*.json")} == listed
    newest = results.newest(results.OPTIMIZERS)
    assert newest["versions"] == NEWEST["versions"]
    assert set(newest["cells"]) == {cell.name for cell in cells.of_optimizers(cells.OPTIMIZERS)}
    of_release = {cell.name for cell in cells.of_optimizers(cells.OPTIMIZERS, cells.OPTIMIZERS_UNDER["deepspeed"])}
    assert all(set(matrix["cells"]) <= of_release for matrix in matrices.values() if matrix != newest)


def test_no_installed_engine_trains_an_adapter_wrongly():
    newest = results.newest(results.ADAPTERS)
    assert newest["versions"]["deepspeed"] == results.newest()["versions"]["deepspeed"]
    assert set(newest["cells"]) == {cell.name for cell in cells.of_adapters()}
    assert {cell["verdict"] for cell in newest["cells"].values()} == {"same"}


def test_engines_that_hand_on_what_they_get_are_right_with_every_optimizer():
    """False alarms would be here: DDP, and stage 0 in fp32, give the optimizer what plain PyTorch gives it."""
    result = results.newest(results.OPTIMIZERS)["cells"]
    plain = {name: cell for name, cell in result.items() if name.startswith(("ddp/", "zero0/fp32/"))}
    assert {name for name, cell in plain.items() if cell["verdict"] != "same"} == {
        "zero0/fp32/2-ranks/accumulation-1/resume/torchao_adamw8bit"  # refused: such a checkpoint cannot be loaded
    }


@pytest.mark.parametrize("package", cells.PACKAGES)
def test_every_release_was_asked_what_it_has_a_part_in(package):
    """The newest installation every cell, and so were those that have been it."""
    assert {cell.name for cell in cells.matrix()} == set(NEWEST["cells"])
    of_release = cells.of_release([package], (cells.PLAIN, *cells.LOSS_SCALE_VARIATIONS))
    without = {
        cell.name
        for cell in of_release
        if cell.precision not in cells.WITH_LOSS_SCALE and cell.variation == cells.PLAIN
    }
    names = {cell.name for cell in of_release}
    for matrix in results.read(package).values():
        assert (names if "loss_scales" in matrix else without) <= set(matrix["cells"])


def _wrong(matrix: dict[str, Any], variations: str = "clipped|accumulation-[^/]*") -> set[tuple[str, ...]]:
    """Engines and classes without a loss scale of which a plain cell is wrong, or one with such a variation."""
    wrong = [name for name, cell in matrix["cells"].items() if cell["verdict"] == "wrong"]
    classes = {tuple(name.split("/")[:2]) for name in wrong if re.search(f"/({variations})$", name)}
    return {(engine, precision) for engine, precision in classes if precision not in cells.WITH_LOSS_SCALE}


@pytest.mark.parametrize("version", MATRICES)
def test_what_is_known_to_be_wrong_is_what_was_found(version):
    known = {
        (engine, precision)
        for fault in known_faults.measured()
        if known_faults.affects(fault, version) and fault.variation is None
        for engine in fault.engines
        for precision in fault.precisions
    }
    wrong, result = _wrong(MATRICES[version]), MATRICES[version]["cells"]
    assert wrong <= known
    # What is known of the releases around, this one may refuse, or stop at: but it trains none of it right.
    for engine, precision in known - wrong:
        verdicts = [
            cell["verdict"] for name, cell in result.items() if name.startswith(f"{engine}/{precision}/2-ranks/")
        ]
        assert set(verdicts) <= {"refused", "crashed"}, (engine, precision)


@pytest.mark.parametrize("variation", cells.NEWER_VARIATIONS)
def test_what_a_variation_shows_is_known(variation):
    """A fault of that variation, or one of every model."""
    for version, matrix in MATRICES.items():
        faults = [fault for fault in known_faults.measured() if known_faults.affects(fault, version)]
        hit = [fault for fault in faults if fault.variation == variation or fault.models is None]
        known = {of for fault in hit for of in itertools.product(fault.engines, fault.precisions)}
        of_accelerate = {("accelerate_fsdp2", kind) for kind in ("fp32", "bf16") if variation == "used_twice+reentrant"}
        assert _wrong(matrix, re.escape(variation)) <= known | of_accelerate, version


@pytest.mark.parametrize("fault", known_faults.measured(), ids=lambda fault: fault.id)
def test_a_fault_is_of_every_release_between_its_ends(fault):
    first = fault.introduced or next(iter(MATRICES))
    assert first in MATRICES
    assert fault.last in MATRICES
    for version, matrix in MATRICES.items():
        for engine, precision in itertools.product(fault.engines, fault.precisions):
            displayed = matrix["cells"].get(known_faults.cell(fault, engine, precision), {}).get("verdict")
            if version in (first, fault.last) and precision == fault.precisions[0]:
                assert displayed == "wrong"
            if known_faults.affects(fault, version):
                assert displayed != "same", (version, engine, precision)


@pytest.mark.parametrize("version", MATRICES)
def test_what_is_refused_of_one_micro_batch_is_wrong_with_one(version):
    for engine, precision in {tuple(name.split("/")[:2]) for name in MATRICES[version]["cells"]}:
        name = StrategyName.parse(engine)
        if name.zero_stage is None or precision in cells.WITH_LOSS_SCALE:
            continue
        precise = {"autocast": "bf16-autocast", "bf16_fp32_sum": "bf16"}.get(precision, precision)
        result = known_faults.find(
            deepspeed=version, zero_stage=name.zero_stage, offload=name.offload,
            precision=precise, sums_in_fp32=precision == "bf16_fp32_sum", micro_batches=1,
        )  # fmt: skip
        displayed = MATRICES[version]["cells"][f"{engine}/{precision}/2-ranks/accumulation-1"]["verdict"]
        assert (result is not None) == (displayed == "wrong") or displayed in ("refused", "crashed"), (
            engine,
            precision,
        )


def test_a_fault_of_a_twist_hits_scripts_that_do_it():
    requested = {"deepspeed": "0.18.3", "zero_stage": 3, "offload": "none", "precision": "bf16", "sums_in_fp32": False}
    assert known_faults.find(**requested, micro_batches=2) is None
    assert known_faults.find(**requested, micro_batches=1, variations=["part_outside"]) is None
    result = known_faults.find(**requested, micro_batches=2, variations=["part_outside"])
    assert result.cell == "zero3/bf16/2-ranks/accumulation-2/part_outside"


def test_a_run_under_a_release_that_is_known_to_be_wrong_is_refused(monkeypatch):
    whole, halved = (
        run_module.make_run(build_config(micro_batch_size=size), file.read_by_name("zero2"), 2) for size in (4, 2)
    )
    assert (whole.gradient_accumulation_steps, halved.gradient_accumulation_steps) == (1, 2)
    checks._check_release(halved)
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda name: "0.18.2")
    checks._check_release(whole)
    with pytest.raises(Refusal, match=r"DeepSpeed 0\.18\.2 trains zero2/fp32/2-ranks/accumulation-2 wrongly: "):
        checks._check_release(halved)


def test_modules_are_imported_in_the_order_of_the_training(monkeypatch):
    """In a random order, torch._dynamo sometimes failed, and with it all later trainings."""
    names = [f"module_{number}" for number in range(40)]
    imported: list[str] = []
    monkeypatch.setattr(probe.importlib, "import_module", imported.append)
    monkeypatch.setattr(probe.worlds, "freeze", lambda: None)
    probe._import_what_it_did({0: {"modules": ["sys", *names]}, 1: {"modules": names[:20]}})
    assert imported == names


@pytest.mark.parametrize("version", [version for version, matrix in MATRICES.items() if "loss_scales" in matrix])
def test_faults_of_the_loss_scale_are_where_they_are_known(version):
    """Each wrong cell has a known fault, and each cell with a known fault is wrong."""
    num_compared = 0
    for cell in cells.of_loss_scales((1, 2), tuple(cells.ENGINES)):
        verdict = MATRICES[version]["cells"].get(cell.name, {}).get("verdict")
        if verdict in ("same", "wrong"):
            num_compared += 1
            is_known = _has_known_fault(cell, known_faults.base_release(version))
            # With several micro batches, faults of accumulation make further cells wrong.
            assert (verdict == "wrong") == is_known or (cell.accumulation > 1 and not is_known), cell.name
    assert num_compared > 0


def _has_known_fault(cell: Cell, release: Any) -> bool:
    since_0_17_6 = release >= known_faults.base_release("0.17.6")
    stage = StrategyName.parse(cell.engine).zero_stage
    if cell.precision == "fp16":
        return stage == 0 or cell.does("scale_grows")
    if cell.precision == "autocast_fp16":
        return stage in (1, 2) or (stage == 3 and since_0_17_6)
    return stage in (1, 2) and not since_0_17_6


# ---------------------------------------------------------------- what was added, and effects


def test_added_cells_leave_the_others_as_they_are(monkeypatch, tmp_path):
    plain = {cell.name: SAME for cell in cells.of_release(["deepspeed"]) if cell.precision in cells.PRECISIONS}
    for version, kept in (("0.19.0", plain), ("0.19.1", plain)):
        content = {"versions": {"deepspeed": version}, "seconds": {"training": 1}, "cells": kept}
        (tmp_path / f"{version}.json").write_text(json.dumps(content))

    def run(requested: list[Cell], say: Any, *, chosen: dict[str, str]) -> dict[str, Any]:
        assert chosen == {"deepspeed": "0.19.0"}
        return {
            "versions": chosen, "examined_at": "now", "seconds": {}, "cells": {cell.name: WRONG for cell in requested}
        }  # fmt: skip

    monkeypatch.setattr(add_cells, "PLACE", tmp_path)
    monkeypatch.setattr(conformance_matrix, "run", run)
    add_cells.main(["0.19.0"])
    record = json.loads((tmp_path / "0.19.0.json").read_text())
    assert {name: record["cells"][name] for name in plain} == plain
    added = {name for name, cell in record["cells"].items() if cell == WRONG}
    assert added == {
        cell.name
        for cell in cells.of_release(["deepspeed"], (cells.PLAIN, *cells.LOSS_SCALE_VARIATIONS))
        if cell.name not in plain
    }
    record["versions"]["deepspeed"] = "0.19.9"
    with pytest.raises(AssertionError):
        add_cells.add(record, run([], print, chosen={"deepspeed": "0.19.0"}))


def test_every_fault_has_a_measured_effect():
    """In a release that conformance calls wrong, and beside an engine that is right with the same optimizer."""
    record = json.loads(effects.RECORD.read_text())["faults"]
    assert {fault.id for fault in known_faults.measured()} <= set(effects.CASES)
    assert set(record) == set(effects.CASES)
    for name, case in effects.CASES.items():
        assert (record[name]["release"], record[name]["cell"]) == (case.release, case.cell.name)
        assert MATRICES[case.release]["cells"][case.cell.name]["verdict"] == "wrong"
        for setting in effects.SETTINGS:
            assert set(record[name][setting]["moved"]) == {str(step) for step in effects.STEPS}
            if right := record[name][setting]["right_engine"]:
                assert all(abs(scale - 1) < 0.02 for scale in right.values()), name
