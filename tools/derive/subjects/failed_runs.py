"""How often `zero-study why` names the cause that a public thread found, and its complaints of sound trainings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from study.files import ROOT
from study.terminal import count, markdown
from study.why import answer, known

PAGE = "reports/why.md"
CASES = ROOT / "tests" / "why"
# What the first cause of an answer is, as a person judged it who knew the thread.
OUTCOMES = {
    "right": "the cause of the thread",
    "partly": "the right kind, less precise",
    "unknown": "no cause named",
    "wrong": "another cause",
}


@cache
def cases(folder: str = ".") -> list[dict[str, Any]]:
    """Return the cases of a folder by name. `answer` is the first cause when `right` was judged."""
    paths = sorted((CASES / folder).glob("*.yaml"))
    return [yaml.safe_load(path.read_text(encoding="utf-8")) | {"name": path.stem, "path": path} for path in paths]


def table(folder: str = ".") -> str:
    """Return a table of cases: the log, the cause that the thread found, the answer, and the judgment."""
    rows = [
        (
            f"[{case['name']}]({Path('..') / case['path'].with_suffix('.log').relative_to(ROOT)})",
            f"[thread]({case['source']})",
            case["truth"],
            f"`{case['answer']}`" if case["answer"] else "not known",
            OUTCOMES[case["right"]],
        )
        for case in cases(folder)
    ]
    head = ["log", "source", "cause that the thread found", "first cause named", "judgment"]
    return "\n".join(markdown(head, rows, 5))


def score(folder: str = ".", strong: bool = False) -> str:
    """Return how many answers of a folder are right, partly right, unknown and wrong.

    With `strong`, cases are left out whose log or evidence is thin, which a line `weak` says.
    """
    outcomes = Counter(case["right"] for case in cases(folder) if not (strong and "weak" in case))
    total = sum(outcomes.values())
    return (
        f"{outcomes['right']} of {total} answers name the cause first, {outcomes['partly']} name the right kind, "
        f"{outcomes['unknown']} say that it is not known, and {outcomes['wrong']} name another cause"
    )


def decidable() -> str:
    """Return the score of the fourth set for the cases whose cause an expert can see in the log."""
    outcomes = Counter(case["right"] for case in cases("held_out_4") if case["decidable"].startswith("yes"))
    return (
        f"{outcomes['right']} of {sum(outcomes.values())} answers name the cause first, {outcomes['partly']} names the "
        f"right kind, {outcomes['unknown']} say that it is not known, and {outcomes['wrong']} name another cause"
    )


def by_kind() -> str:
    """Return a table of the judgments of the fourth set by the kind of failure."""
    kinds = sorted({case["kind"] for case in cases("held_out_4")})
    rows = []
    for kind in kinds:
        of_kind = [case for case in cases("held_out_4") if case["kind"] == kind]
        outcomes = Counter(case["right"] for case in of_kind)
        sure = sum(case["right"] == "wrong" and case["confident"] for case in of_kind)
        name = {"startup": "start-up or saving", "wrong": "training that is wrong"}.get(kind, kind)
        rows.append((name, *(str(number) for number in (len(of_kind), *(outcomes[each] for each in OUTCOMES), sure))))
    return "\n".join(
        markdown(["kind of failure", "logs", *OUTCOMES.values(), "another cause, with confidence"], rows, 1)
    )


def wrong_with_confidence() -> str:
    """Return how many answers to the fourth set are wrong, and how many of these were certain or likely."""
    wrong = [case for case in cases("held_out_4") if case["right"] == "wrong"]
    confident = sum(case["confident"] for case in wrong)
    return f"{len(wrong)} of {len(cases('held_out_4'))} answers are wrong, {confident} of them with confidence"


USED = (
    "held_out",
    "held_out_2",
    "held_out_3",
    "held_out_4",
)  # sets that were judged before the rules were changed by them


def used_now() -> str:
    """Return how many logs of the judged sets got a cause when they were judged, and get one now."""
    judged = [case for folder in USED for case in cases(folder)]
    now = sum(answer.answer([case["path"].with_suffix(".log")]).cause is not None for case in judged)
    then = sum(case["answer"] is not None for case in judged)
    return f"{then} of {len(judged)} logs got a first cause when they were judged, and {now} get one with these rules"


def general_rules() -> str:
    """Return how many rules are for exceptions whose message no other rule knows."""
    return f"{sum(rule.general for rule in known.rules())}"


def certain_rules() -> str:
    """Return how many rules are sure that they name the cause, and how many of them are sure of the reason, too."""
    stated = [rule for rule in known.rules() if rule.certainty == "certain"]
    also = sum((rule.reason or rule.certainty) == "certain" for rule in stated)
    return f"{len(stated)} rules that are certain of the cause, {also} call its reason certain, too"


def threads() -> str:
    """Return how many public threads the rules name in which the cause was found."""
    return f"{len({address for rule in known.rules() for address in rule.seen})}"


def unseen() -> str:
    """Return how many answers to logs were right that nobody had seen who wrote the rules of that time."""
    judged = [case["right"] for case in cases("held_out_4")]
    return f"{judged.count('right')} of {len(judged)}"


def complaints() -> str:
    """Return how many logs of sound trainings get a cause."""
    logs = sorted((CASES / "sound").glob("*.log"))
    with_cause = [path for path in logs if answer.answer([path]).num_found]
    return f"{count(len(with_cause), 'log')} of {len(logs)}"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    (PAGE, "cases"): table,
    (PAGE, "held_out"): partial(table, "held_out"),
    (PAGE, "held_out_2"): partial(table, "held_out_2"),
    (PAGE, "held_out_3"): partial(table, "held_out_3"),
    (PAGE, "held_out_4"): partial(table, "held_out_4"),
    (PAGE, "kinds_4"): by_kind,
}
NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    (PAGE, "score"): score,
    (PAGE, "held_out_score"): partial(score, "held_out"),
    (PAGE, "held_out_2_score"): partial(score, "held_out_2"),
    (PAGE, "strong_score"): partial(score, "held_out_2", strong=True),
    (PAGE, "held_out_3_score"): partial(score, "held_out_3"),
    (PAGE, "strong_3_score"): partial(score, "held_out_3", strong=True),
    (PAGE, "held_out_4_score"): partial(score, "held_out_4"),
    (PAGE, "decidable_4_score"): decidable,
    (PAGE, "wrong_4"): wrong_with_confidence,
    (PAGE, "complaints"): complaints,
    (PAGE, "used_now"): used_now,
    (PAGE, "general_rules"): general_rules,
    (PAGE, "certain_rules"): certain_rules,
    (PAGE, "threads"): threads,
    ("docs/why.md", "unseen"): unseen,
}
