"""How often `zero-study why` states the right first failure and facts, and what it finds in sound trainings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import yaml

from zero_study.files import ROOT
from zero_study.terminal import markdown
from zero_study.why import answer, rules

PAGE = "reports/why.md"
CASES = ROOT / "tests" / "why"
HELD_OUT = ("held_out", "held_out_2", "held_out_3", "held_out_4", "held_out_5")  # judged before commit 96ccb671
BLIND = CASES / "blind.yaml"  # judged after it
SETS = (1, 2, 3)
OUTCOMES = ("right", "partly", "unknown", "wrong")


@cache
def cases(folder: str) -> list[dict[str, Any]]:
    """Return the cases of a folder by name."""
    paths = sorted((CASES / folder).glob("*.yaml"))
    paths = [path for path in paths if path != BLIND]
    return [yaml.safe_load(path.read_text(encoding="utf-8")) | {"path": path} for path in paths]


@cache
def blind() -> list[dict[str, Any]]:
    """Return the judgments of logs that nobody had read who wrote the program."""
    content: list[dict[str, Any]] = yaml.safe_load(BLIND.read_text(encoding="utf-8"))
    return content


def before() -> str:
    """Return a table of the five sets with which the earlier program was judged, which guessed causes."""
    rows = []
    for number, folder in enumerate(HELD_OUT, start=1):
        outcomes = Counter(case["right"] for case in cases(folder))
        sure = sum(case["right"] == "wrong" and case["confident"] for case in cases(folder))
        rows.append(tuple(map(str, (number, len(cases(folder)), *(outcomes[name] for name in OUTCOMES), sure))))
    return "\n".join(markdown(["set", "logs", *OUTCOMES, "wrong with confidence"], rows, 1))


def blind_table(number: int) -> str:
    """Return a table of a blind set: the source of each log, its cause, and the judgment of the answer."""
    rows = [
        (_source(case["source"]), case["truth"], case["answer"],
         *("yes" if case[key] else "no" for key in ("first_failure", "numbers")))
        for case in _of(number)
    ]  # fmt: skip
    head = ["source", "cause that the thread names", "answer", "first failure right", "numbers right"]
    return "\n".join(markdown(head, rows, 5))


def _source(source: str) -> str:
    return f"[{source.removeprefix('https://github.com/')}]({source})" if source.startswith("https") else source


def blind_totals() -> str:
    """Return a table of the blind sets: how many answers have each judgment, and in how many the facts are right."""
    rows = []
    for number in SETS:
        judged = _of(number)
        outcomes = Counter(case["answer"] for case in judged)
        right = (sum(case[key] for case in judged) for key in ("first_failure", "numbers", "helpful"))
        rows.append(tuple(map(str, (number, len(judged), *(outcomes[name] for name in OUTCOMES), *right))))
    head = ["set", "logs", *OUTCOMES, "first failure right", "all numbers right", "question leads to the cause"]
    return "\n".join(markdown(head, rows, 1))


def _of(number: int) -> list[dict[str, Any]]:
    return [case for case in blind() if case["set"] == number]


def _of_last(outcome: str) -> Callable[[], str]:
    return lambda: f"{sum(case['answer'] == outcome for case in _of(SETS[-1]))} of {len(_of(SETS[-1]))}"


def first_failures() -> str:
    """Return for how many logs the program names the first failure that an independent reader named."""
    read = [case for folder in (".", *HELD_OUT) for case in cases(folder) if "first_failure" in case]
    return f"{sum(is_same(case) for case in read)} of {len(read)}"


def is_same(case: dict[str, Any]) -> bool:
    """Return whether the program names the first failure, or an alternative, that the reader of a case named."""
    found = answer.answer([case["path"].with_suffix(".log")]).first_failure
    stated = [case["first_failure"], *case.get("alternative", [])]
    return any(
        found is each if each is None or found is None
        else (found.number, found.rank) == (each["line"], each["rank"])
        and (found.kind.lower() == each["kind"].lower() or each["kind"] == "crash")
        for each in stated
    )  # fmt: skip


def complaints() -> str:
    """Return in how many logs of sound trainings something is found."""
    logs = sorted((CASES / "sound").glob("*.log"))
    return f"{sum(answer.answer([path]).num_found > 0 for path in logs)} of {len(logs)}"


def num_rules() -> str:
    """Return how many messages of libraries are known."""
    return f"{len(rules.rules())}"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    (PAGE, "before"): before,
    (PAGE, "blind_totals"): blind_totals,
    **{(PAGE, f"blind_{number}"): partial(blind_table, number) for number in SETS},
}
NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    (PAGE, "first_failures"): first_failures,
    (PAGE, "complaints"): complaints,
    (PAGE, "num_rules"): num_rules,
    ("docs/why.md", "num_rules"): num_rules,
    ("docs/why.md", "first_failures"): first_failures,
    ("docs/why.md", "last_right"): _of_last("right"),
    ("docs/why.md", "last_wrong"): _of_last("wrong"),
    ("README.md", "last_right"): _of_last("right"),
    ("README.md", "last_wrong"): _of_last("wrong"),
}
