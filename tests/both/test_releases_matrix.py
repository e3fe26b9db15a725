"""Test how the matrix of releases judges an answer, and that the committed matrix has every example."""

from __future__ import annotations

import json

import launching
import pytest
import releases_matrix as matrix

LOST = {"id": "prove/gradients-lost", "severity": "error", "text": "gradients are lost"}
UNKNOWN = {"what": "the update", "why": "it was not made", "needed": True}


@pytest.mark.parametrize(
    ("finds", "verdict", "findings", "expected"),
    [
        (None, "sound", [], "right"), (None, "found", [LOST], "wrong"), (None, "unknown", [], "not checked"),
        ("gradients-lost", "found", [LOST], "right"), ("same-rows", "found", [LOST], "wrong"),
        ("gradients-lost", "sound", [], "wrong"), ("gradients-lost", None, [], "crash"),
    ],
)  # fmt: skip
def test_an_answer_is_right_if_it_finds_the_mistake_and_nothing_else(finds, verdict, findings, expected):
    content = {"schema": "a", "verdict": verdict, "findings": findings, "could_not_check": [UNKNOWN]}
    output = "of the script\n" + json.dumps(content, indent=1) if verdict else ""
    done = matrix.Run(0, output, "Traceback\nTypeError: no such argument\n")
    outcome, why = matrix.answer(matrix.Case("prove", "a", "", finds), done)
    assert outcome == expected
    assert bool(why) == (outcome != "right")


@pytest.mark.parametrize(
    ("finds", "status", "output", "expected"),
    [
        (None, 0, "1 passed", "right"), (None, 0, "1 skipped", "not checked"), (None, 2, "ImportError: a", "crash"),
        ("rows", 1, "E   AssertionError: the same rows", "right"), ("rows", 0, "1 passed", "wrong"),
        (None, 1, "E   zero_study.testing.CouldNotBeChecked: a", "not checked"),
    ],
)  # fmt: skip
def test_an_assertion_is_judged_by_what_pytest_says(finds, status, output, expected):
    assert matrix.answer(matrix.Case("testing", "a", "", finds), matrix.Run(status, output, ""))[0] == expected


def test_every_environment_of_the_record_has_every_example():
    environments = json.loads((launching.ROOT / "reports" / "releases_matrix.json").read_text())
    cases = [(case.command, case.example) for case in matrix.CASES]
    for environment in environments:
        assert [(each["command"], each["example"]) for each in environment["results"]] == cases
        assert {each["answer"] for each in environment["results"]} <= {"right", "wrong", "not checked", "crash"}
