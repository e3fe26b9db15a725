"""Test that all strategies train the exact problem to the same bits, and that every planted fault is detected."""

from __future__ import annotations

import ast
import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import launching
import pytest
import samples
import torch

from study.exact import cells, command, faults, model, orders, problem, reference, runner
from study.exact.cells import Cell
from zero_study import cli
from zero_study.errors import Refusal
from zero_study.strategy import file

RECORD = launching.ROOT / "reports" / "exact.json"
THREE_FAULTS = ("a bucket is reduced twice", "a layer computes with stale weights", "the last element of a shard")


# ---------------------------------------------------------------- the reference


def test_the_reference_needs_only_python():
    for module in (reference, problem):
        tree = ast.parse(Path(module.__file__).read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        ours = {"study.exact", "study.exact.problem"}
        assert imported - ours <= {
            "__future__",
            "hashlib",
            "struct",
            "collections.abc",
            "dataclasses",
            "functools",
            "typing",
        }


def test_fp32_holds_every_sum():
    expected = reference.expect()
    kinds = {"activation", "activation's gradient", "weight's gradient", "momentum", "weight"}
    assert expected.bits.keys() == kinds
    assert max(expected.bits.values()) <= reference.SIGNIFICANT_BITS == 24
    assert len(expected.gradients) == len(expected.weights) == len(expected.momenta) == problem.NUM_STEPS
    assert expected.losses[-1] < 0.7 * expected.losses[0]  # it learns


def test_a_sum_that_fp32_might_round_is_refused(monkeypatch):
    monkeypatch.setattr(reference, "SIGNIFICANT_BITS", max(reference.expect().bits.values()) - 1)
    with pytest.raises(ArithmeticError, match="significant bits"):
        reference.expect.__wrapped__()


def test_a_weight_below_its_grid_is_refused(monkeypatch):
    monkeypatch.setattr(problem, "MATRIX_RATE_BITS", problem.MATRIX_RATE_BITS + 1)
    with pytest.raises(ArithmeticError, match="not a multiple of the smallest step"):
        reference.expect.__wrapped__()


@pytest.mark.parametrize(
    ("value", "expected"), [(3, 0), (4, 0), (5, 1), (12, 2), (-4, 0), (-5, -1), (-12, -2), (20, 2)]
)
def test_halves_are_rounded_as_torch_rounds(value, expected):
    assert reference._rounded(value, 3) == expected == int(torch.tensor(value / 8).round())


def test_sums_keep_what_any_order_of_additions_stays_below():
    sums = reference._Sums()
    assert sums.add("a sum", (5, -5, 1), factor=3) == 1
    assert sums.largest == {"a sum": 33}


@pytest.mark.parametrize("rows", samples.first_fast([12, 96, 32, 3]))
def test_torch_alone_has_the_bits_of_the_reference_in_any_order(rows):
    expected, shuffled = reference.expect(), random.Random(rows)
    built = model.Model(problem.BATCH_SIZE)
    model.set_initial_weights(built)
    groups = [[p for p in built.parameters() if p.ndim == n] for n in (2, 1)]
    rates = [2.0**-problem.MATRIX_RATE_BITS, 2.0**-problem.VECTOR_RATE_BITS]
    optimizer = torch.optim.SGD(
        [{"params": group, "lr": rate} for group, rate in zip(groups, rates, strict=True)], momentum=problem.MOMENTUM
    )
    for step in range(problem.NUM_STEPS):
        batch = shuffled.sample(problem.batch(step), problem.BATCH_SIZE)
        for start in range(0, problem.BATCH_SIZE, rows):
            tokens, targets = model.tensors(batch[start : start + rows])
            (model.loss(built(tokens), targets) * (rows / problem.BATCH_SIZE)).backward()
        for name, parameter in built.named_parameters():
            assert (parameter.grad + 0.0).numpy().tobytes() == expected.gradients[step][name]
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in built.named_parameters():
            assert (parameter.detach() + 0.0).numpy().tobytes() == expected.weights[step][name]


def test_three_times_an_integer_is_divided_by_three_exactly_however_an_engine_divides():
    """By a division, or by a product with 1/3 as fp32 rounds it: for every integer whose triple fp32 can hold."""
    integers = torch.arange(2**24 // 3 + 1, dtype=torch.float32)
    assert torch.equal(3 * integers / 3, integers)
    assert torch.equal(3 * integers * torch.tensor(1 / 3), integers)
    assert not torch.equal(integers / 3 * 3 * torch.tensor(1 / 3), integers / 3)  # which is no rule of all numbers


# ---------------------------------------------------------------- cells and verdicts


@pytest.mark.parametrize("num_ranks", cells.NUM_RANKS)
@pytest.mark.parametrize("accumulation", cells.ACCUMULATIONS)
def test_the_micro_batches_of_all_ranks_are_the_batch(num_ranks, accumulation):
    cell = Cell("ddp", num_ranks, accumulation)
    places = [(rank, number) for number in range(accumulation) for rank in range(num_ranks)]
    assert [row for place in places for row in cell.sequences(1, *place)] == problem.batch(1)


def test_the_table_has_every_strategy_and_says_why_one_is_not_trained():
    assert {cell.strategy for cell in cells.plain_cells()} == set(file.names())
    never = {name for name in file.names() if all(c.refusal for c in cells.plain_cells(strategies=[name]))}
    assert never == {"fsdp2_cpu_offload", "zero3_nvme_offload"}
    refused = {cell.name for cell in cells.plain_cells() if cell.refusal and cell.strategy not in never}
    assert {name.rpartition("/")[0] for name in refused} == {
        *(f"single/{n}" for n in (2, 3, 4, 8)), *(f"zero3_hpz/{n}" for n in (1, 3)),
        *(f"fsdp2_hybrid/{n}" for n in (1, 2, 3)),
    }  # fmt: skip


def test_the_mesh_of_eight_ranks_has_larger_shards():
    assert cells.strategy_for("fsdp2_hybrid", 4).mesh == [2, 2]
    assert cells.strategy_for("fsdp2_hybrid", 8).mesh == [2, 4]


def _outcome(*differences, fault=None, compared=problem.NUM_COMPARED):
    answers = [{"difference": difference, "compared": compared} for difference in differences]
    return runner.Outcome(Cell("ddp", 2, 1, fault), answers=answers)


def test_one_rank_that_differs_makes_a_difference():
    wrong = {"step": 4, "what": "weights", "parameter": "head.bias"}
    assert _outcome(None, None).is_same
    assert not _outcome(None, wrong).is_same
    assert _outcome(None, wrong).text == "DIFFERENT from step 4"
    assert not _outcome().is_same  # no rank answered
    assert not _outcome(None).is_same  # one of two
    assert not _outcome(None, None, compared=problem.NUM_COMPARED - 1).is_same


@pytest.mark.parametrize(
    ("step", "what", "is_seen"), [(3, "weights", True), (3, "gradient", False), (2, "weights", False)]
)
def test_a_fault_is_seen_in_its_first_step_and_where_it_shows(step, what, is_seen):
    result = {"step": step, "what": what, "parameter": "head.bias"}
    assert _outcome(None, result, fault="a rank skips an update").is_seen == is_seen
    assert not _outcome(None, None, fault="a rank skips an update").is_seen


def test_the_record_is_of_this_reference_and_complete():
    record, expected = json.loads(RECORD.read_text()), reference.expect()
    assert record["sha256"] == {
        "gradient": reference.sha256(expected.gradients[-1]),
        "weights": reference.sha256(expected.weights[-1]),
        "momentum": reference.sha256(expected.momenta[-1]),
    }
    recorded = {(each["strategy"], each["ranks"], each["accumulation"]): each["outcome"] for each in record["cells"]}
    for cell in cells.plain_cells():
        outcome = f"refused: {cell.refusal}" if cell.refusal else "same bits"
        assert recorded.pop((cell.strategy, cell.num_ranks, cell.accumulation)) == outcome
    assert not recorded
    assert {(each["fault"], each["strategy"]) for each in record["faults"] if each["seen"]} == {
        (fault, strategy) for fault in faults.FAULTS for strategy in cells.FAULTY_STRATEGIES
    }


def test_values_are_written_as_fp32():
    written = reference._in_fp32({"a vector": [[1, -3, 1 << 20]]}, 2)
    assert written == {"a vector": struct.pack("<3f", 0.25, -0.75, 262144.0)}


# ---------------------------------------------------------------- engines


def _command(*words: str) -> launching.Done:
    return launching.command_line(["exact", *words])


@pytest.mark.slow
@pytest.mark.launches
def test_five_strategies_have_the_bits_of_the_reference(tmp_path):
    output = tmp_path / "exact.json"
    completed = _command("--quick", "--output", str(output))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "20 of 20 trainings agree with the reference" in completed.stdout
    assert len(re.findall(r"\bsame bits\b", completed.stdout)) == 20
    assert {each["outcome"] for each in json.loads(output.read_text())["cells"]} == {"same bits"}


@pytest.mark.launches
def test_planted_faults_are_seen():
    completed = _command("--only", "ddp,zero3", *(word for fault in THREE_FAULTS for word in ("--fault", fault)))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert len(re.findall(r"^found ", completed.stdout, re.MULTILINE)) == 6


# What each engine adds first, of three micro batches on two ranks, and how three ranks take their mean.
ORDERS = dict.fromkeys(("ddp", "zero1"), "micro batches") | dict.fromkeys(("zero2", "zero3", "fsdp2"), "ranks")
DIVISIONS = {"ddp": "multiplies by 1/3 before the sum", "fsdp2": "divides by 3 after the sum"}
DIVISIONS |= dict.fromkeys(("zero1", "zero2", "zero3"), "divides by 3 before the sum")


@pytest.mark.slow
@pytest.mark.launches
def test_loops_without_an_engine_show_the_order_of_additions_and_the_division_of_each_engine():
    completed = launching.python(["-m", "study.exact.orders"], launching.ROOT)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert dict(re.findall(r"^(\w+), three micro batches.*adds over the (.*) first$", completed.stdout, re.M)) == ORDERS
    rows = re.findall(
        r"^(\w+), three ranks: .* the engine (.*) explains ([\d,]+) of ([\d,]+) weights$", completed.stdout, re.M
    )
    assert len(rows) == len(orders.ENGINES) * len(orders.DIVISIONS)
    assert {engine: rule for engine, rule, explained, all_weights in rows if explained == all_weights} == DIVISIONS


def test_a_loop_shows_an_order_only_if_the_other_one_has_other_bits():
    first, second = (orders.train_without_engine(2, micro_batches_first) for micro_batches_first in (True, False))
    assert orders.same_bits(first, orders.train_without_engine(2, True))
    assert not orders.same_bits(first, second)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ranks 5", "'5' is not one of 1, 2, 3, 4, 8"),
        ("--only zero9", "zero9"),
        ("--fault unheard-of", "a bucket is reduced twice"),
        ("--output absent/exact.json", "absent"),
    ],
)
def test_an_exact_training_that_cannot_be_asked_for_is_refused(words, said, capsys):
    with pytest.raises(Refusal, match=re.escape(said)):
        cli.run(["exact", *words.split()])
    assert "Importing" not in capsys.readouterr().out


