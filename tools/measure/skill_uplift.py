"""Grade what coding agents answered to the tasks of skill_tasks/, and print the table for reports/skill.md.

    python tools/measure/skill_uplift.py grade RESULTS.jsonl
    python tools/measure/skill_uplift.py grade RESULTS.jsonl --evals EVALS.json

Each line of RESULTS.jsonl is one attempt; seconds and tokens may be absent:

    {"task": "conf-adam", "arm": "alone", "attempt": 1, "answer": ..., "seconds": 80, "tokens": 9000}

The arm is alone, tool or skill. The answer is a JSON value, or a text; the last JSON object of a text counts. A
person's judgment is one more field, "right": true or false, and is used only if no fixed rule decides.

The rules are in skill_tasks/answers.yaml. --evals adds the tasks of a file of another form: a list of objects with id,
kind and check. The exit status is 0 if every attempt is graded, 3 if a person has to judge some, and 2 if a line is
damaged or names an unknown task.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import yaml

TASKS = Path(__file__).parent / "skill_tasks"
ARMS = ("alone", "tool", "skill")
NONE = "-"
YES, NO = ("true", "yes", "y"), ("false", "no", "n")
SHORT_TEXT = 24  # characters of an expected text up to which equality decides; a longer one needs a person
EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")

Rule = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """The rules of a task: one per field, or one (under the field "") for an answer without fields."""

    id: str
    kind: str
    rules: Mapping[str, Rule]


@dataclass(frozen=True)
class Graded:
    """One attempt with its grade. `right` is None if a person has to judge."""

    task: Task
    arm: str
    attempt: int
    answer: Any
    right: bool | None
    reasons: tuple[str, ...]
    seconds: float | None
    tokens: float | None


def normal(value: Any) -> str:
    """Return a word without case, spaces at its ends, and the marks that agents put around it."""
    return " ".join(str(value).strip().strip("`'\"*.").casefold().split())


def as_number(value: Any) -> float | None:
    """Return the number of a value, also of a text with exactly one number, such as "about 28.8 GiB"."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value)
    numbers = NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}\b)", "", str(value)))
    return float(numbers[0]) if len(numbers) == 1 else None


def as_bool(value: Any) -> bool | None:
    """Return the truth of yes, no, true and false, and None for other values."""
    word = normal(value)
    return True if word in YES else False if word in NO else None


def as_set(value: Any) -> frozenset[str]:
    """Return the items of a list, or of a text with one item per line or between commas."""
    items = value if isinstance(value, list) else re.split(r"[\n,]", str(value))
    return frozenset(normal(str(item).lstrip(" -*")) for item in items if str(item).strip())


def same_items(items: Set[str], expected: Set[str]) -> bool:
    """Return whether the items are the expected ones. A name may have a longer prefix, as in model.layers.0."""
    matches = [{name for name in expected if f".{item}".endswith(f".{name}")} for item in items]
    return len(items) == len(expected) and all(matches) and set().union(*matches) == expected


def apply_rule(rule: Rule, value: Any) -> bool | None:
    """Return whether a value is right by one rule, or None if a person has to decide."""
    ((name, expected),) = rule.items()
    if name == "judge":
        return None
    if name == "range":
        number = as_number(value)
        return number is not None and bool(expected[0] <= number <= expected[1])
    if name == "bool":
        return as_bool(value) is bool(expected)
    if name == "word":
        return normal(value) in {normal(word) for word in expected}
    if name == "set":
        return same_items(as_set(value), {normal(item) for item in expected})
    raise ValueError(f"unknown rule {name!r}")


def parse_answer(answer: Any) -> Any:
    """Return the answer as a JSON value: the last JSON object in a text, or else the text itself."""
    if not isinstance(answer, str):
        return answer
    decoder = json.JSONDecoder()
    last, position = None, answer.find("{")
    while position >= 0:
        try:
            last, end = decoder.raw_decode(answer, position)
        except json.JSONDecodeError:
            end = position + 1
        position = answer.find("{", end)
    return answer if last is None else last


