"""Prepare sessions of coding agents, grade their answers, and print the tables for reports/skill.md.

    python tools/measure/skill_uplift.py prepare SESSIONS --python PYTHON --command ZERO-STUDY
    python tools/measure/skill_uplift.py collect SESSIONS RESULTS.jsonl
    python tools/measure/skill_uplift.py grade RESULTS.jsonl
    python tools/measure/skill_uplift.py grade RESULTS.jsonl --evals EVALS.json

The tasks of the three sets are in skill_tasks/, harder_tasks/ and agent_tasks/. prepare writes a folder per session
with the questions of the second set and their files, but without answers; agent_tasks/make.py those of the third set.

Each line of RESULTS.jsonl is one attempt; seconds and tokens may be absent:

    {"task": "conf-adam", "arm": "alone", "attempt": 1, "answer": ..., "seconds": 80, "tokens": 9000}

The arm is alone, tool or skill. The answer is a JSON value, or a text; the last JSON object of a text counts. A
person's judgment is one more field, "right": true or false, and is used only if no fixed rule decides.

The rules are in the answers.yaml of each set. --evals adds the tasks of a file of another form: a list of objects with
id, kind and check. The exit status is 0 if every attempt is graded, 3 if a person has to judge some, and 2 if a line is
damaged or names an unknown task.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import yaml

TASKS = Path(__file__).parent / "skill_tasks"
HARDER_TASKS = Path(__file__).parent / "harder_tasks"
AGENT_TASKS = Path(__file__).parent / "agent_tasks"
SKILL = Path(__file__).parents[2] / "zero_study" / "skills" / "zero-study"
ARMS = ("alone", "tool", "skill")
ARM_NAMES = {"alone": "own knowledge", "tool": "with the tool", "skill": "with the tool and the skill"}
ANSWERS = "answers.json"
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


def load_questions(folder: Path) -> list[dict[str, Any]]:
    """Read the questions of a set: id, kind, files and question of each task, and the program that makes its files."""
    questions: list[dict[str, Any]] = yaml.safe_load((folder / "tasks.yaml").read_text())
    return questions


def load_tasks(evals: Iterable[Path] = ()) -> dict[str, Task]:
    """Read the tasks of all sets with their rules, and those of further files."""
    tasks: dict[str, Task] = {}
    for folder in (TASKS, HARDER_TASKS, AGENT_TASKS):
        answers = yaml.safe_load((folder / "answers.yaml").read_text())
        for entry in load_questions(folder):
            tasks[entry["id"]] = Task(entry["id"], entry["kind"], answers[entry["id"]]["check"])
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


def markdown_by_arm(graded: Sequence[Graded]) -> str:
    """Return a table with a row per way: all attempts, each attempt, and the tasks that were right in every attempt."""
    lines = [
        "By way. Attempts at the same question are not independent, so the interval is narrower than it should be:",
        "",
        "| way | right answers (Wilson 95 % interval) | by attempt | questions right in every attempt |",
        "| --- | --- | --- | --- |",
    ]
    for arm in ARMS:
        of_arm = [attempt for attempt in graded if attempt.arm == arm and attempt.right is not None]
        if not of_arm:
            continue
        numbers = sorted({attempt.attempt for attempt in of_arm})
        by_attempt = [[bool(a.right) for a in of_arm if a.attempt == number] for number in numbers]
        tasks = list(dict.fromkeys(attempt.task.id for attempt in of_arm))
        always = sum(all(a.right for a in of_arm if a.task.id == task) for task in tasks)
        lines.append(
            f"| {ARM_NAMES[arm]} | {format_cell(of_arm)} | "
            + ", ".join(f"{sum(rights)} of {len(rights)}" for rights in by_attempt)
            + f" | {always} of {len(tasks)} |"
        )
    return "\n".join(lines)


def instructions(arm: str, questions: Sequence[Mapping[str, Any]], python: str, command: str) -> str:
    """Return the complete prompt of a session. Only the paragraph about the program depends on the way."""
    about_tool = {
        "alone": "Answer from your own knowledge. Do not import `study` or `zero_study`, and do not run `zero-study`.",
        "tool": (
            f"You have the program `{command}` (version and commands: `{command} --help`). It answers questions about "
            "training on several GPUs. Use it where it helps. Its answers can be incomplete or wrong."
        ),
        "skill": (
            f"You have the program `{command}`. It answers questions about training on several GPUs. The folder "
            "`skill` says how to use it: read `skill/SKILL.md` first. Its answers can be incomplete or wrong."
        ),
    }[arm]
    parts = [
        "# Twelve questions",
        "",
        "Answer the twelve questions below. Work alone, in this folder only.",
        "",
        about_tool,
        "",
        "Rules:",
        "",
        f"- You may compute with Python, also with installed packages such as torch: `{python}`.",
        "- Do not use a network or a search tool.",
        "- Do not read source code apart from the files of the questions, also not through Python or a help function.",
        "- Do not read any folder outside this one.",
        "- Do not ask back. If you are not sure, give your best answer. A missing answer counts as wrong.",
        "- An answer is right if all of its fields are right. Give numbers as plain JSON numbers.",
        "",
        f"Write all answers to `{ANSWERS}` in this folder: one JSON object that has the id of each question as a key "
        'and the JSON object that the question wants as its value, as in {"some-id": {"field": 1}}. Write it as soon '
        "as you have the first answers, and complete it. At the end, reply only that you are done.",
    ]
    for entry in questions:
        files = [f"`{entry['id']}/{name}`" for name in session_names(entry)]
        parts += ["", f"## {entry['id']}", "", entry["question"].strip()]
        if files:
            parts += ["", f"Files: {', '.join(files)}"]
    return "\n".join(parts) + "\n"


def session_names(entry: Mapping[str, Any]) -> list[str]:
    """Return the names of a task's files in the folder of the task in a session."""
    return [Path(name).name for name in entry["files"]]