def _one_rank(**changes: Any) -> runner.Outcome:
    """The outcome of a training on one rank, which is right unless something is changed."""
    right = {"difference": None, "compared": problem.NUM_COMPARED}
    return runner.Outcome(Cell("single", 1, 1), **{"answers": [right], **changes})


def test_the_status_tells_a_difference_from_what_was_not_trained():
    seen = {"step": faults.FAULTY_STEP, "what": faults.FAULTS[THREE_FAULTS[0]].shows_in}
    with_fault = Cell("ddp", 2, 1, THREE_FAULTS[0])
    faulty = [runner.Outcome(with_fault, answers=[{"difference": each, "compared": 1}]) for each in (seen, None)]
    refused = _one_rank(refusal="no GPU", answers=[])

    def status(outcomes: list[Any], faulty: list[Any], *strategies: str) -> int:
        return command._verdict(outcomes, faulty, strategies).status

    assert status([_one_rank(), refused], faulty[:1]) == 0
    assert status([_one_rank(failure="a rank ended")], []) == 1
    assert status([_one_rank()], faulty) == 1  # the second fault was not seen
    assert status([refused], []) == 3
    assert status([_one_rank(), refused], [], "single") == 0
    assert status([_one_rank()], [], "single", "zero3") == 3


@pytest.mark.nightly
@pytest.mark.launches
def test_every_strategy_has_the_bits_of_the_reference():
    """On one and on four processes; the committed record has the others."""
    for num_ranks in (1, 4):
        completed = _command("--ranks", str(num_ranks))
        assert completed.returncode == 0, completed.stdout + completed.stderr
