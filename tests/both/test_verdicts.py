"""The type of verdict that every command returns, and that no command forgets it."""

from __future__ import annotations

import inspect
import os
import shutil
from pathlib import Path

import pytest

from zero_study import cli
from zero_study.errors import Refusal
from zero_study.verdict import MEANINGS, Checked, Inputs, NotChecked, Verdict

ROOT = Path(__file__).resolve().parents[2]
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
    entries = [Checked(0, "state"), Checked(2, "entry", plural="entries")]
    missing = [NotChecked("names"), NotChecked("types", "no model", True)]
    verdict = Verdict.of(0, entries, missing)
    assert verdict.coverage() == "2 entries; 2 checks could not be made"
    assert [str(each) for each in verdict.not_checked] == ["names", "types (no model)"]
    assert verdict.content() == {
        "verdict": "unknown", "exit_status": 3,
        "checked": [{"number": 0, "what": "0 states"}, {"number": 2, "what": "2 entries"}],
        "could_not_check": [
            {"what": "names", "why": "", "requested": False}, {"what": "types", "why": "no model", "requested": True},
        ],
    }  # fmt: skip


def test_an_input_that_is_skipped_could_not_be_checked():
    inputs = Inputs("a.json", "b.json")
    inputs.end("a.json", Verdict.of(0, [TENSORS]))
    inputs.skip("b.json", "it is damaged")
    assert inputs.verdict() == Verdict.of(0, [TENSORS], [NotChecked("b.json", "it is damaged", True)])
    assert (inputs.verdict().status, [*MEANINGS]) == (3, [0, 1, 2, 3])


def sound(folder: Path) -> None:
    """Write a sound input of each command into a folder."""
    shutil.copy(ROOT / "accelerate_configs" / "ddp.yaml", folder / "a.yaml")
    (folder / "a.txt").write_text("torch==2.13.0\n")
    rows = [{"loss": 2 - step / 100, "grad_norm": 1.0, "learning_rate": 1e-4, "epoch": step / 20} for step in range(20)]
    (folder / "a.log").write_text("".join(f"{row}\n" for row in rows))


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00{torch train_batch_size: [")


UNREADABLE = [
    (["check", "a.yaml"], "bad.yaml"),
    (["check", "a.yaml"], "requirements.txt"),
    (["doctor", "a.yaml"], "bad.yaml"),
    (["upgrade", "a.txt"], "bad.txt"),
    (["import", "--output", "runs", "a.log"], "bad.jsonl"),
]


@pytest.mark.parametrize(
    ("words", "bad", "make"),
    [
        *((*case, make) for case in UNREADABLE for make in (garbage, os.mkfifo)),
        (["why", "a.log"], "bad.log", os.mkfifo),  # every text is a log
    ],
)
def test_an_input_that_cannot_be_read_is_named_and_never_passed_over(words, bad, make, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sound(tmp_path)
    make(tmp_path / bad)
    try:
        status, said = cli.run([*words, bad]), capsys.readouterr().out
    except Refusal as refusal:
        status, said = 2, str(refusal)
    assert status in (2, 3)
    assert bad in said.replace("\n ", "")


def test_options_after_a_strategy_are_not_taken_for_a_script():
    with pytest.raises(Refusal, match="before STRATEGY"):
        cli.run(["dry-run", "ddp", "--world", "2"])


# Each command either ends with a verdict or does not check anything. `prove` starts a script as a process of its own,
# which has its own exit status; its verdict is in proof.json.
WITH_VERDICT = {
    "advise", "check", "claims", "compare", "conformance", "diff", "doctor", "dry-run", "exact", "import", "merge",
    "pack", "saved", "upgrade", "why",
}  # fmt: skip
WITHOUT_VERDICT = {"export", "job", "plan", "predict", "prove", "report", "run", "skills", "train"}


def test_every_command_is_known_to_have_a_verdict_or_not():
    assert set(cli.all_commands()) == WITH_VERDICT | WITHOUT_VERDICT


@pytest.mark.parametrize("name", sorted(WITH_VERDICT))
def test_a_command_that_checks_something_returns_a_verdict(name):
    command = cli.all_commands()[name]
    assert command.callback is not None
    assert "Verdict" in str(inspect.signature(command.callback).return_annotation)
