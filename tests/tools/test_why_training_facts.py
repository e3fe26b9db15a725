"""The facts that the logged steps of a training show by arithmetic, and what must not raise an alarm."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from zero_study.logs.printed_steps import FIRST, Line, Steps
from zero_study.why.fact import Fact
from zero_study.why.training_facts import doubt, facts

CASES = Path(__file__).parents[1] / "why"
NAN = math.nan


def read(lines: Iterable[str], rank: int | None = None) -> Steps:
    """Return the steps of a log whose lines have no marks of ranks."""
    steps = Steps()
    for number, text in enumerate(lines, start=1):
        take(steps, number, text, rank)
    steps.finish()
    return steps


def take(steps: Steps, number: int, text: str, rank: int | None) -> None:
    for part in text.rstrip("\n").split("\r"):
        if steps.concerns(part) or steps.wants_all:
            steps.take(Line(number, rank, part))


def printed(count: int, **columns: Callable[[int], float | str]) -> list[str]:
    """Return what Trainer prints for steps."""
    return [str({name: value(step) for name, value in columns.items()}) for step in range(1, count + 1)]


def falling(step: int) -> float:
    return round(3 / math.sqrt(step) + 0.01 * math.sin(step), 4)


def norm(step: int) -> float:
    return round(1 + 0.1 * math.sin(step), 4)


def number(step: int) -> int:
    return step


def after(start: int, then: float, before: Callable[[int], float] = falling) -> Callable[[int], float]:
    return lambda step: then if step > start else before(step)


def timed(count: int, milliseconds: Callable[[int], float]) -> list[str]:
    return [f"iter {step}: loss {falling(step + 1)}, time {milliseconds(step)}ms" for step in range(count)]


def overflows(count: int) -> list[str]:
    return [
        f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {2 ** max(0, 16 - n)}, reducing to 1"
        for n in range(count)
    ]


SOUND = printed(30, step=number, loss=falling, grad_norm=norm, learning_rate=lambda step: 1e-5 * (31 - step))
POLICY: dict[str, Callable[[int], float | str]] = {"grad_norm": norm, "reward": lambda _: 0.5}

# The log, the settings, and the numbers that the fact must contain.
EXAMPLES: dict[str, tuple[list[str], dict[str, object], list[str]]] = {
    "wrong/not-finite": (
        [*SOUND[:10], *printed(4, loss=lambda _: 0.0, grad_norm=lambda _: NAN, learning_rate=lambda _: 2e-5)],
        {},
        ["line 11", "line 10 (step 10)", "2e-05", "nan", "3 of 3", "0.0"],
    ),
    "wrong/parts-of-loss": (["step: 3, loss_cls: nan, loss_box: 0.5, loss: nan"], {}, ["1 of 2", "loss_cls"]),
    "wrong/jump": (
        printed(40, step=number, loss=after(25, 9.5), grad_norm=after(25, 80.0, norm), learning_rate=after(25, 1e-3)),
        {},
        ["line 25", "step 26", "9.5", "80", "0.001"],
    ),
    "wrong/loss-rises": (
        printed(60, loss=lambda step: round(1.93 * 1.0305**step, 3), learning_rate=lambda _: 2e-3),
        {},
        ["11.7", "0.002"],
    ),
    "wrong/rate-zero": (
        printed(60, step=number, loss=falling, learning_rate=lambda step: max(0, 30 - step) * 1e-6),
        {},
        ["line 30 (step 30)", "31 rows", "1e-06"],
    ),
    "wrong/norm-zero": (printed(8, loss=lambda step: 2.5 + step % 2, grad_norm=lambda _: 0.0), {}, ["8 rows"]),
    "wrong/loss-zero": (printed(30, loss=after(10, 0.0), grad_norm=after(10, 0.0)), {}, ["line 11", "20 rows"]),
    "slow/waiting-for-data": (
        [f"Epoch [1][{n}/90] loss: {3 / n:.4f} time: 1.9 data_time: 1.5" for n in range(1, 12)],
        {},
        ["79 %", "10 steps"],
    ),
}


@pytest.mark.parametrize("id", EXAMPLES)
def test_a_fact_is_found_with_its_numbers(id: str) -> None:
    lines, setting, numbers = EXAMPLES[id]
    (fact,) = [fact for fact in facts(read(lines), **setting) if fact.id == id]  # type: ignore[arg-type]
    assert [each for each in numbers if each not in fact.happened] == []
    assert (fact.certainty, fact.because, fact.changes) == ("computed", "", ())
    assert not fact.is_note
    assert fact.evidence


@pytest.mark.parametrize("path", sorted((CASES / "sound").glob("*.log")), ids=lambda path: path.stem)
def test_a_sound_training_has_no_fact_but_notes(path: Path) -> None:
    found = facts(read(path.read_text(errors="replace").split("\n")))
    assert [fact.id for fact in found if not fact.is_note] == []


@pytest.mark.parametrize(
    ("path", "id", "number"),
    [
        ("wrong-zero2-overlap-lora", "wrong/not-finite", "1.0446"),
        ("held_out_4/h5-14", "wrong/parts-of-loss", "5 of 37"),
        ("learned/automodel-1980", "wrong/norm-zero", "6 rows"),
        ("learned/lerobot-1488", "slow/waiting-for-data", "84 %"),
    ],
)
def test_a_public_failure_is_stated(path: str, id: str, number: str) -> None:
    found = {fact.id: fact for fact in facts(read((CASES / f"{path}.log").read_text().split("\n")))}
    assert number in found[id].happened


# ---------------------------------------------------------------- what is no fault


def noisy(step: int) -> float:
    return round(2 * math.exp(random.Random(step).gauss(0, 0.6)), 4)


HARMLESS: dict[str, tuple[list[str], dict[str, object]]] = {
    "sound": (SOUND, {}),
    "losses of small batches": (printed(300, loss=noisy, grad_norm=norm), {}),
    "a spike that ends": (printed(60, loss=lambda step: 9.0 if 30 <= step < 34 else falling(step)), {}),
    "losses of a policy": (printed(30, loss=lambda step: math.sin(step / 9), **POLICY), {}),
    "losses that become negative": (printed(30, loss=lambda step: -3.0 / step), {}),
    "a rate of 0 in the first step": (printed(30, loss=falling, learning_rate=lambda step: 1e-6 * (step - 1)), {}),
    "a rate of 0 at the end": (
        printed(100, step=number, loss=falling, learning_rate=lambda step: max(0, 95 - step) * 1e-6),
        {"total_steps": 100},
    ),
    "a rate with few digits": (
        [f"s:{n} trl:{falling(n)} lr:{1e-6 * max(0, 3 - n):.6f} norm:{norm(n)}" for n in range(1, 40)],
        {},
    ),
    "a loss that rounding makes 0": (printed(60, loss=lambda step: round(0.3 / step**2, 3), grad_norm=norm), {}),
    "bf16 with a scale of 1": (printed(30, loss=falling, loss_scale=lambda _: 1.0), {}),
    "a progress bar that repeats a loss": (
        [f" {n}%|#| {n}/100 [00:10<01:00, 1.0it/s, loss=2.52]" for n in range(10, 40)],
        {},
    ),
    "workers that start": (
        [f"step:{n} loss:{3 / n:.4f} updt_s:0.302 data_s:{60 if n < 3 else 0.001}" for n in range(1, 30)],
        {},
    ),
    "an evaluation that is NaN": ([*SOUND, "{'eval_loss': nan, 'epoch': 1.0}", "val loss nan"], {}),
    "a count of NaN": (
        [f"iteration {n}/ 9 | lm loss: {falling(n)} | number of nan iterations: 0 |" for n in range(1, 9)],
        {},
    ),
    "two slow steps": (timed(48, lambda n: 900 if n in (9, 30) else 200 + n % 2), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_log_has_no_fact(name: str) -> None:
    lines, setting = HARMLESS[name]
    assert [fact.id for fact in facts(read(lines), **setting)] == []  # type: ignore[arg-type]


def notes(lines: list[str]) -> list[str]:
    found: list[Fact] = facts(read(lines))
    assert all(fact.is_note for fact in found)
    return [fact.id for fact in found]


def test_what_is_usual_is_a_note() -> None:
    infinite = [math.inf if step in (1, 9) else norm(step) for step in range(31)]
    skipped = printed(30, loss=falling, grad_norm=infinite.__getitem__, loss_scale=lambda step: 64 / step)
    assert notes(skipped) == ["wrong/not-finite"]
    assert notes(printed(8, loss=lambda _: 0.0, **POLICY)) == ["wrong/loss-zero"]
    assert notes(printed(30, loss=falling, grad_norm=lambda _: 0.0)) == ["wrong/norm-zero"]


def test_later_losses_tell_whether_the_weights_are_finite() -> None:
    first = printed(1, loss=falling, grad_norm=lambda _: NAN)
    (finite,) = facts(read([*first, *printed(3, loss=falling, grad_norm=lambda _: NAN)]))
    (spoiled,) = facts(read([*first, *printed(3, loss=lambda _: NAN, grad_norm=lambda _: NAN)]))
    assert "(3) are finite" in finite.happened
    assert "3 of 3" in spoiled.happened


@pytest.mark.parametrize(
    ("lines", "is_doubtful"),
    [
        (SOUND, False),
        (SOUND[:3], True),
        ([], True),
        (printed(4, loss=lambda step: [1.93, 2.5, 4.0, 11.4][step - 1]), True),
        (printed(9, grad_norm=norm), True),
        (printed(9, loss=lambda _: 2.5), True),
        ([*SOUND, *overflows(40)], True),
    ],
)
def test_rows_that_cannot_be_called_sound(lines: list[str], is_doubtful: bool) -> None:
    assert (doubt(read(lines)) is not None) == is_doubtful


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("{'loss': 1.5, 'grad_norm': 2.0, 'learning_rate': 1e-05}", {"loss": 1.5, "norm": 2.0}),
        ("iteration 12/ 300 | elapsed time per iteration (ms): 500.0 | lm loss: 1.5E+00 | grad norm: 0.3 |",
         {"step": 12, "seconds": 0.5, "loss": 1.5, "norm": 0.3}),
        ("step 00000021/00000025 | step-time 14.2 sec | cross-entropy-loss 2.57 | gradient-norm 10.5",
         {"step": 21, "seconds": 14.2, "loss": 2.57, "norm": 10.5}),
        ("iter 3: loss 3.6, time 45.5ms, mfu -100.00%", {"step": 3, "seconds": 0.0455, "loss": 3.6}),
        ("steps: 10 loss: 8.2041 iter time (s): 1.204", {"step": 10, "loss": 8.2041, "seconds": 1.204}),
        ("s:19559 trl:3.2217 lr:0.000100 norm:0.22", {"loss": 3.2217, "norm": 0.22, "rate": 1e-4}),
        ("step:9 smpl:1K loss:1.051 grdn:4.482 lr:1.8e-06", {"step": 9, "norm": 4.482}),
        ("step: 1,234 loss = tensor(2.5)", {"step": 1234, "loss": 2.5}),
        ("step 5: train loss 2.03, val loss 2.10", {"step": 5, "loss": 2.03}),
    ],
)  # fmt: skip
def test_a_line_of_a_step_is_read(line: str, values: dict[str, float]) -> None:
    (row,) = read([line]).rows
    assert {name: getattr(row, name) for name in values} == pytest.approx(values)


@pytest.mark.parametrize(
    "line",
    ["step 5: val loss 2.10", "{'eval_loss': 2.1}", "loading across 8 GPUs", "weight norm is set", "Error: loss: 2.5"],
)
def test_other_lines_are_no_step(line: str) -> None:
    assert read([line]).rows == []


def test_a_dictionary_over_several_lines_is_one_row() -> None:
    (row,) = read(["{", "    'loss': 2.3101,", "    'grad_norm': nan,", "}"]).rows
    assert (row.loss, math.isnan(row.norm or 0.0)) == (2.3101, True)


def test_the_rows_of_a_long_log_are_its_first_and_last_ones_and_some_between() -> None:
    lines = printed(60_000, loss=float, step=number)
    lines[30_001] = "{'loss': nan, 'step': 30002}"
    rows = read(lines).rows
    steps = [int(row.step or 0) for row in rows]
    assert steps[:FIRST] == list(range(1, FIRST + 1))
    assert steps[-FIRST:] == list(range(60_001 - FIRST, 60_001))
    assert steps == sorted(set(steps))
    assert 30_002 in steps
    assert len(steps) < 20_000


def test_bars_are_read() -> None:
    steps = read([
        "Map: 100%|##| 10/10 [00:01<00:00, 10.0 examples/s]\r 10%|#  | 5/50 [00:10<01:30,  2.00s/it]",
        "[Rank 0] step=7, skipped=2, lr=[1e-5]",
    ])  # fmt: skip
    assert (steps.step_bar and steps.step_bar[2:]) == (5, 50, 2.0)
    assert steps.bars["Map:"].total == 10
    assert (steps.num_steps, steps.usual_seconds) == (7, 2.0)


def test_the_rows_of_an_imported_log_are_added() -> None:
    steps = Steps()
    steps.add_series({"step": [1, 2], "loss": [3.0, NAN], "gradient_norm": [1.0, 1.0]})
    (fact,) = facts(steps)
    assert "row 2 (step 2)" in fact.happened
