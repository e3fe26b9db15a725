"""The type of verdict that every command returns, and that no command forgets it."""

from __future__ import annotations

import inspect

import pytest

from study import cli
from study.verdict import Checked, Inputs, NotChecked, Verdict

TENSORS = Checked(20, "tensor", "compared with the file that transformers loads")


def of_inputs(*verdicts: Verdict) -> Verdict:
    inputs = Inputs(*(f"file {number}" for number in range(len(verdicts))))
    for number, verdict in enumerate(verdicts):
        inputs.end(f"file {number}", verdict)
    return inputs.verdict()


def test_an_input_without_a_verdict_is_a_fault_of_the_command():
    inputs = Inputs("a.json", "b.json")
    inputs.end("a.json", Verdict.of(0, [TENSORS]))
    with pytest.raises(RuntimeError, match=r"b\.json"):
        inputs.verdict()


@pytest.mark.parametrize(
    ("verdict", "result", "status"),
    [
        (Verdict.of(0, [TENSORS]), "sound", 0),
        (Verdict.of(2, [TENSORS]), "found", 1),
        (Verdict.of(2), "found", 1),
        (Verdict.of(0), "unknown", 3),
        (Verdict.of(0, [Checked(0, "tensor")]), "unknown", 3),
        (Verdict.of(0, [TENSORS], [NotChecked("the tokenizer", "there is none")]), "sound", 0),
        (Verdict.of(0, [TENSORS], [NotChecked("the values", "the other file is damaged", True)]), "unknown", 3),
        (of_inputs(Verdict.of(0, [TENSORS]), Verdict.of(0)), "unknown", 3),
        (of_inputs(Verdict.of(0, [TENSORS]), Verdict.of(0, [], [NotChecked("the values")])), "unknown", 3),
        (of_inputs(Verdict.of(0, [TENSORS]), Verdict.of(0, [TENSORS])), "sound", 0),
        (of_inputs(Verdict.of(0, [TENSORS]), Verdict.of(1, [TENSORS])), "found", 1),
        (of_inputs(), "unknown", 3),
    ],
)
def test_nothing_compared_is_never_sound(verdict, result, status):
    assert (verdict.result, verdict.status) == (result, status)
    assert verdict.content()["verdict"] == result


def test_a_verdict_says_what_was_compared_and_what_was_not():
    verdict = Verdict.of(
        0, [TENSORS, Checked(1, "state")], [NotChecked("names", "no model"), NotChecked("names", "no model")]
    )
    assert verdict.coverage() == (
        "20 tensors compared with the file that transformers loads, 1 state; 1 check could not be made"
    )
    assert Verdict.of(0).coverage() == "nothing was compared"


# Each command either ends with a verdict or does not check anything. `prove` starts a script as a process of its own,
# which has its own exit status; its verdict is in proof.json.
WITH_VERDICT = {
    "advise", "check", "claims", "compare", "conformance", "diff", "doctor", "dry-run", "import", "merge", "pack",
    "saved", "upgrade", "why",
}  # fmt: skip
WITHOUT_VERDICT = {"export", "job", "plan", "predict", "prove", "report", "run", "skills", "train"}


def test_every_command_is_known_to_have_a_verdict_or_not():
    assert set(cli.zero_study.commands) == WITH_VERDICT | WITHOUT_VERDICT


@pytest.mark.parametrize("name", sorted(WITH_VERDICT))
def test_a_command_that_checks_something_returns_a_verdict(name):
    command = cli.zero_study.commands[name]
    assert command.callback is not None
    assert "Verdict" in str(inspect.signature(command.callback).return_annotation)
