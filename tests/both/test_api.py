"""Test the Python functions: each returns what its command prints with --json."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import launching
import pytest
from refusing import refusal

from zero_study import api, cli
from zero_study.answers import models

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
ZERO3 = EXAMPLES / "my_zero3.json"
LOCKS = (EXAMPLES / "old.lock", EXAMPLES / "new.lock")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda: api.doctor(ZERO3), ["doctor", str(ZERO3)]),
        (lambda: api.doctor(ZERO3, release="deepspeed==0.18.2"), ["doctor", "--for", "deepspeed==0.18.2", str(ZERO3)]),
        (lambda: api.upgrade(*LOCKS, script=EXAMPLES / "train_a.py"),
         ["upgrade", "--script", str(EXAMPLES / "train_a.py"), *map(str, LOCKS)]),
        (lambda: api.why(EXAMPLES / "oom.log"), ["why", str(EXAMPLES / "oom.log")]),
        (lambda: api.claims(search="offload"), ["claims", "--search", "offload"]),
        (lambda: api.check(ZERO3), ["check", str(ZERO3)]),
        (lambda: api.advise("gpt2", gpu="l4", gpus=2, loss_kernel="chunked", activation_checkpointing=None),
         ["advise", "--model", "gpt2", "--gpu", "l4", "--gpus", "2", "--loss-kernel", "chunked"]),
    ],
    ids=["doctor", "release", "upgrade", "why", "claims", "check", "advise"],
)  # fmt: skip
def test_a_function_returns_what_the_command_prints(answer, words, capfd):
    given = answer()
    assert capfd.readouterr().out == ""
    cli.run([words[0], "--json", *words[1:]])
    assert given == models.validated(json.loads(capfd.readouterr().out))


def test_a_finding_has_its_fields():
    found = {finding.place.key: finding for finding in api.doctor(ZERO3).findings}
    misspelt = found["gradient_cliping"]
    assert (misspelt.id, misspelt.severity, misspelt.place.line) == ("doctor/ignored-key", "warning", 4)


def test_what_a_command_refuses_raises_its_message(tmp_path):
    assert "no-such-gpu" in refusal(api.advise, "gpt2", gpu="no-such-gpu", gpus=1)
    assert "--no-such-option" in refusal(api.advise, "gpt2", no_such_option=1)
    assert "does not exist" in refusal(api.prove, tmp_path / "missing.py")


def test_every_function_is_documented_and_every_command_that_answers_has_one():
    functions = {name for name in api.__all__ if name != "Refusal"}
    assert all(inspect.getdoc(getattr(api, name)) for name in functions)
    commands = {name.replace("-", "_").removesuffix("_log") for name in (*functions, "import")}
    without = {"compare", "conformance", "exact", "plan", "predict"}  # of this project's own runs and releases
    assert {name.replace("-", "_") for name in models.ANSWERS} - commands == without


@pytest.mark.launches
@pytest.mark.slow
def test_a_script_is_proved(capfd):
    launching.use()
    answer = api.prove(EXAMPLES / "train_wrong.py", ranks=2)
    assert answer.verdict == "found"
    assert "prove/same-batch" in {finding.id for finding in answer.findings}