def grade_answer(task: Task, answer: Any) -> tuple[bool | None, tuple[str, ...]]:
    """Return whether an answer is right in every field, and the fields that are wrong or that a person has to judge."""
    parsed = parse_answer(answer)
    if "" in task.rules:
        values = {"": next(iter(parsed.values())) if isinstance(parsed, dict) and len(parsed) == 1 else parsed}
    elif isinstance(parsed, dict):
        values = {normal(key): value for key, value in parsed.items()}
    elif len(task.rules) == 1:
        values = dict.fromkeys(task.rules, parsed)
    elif parsed is None or not str(parsed).strip():
        return False, ("no answer",)
    else:
        return None, ("The answer is no JSON object: judge it by all rules.",)
    grades = {
        field: apply_rule(rule, values[field]) if field in values else False for field, rule in task.rules.items()
    }
    if wrong := [field for field, grade in grades.items() if grade is False]:
        return False, tuple(f"{field or 'answer'} is wrong" for field in wrong)
    undecided = [field for field, grade in grades.items() if grade is None]
    return (None if undecided else True), tuple(
        f"{field or 'answer'}: {task.rules[field]['judge']}" for field in undecided
    )


def rule_of_value(expected: Any) -> Rule:
    """Return the rule for an expected value of an --evals file."""
    if isinstance(expected, bool):
        return {"bool": expected}
    if isinstance(expected, (int, float)):
        return {"range": [expected, expected]}
    if isinstance(expected, list) and len(expected) == 2 and all(isinstance(bound, (int, float)) for bound in expected):
        return {"range": expected}
    if isinstance(expected, list):
        return {"set": expected}
    text = str(expected)
    if normal(text) in YES + NO:
        return {"bool": normal(text) in YES}
    return {"word": [text]} if len(text) <= SHORT_TEXT and " " not in text else {"judge": f"says the same as: {text}"}


def load_tasks(evals: Iterable[Path] = ()) -> dict[str, Task]:
    """Read the twelve tasks with their rules, and those of further files."""
    answers = yaml.safe_load((TASKS / "answers.yaml").read_text())
    questions = yaml.safe_load((TASKS / "tasks.yaml").read_text())
    tasks = {entry["id"]: Task(entry["id"], entry["kind"], answers[entry["id"]]["check"]) for entry in questions}
    for path in evals:
        for entry in json.loads(path.read_text()):
            check = entry["check"]
            fields = check if isinstance(check, dict) else {"": check}
            rules = {field: rule_of_value(expected) for field, expected in fields.items()}
            tasks[entry["id"]] = Task(entry["id"], entry["kind"], rules)
    return tasks


def grade_lines(lines: Iterable[str], tasks: Mapping[str, Task]) -> list[Graded]:
    """Grade every attempt. Raises ValueError for a damaged line, an unknown task or arm, and a repeated attempt."""
    graded: list[Graded] = []
    attempts: set[tuple[str, str, int]] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            task, arm, attempt = tasks[entry["task"]], entry["arm"], int(entry["attempt"])
            answer = entry["answer"]
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Line {number} is damaged, or its task is unknown ({error}).") from None
        if arm not in ARMS:
            raise ValueError(f"Line {number} has the arm {arm!r}, which is none of {', '.join(ARMS)}.")
        if (task.id, arm, attempt) in attempts:
            raise ValueError(f"Line {number} repeats attempt {attempt} of {task.id} with arm {arm}.")
        attempts.add((task.id, arm, attempt))
        right, reasons = grade_answer(task, answer)
        if right is None and isinstance(entry.get("right"), bool):
            right, reasons = entry["right"], ("judged by a person",)
        graded.append(Graded(task, arm, attempt, answer, right, reasons, entry.get("seconds"), entry.get("tokens")))
    return graded