def copy_task(entry: Mapping[str, Any], made: Path, folder: Path) -> None:
    """Copy the files of a task from the set, or from the folder in which they were made, to a folder of a session."""
    source = made / entry["id"] if "make" in entry else HARDER_TASKS
    for name in entry["files"]:
        folder.mkdir(exist_ok=True)
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / Path(name).name)
        else:
            shutil.copy(source / name, folder / Path(name).name)


def make_files(entry: Mapping[str, Any], made: Path) -> None:
    """Run the program that makes the files of a task. Raises CalledProcessError if it fails."""
    command = [sys.executable]
    if entry.get("processes", 1) > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(entry["processes"])]
    folder = made / entry["id"]
    folder.mkdir()
    subprocess.run([*command, str(HARDER_TASKS / entry["make"]), str(folder)], check=True, capture_output=True)


def read_answers(session: Path) -> dict[str, Any]:
    """Return the answers of a session; none if it wrote no file. Raises ValueError for a damaged file."""
    path = session / ANSWERS
    if not path.exists():
        return {}
    try:
        answers = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not JSON ({error}). Correct it, or delete it if the session gave no answer."
        ) from None
    if not isinstance(answers, dict):
        raise ValueError(f"{path} is not a JSON object with the ids of the questions as its keys.")
    return answers


@click.group()
def main() -> None:
    """Prepare sessions of coding agents, and grade their answers."""


@main.command()
@click.argument("sessions", type=click.Path(file_okay=False, path_type=Path))
@click.option("--python", required=True, help="The interpreter with which agents may compute.")
@click.option("--command", required=True, help="The zero-study of the two ways with the tool.")
@click.option("--attempts", default=3, show_default=True, type=click.IntRange(1))
def prepare(sessions: Path, python: str, command: str, attempts: int) -> None:
    """Write a folder per way and attempt to SESSIONS, such as alone-1, with the harder questions and their files."""
    folders = {(arm, number): sessions / f"{arm}-{number}" for arm in ARMS for number in range(1, attempts + 1)}
    if existing := [folder for folder in folders.values() if folder.exists()]:
        click.echo(f"{existing[0]} exists already. Nothing was written; name another folder.", err=True)
        sys.exit(2)
    questions = load_questions(HARDER_TASKS)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        for entry in questions:
            if "make" in entry:
                make_files(entry, made)
        for (arm, _), folder in folders.items():
            folder.mkdir(parents=True)
            (folder / "INSTRUCTIONS.md").write_text(instructions(arm, questions, python, command))
            for entry in questions:
                copy_task(entry, made, folder / entry["id"])
            if arm == "skill":
                shutil.copytree(SKILL, folder / "skill")
    click.echo(f"Wrote {len(folders)} sessions to {sessions}.")


@main.command()
@click.argument("sessions", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("results", type=click.Path(dir_okay=False, path_type=Path))
def collect(sessions: Path, results: Path) -> None:
    """Write the answers of all SESSIONS to RESULTS, one line per question. A missing answer counts as wrong."""
    lines = []
    try:
        for arm in ARMS:
            for session in sorted(sessions.glob(f"{arm}-*")):
                answers = read_answers(session)
                for entry in load_questions(HARDER_TASKS):
                    attempt = {"task": entry["id"], "arm": arm, "attempt": int(session.name.rpartition("-")[2])}
                    lines.append(json.dumps({**attempt, "answer": answers.get(entry["id"], "")}))
    except ValueError as error:
        click.echo(f"{error} Nothing was written.", err=True)
        sys.exit(2)
    results.write_text("".join(f"{line}\n" for line in lines))
    click.echo(f"Wrote {len(lines)} answers to {results}.")


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
    click.echo(f"{markdown(graded)}\n\n{markdown_by_arm(graded)}")
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
