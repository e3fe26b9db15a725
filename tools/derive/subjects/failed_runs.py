"""How often `zero-study why` names the cause that a public thread found, and its complaints of sound trainings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from zero_study.files import ROOT
from zero_study.terminal import count, markdown
from zero_study.why import answer, known

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
    return _outcomes(case for case in cases(folder) if not (strong and "weak" in case))


def _outcomes(judged: Iterable[dict[str, Any]]) -> str:
    """Return how many cases have each judgment."""
    outcomes = Counter(case["right"] for case in judged)
    numbers = ", ".join(f"{name} {outcomes[name]}" for name in OUTCOMES if name != "right")
    return f"right {outcomes['right']} of {sum(outcomes.values())}; {numbers}"


def decidable(folder: str, partly: bool = False) -> str:
    """Return the judgments of the cases whose cause an expert can see in the log, or with `partly` suspect from it."""
    visible = ("yes", "partly") if partly else ("yes",)
    return _outcomes(case for case in cases(folder) if case["decidable"].startswith(visible))


def _with_new_threads(folder: str) -> list[dict[str, Any]]:
    """Return the cases whose threads are neither in an earlier set nor in the cases that rules were written with."""
    return [case for case in cases(folder) if "thread_known_from" not in case]


def new_threads(folder: str) -> str:
    """Return the judgments of the cases with new threads."""
    return _outcomes(_with_new_threads(folder))


def known_threads(folder: str) -> str:
    """Return how many cases have a thread that had been used for rules before, and how many of them are right."""
    known_before = [case for case in cases(folder) if "thread_known_from" in case]
    return f"{len(known_before)} of its {len(cases(folder))} logs ({_right(known_before)} of them judged right)"


def _right(judged: Iterable[dict[str, Any]]) -> int:
    return sum(case["right"] == "right" for case in judged)


def _confidently_wrong(judged: Iterable[dict[str, Any]]) -> int:
    return sum(case["right"] == "wrong" and case["confident"] for case in judged)


def trend() -> str:
    """Return a table of all sets of unseen logs with their judgments."""
    rows = []
    for number, folder in enumerate(USED, start=1):
        judged = cases(folder)
        outcomes = Counter(case["right"] for case in judged)
        numbers = (number, len(judged), *(outcomes[name] for name in OUTCOMES), _confidently_wrong(judged))
        rows.append(tuple(map(str, numbers)))
    head = ["set", "logs", *OUTCOMES, "wrong with confidence"]
    return "\n".join(markdown(head, rows, 1))


def by_kind(folder: str) -> str:
    """Return a table of the judgments of a set by the kind of failure."""
    kinds = sorted({case["kind"] for case in cases(folder)})
    rows = []
    for kind in kinds:
        of_kind = [case for case in cases(folder) if case["kind"] == kind]
        outcomes = Counter(case["right"] for case in of_kind)
        sure = _confidently_wrong(of_kind)
        name = {"startup": "start-up or saving", "wrong": "training that is wrong"}.get(kind, kind)
        rows.append((name, *(str(number) for number in (len(of_kind), *(outcomes[each] for each in OUTCOMES), sure))))
    return "\n".join(
        markdown(["kind of failure", "logs", *OUTCOMES.values(), "another cause, with confidence"], rows, 1)
    )


def wrong_with_confidence() -> str:
    """Return how many answers to the last set are wrong although they were called certain or likely."""
    judged = cases(USED[-1])
    return f"{_confidently_wrong(judged)} of {len(judged)}"


USED = (
    "held_out",
    "held_out_2",
    "held_out_3",
    "held_out_4",
    "held_out_5",
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


def last_judged() -> str:
    """Return how many answers to the logs of the last set were right."""
    judged = cases(USED[-1])
    return f"{_right(judged)} of {len(judged)}"


def unseen() -> str:
    """Return how many answers to logs of the last set were right that nobody had seen who wrote the rules."""
    judged = _with_new_threads(USED[-1])
    return f"{_right(judged)} of {len(judged)}"


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
    (PAGE, "held_out_5"): partial(table, "held_out_5"),
    (PAGE, "kinds_4"): partial(by_kind, "held_out_4"),
    (PAGE, "kinds_5"): partial(by_kind, "held_out_5"),
    (PAGE, "trend"): trend,
}
NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    (PAGE, "score"): score,
    (PAGE, "strong_score"): partial(score, "held_out_2", strong=True),
    (PAGE, "strong_3_score"): partial(score, "held_out_3", strong=True),
    (PAGE, "decidable_4_score"): partial(decidable, "held_out_4"),
    (PAGE, "decidable_5_score"): partial(decidable, "held_out_5"),
    (PAGE, "partly_decidable_5_score"): partial(decidable, "held_out_5", partly=True),
    (PAGE, "new_threads_5_score"): partial(new_threads, "held_out_5"),
    (PAGE, "known_threads_5"): partial(known_threads, "held_out_5"),
    (PAGE, "last_judged"): last_judged,
    (PAGE, "unseen"): unseen,
    (PAGE, "wrong_last"): wrong_with_confidence,
    (PAGE, "complaints"): complaints,
    (PAGE, "used_now"): used_now,
    (PAGE, "general_rules"): general_rules,
    (PAGE, "certain_rules"): certain_rules,
    (PAGE, "threads"): threads,
    ("docs/why.md", "last_judged"): last_judged,
    ("docs/why.md", "unseen"): unseen,
    ("README.md", "unseen"): unseen,
}