def wilson_interval(right: int, attempts: int) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson 1927, without continuity correction)."""
    if attempts == 0:
        return 0.0, 1.0
    z = 1.959963984540054
    share = right / attempts
    scale = 1 + z * z / attempts
    center = (share + z * z / (2 * attempts)) / scale
    half = z * math.sqrt(share * (1 - share) / attempts + z * z / (4 * attempts * attempts)) / scale
    return max(0.0, center - half), min(1.0, center + half)


def format_cell(attempts: Sequence[Graded]) -> str:
    """Return "5 of 6 (44 % to 97 %)" for attempts of one arm, of which those that await a person do not count."""
    decided = [attempt for attempt in attempts if attempt.right is not None]
    if not decided:
        return NONE if not attempts else f"{NONE} ({len(attempts)} to judge)"
    right = sum(bool(attempt.right) for attempt in decided)
    low, high = wilson_interval(right, len(decided))
    waiting = len(attempts) - len(decided)
    return f"{right} of {len(decided)} ({100 * low:.0f} % to {100 * high:.0f} %)" + (
        f", {waiting} to judge" if waiting else ""
    )


def format_median(values: Iterable[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    return f"{median(numbers):,.0f}" if numbers else NONE


def markdown(graded: Sequence[Graded]) -> str:
    """Return the tables by kind and by task as Markdown."""
    head = "| {} | own knowledge | with the tool | with the tool and the skill |\n| --- | --- | --- | --- |"

    def row(name: str, attempts: Sequence[Graded]) -> str:
        cells = [format_cell([attempt for attempt in attempts if attempt.arm == arm]) for arm in ARMS]
        return f"| {name} | " + " | ".join(cells) + " |"

    kinds = list(dict.fromkeys(attempt.task.kind for attempt in graded))
    lines = ["Right answers, with Wilson 95 % intervals:", "", head.format("kind")]
    lines += [row(kind, [attempt for attempt in graded if attempt.task.kind == kind]) for kind in kinds]
    lines.append(row("**all**", graded))
    for name, unit in (("seconds", "seconds"), ("tokens", "tokens")):
        if any(getattr(attempt, name) is not None for attempt in graded):
            cells = [format_median(getattr(attempt, name) for attempt in graded if attempt.arm == arm) for arm in ARMS]
            lines.append(f"| median {unit} per attempt | " + " | ".join(cells) + " |")
    lines += ["", "By task:", "", head.format("task")]
    for identifier in dict.fromkeys(attempt.task.id for attempt in graded):
        lines.append(row(identifier, [attempt for attempt in graded if attempt.task.id == identifier]))
    return "\n".join(lines)


@click.group()
def main() -> None:
    """Grade the answers of coding agents."""


@main.command()
@click.argument("results", type=EXISTING)
@click.option("--evals", multiple=True, type=EXISTING, help="A JSON file with more tasks.")
def grade(results: Path, evals: tuple[Path, ...]) -> None:
    """Grade RESULTS, print the tables as Markdown, and list on standard error what a person has to judge."""
    try:
        graded = grade_lines(results.read_text().splitlines(), load_tasks(evals))
    except ValueError as error:
        click.echo(f"{results}: {error} Nothing was graded; correct the line.", err=True)
        sys.exit(2)
    if not graded:
        click.echo(f"{results} has no attempt, so there is nothing to grade.", err=True)
        sys.exit(2)
    click.echo(markdown(graded))
    waiting = [attempt for attempt in graded if attempt.right is None]
    for attempt in waiting:
        click.echo(f"\nTo judge: {attempt.task.id}, {attempt.arm}, attempt {attempt.attempt}", err=True)
        click.echo(f"  answer: {attempt.answer}", err=True)
        for reason in attempt.reasons:
            click.echo(f"  rule: {reason}", err=True)
        fixed = {field: rule for field, rule in attempt.task.rules.items() if "judge" not in rule}
        if fixed:
            click.echo(f"  other fields: {json.dumps(fixed)}", err=True)
    if waiting:
        message = f'{len(waiting)} attempts need a person: add "right": true or false to their lines.'
        click.echo(f"\n{message}", err=True)
        sys.exit(3)


if __name__ == "__main__":
    main()
