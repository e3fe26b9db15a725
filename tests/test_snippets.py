"""Snippets that are executed: what the ledger refuses, what a result decides, and that the committed ones are real."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import launching
import pytest
import yaml
from test_claims import SOURCE

from study.claims import ledger, verdicts
from study.claims.rules import by_execution
from study.claims.rules.by_execution import Execution, Result, Results

RULE = {
    "type": "execution",
    "through": "deepspeed-json",
    "snippet": '{"zero_optimization": {"stage": 3}}',
    "wants": {"engine.zero_optimization_stage()": 3},
}
ACCEPTED = {"value": "accepted", "unit": "outcome", "tolerance": {"exact": True}}
NAME = "small.speed.ratio"

# All four ways to give lines, and all three outcomes; a few seconds each.
REAL = {
    "zero3-blog.pitfall.increase-pin-memory": ("deepspeed-json", "rejected"),
    "stages-analysis.configuration.stage2-accepted": ("deepspeed-json", "accepted"),
    "stages-analysis.init-and-save.init-flag-precision": ("accelerate-yaml", "ignored"),
    "a100-replication.appendix.deepspeed-settings.at-construction": ("training-arguments", "rejected"),
    "a100-replication.appendix.settings-reach-engine": ("python", "ignored"),
    "stages-analysis.precision.bf16-exponent": ("python", "accepted"),
}


def write(folder: Path, expected=ACCEPTED, **changes) -> Path:
    """Write a ledger of one claim that is executed."""
    source = copy.deepcopy(SOURCE)
    rule = {key: value for key, value in {**RULE, **changes}.items() if value is not None}
    source["claims"][0] |= {"rule": rule, "expected": expected}
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(source))
    return path


@pytest.fixture
def given(monkeypatch):
    """Put results in the place of the committed ones."""

    def put(**results: Result) -> None:
        content = Results(date="2026-01-01", command="", versions={"deepspeed": "1.0"}, results=results)
        monkeypatch.setattr(by_execution, "_committed", lambda: content)

    return put


def result(folder: Path, found=None, message=None, measured=None, outcome=None) -> dict[str, Result]:
    """What came of the one claim of a ledger."""
    rule = ledger.read(folder)[0].claims[0].rule
    found = {} if found is None else found
    word = outcome or by_execution.outcome(rule.wants, found, message)
    return {NAME: Result(rule_sha256=rule.sha256, outcome=word, message=message, found=found, measured=measured)}


def decided(folder: Path) -> verdicts.Verdict:
    return verdicts.decide_all(folder)[NAME]


NUMBER = {"value": 2, "unit": "processes", "tolerance": {"exact": True}}


def test_any_change_of_a_rule_changes_its_digest():
    changes = [{"snippet": '{"zero_optimization": {"stage": 2}}'}, {"wants": {}}, {"processes": 2}, {"measures": "1"}]
    changes += [{"wants": {"engine.zero_optimization_stage()": 2}}, {"through": "python"}]
    digests = {Execution.model_validate({**RULE, **change}).sha256 for change in [{}, *changes]}
    assert len(digests) == 1 + len(changes)
    assert Execution.model_validate(copy.deepcopy(RULE)).sha256 in digests


def test_an_outcome_decides(tmp_path, given):
    write(tmp_path)
    asked = "engine.zero_optimization_stage()"
    for found, message, verdict, facts in (
        ({asked: 3}, None, "works as printed", [f"{asked} is 3"]),
        ({asked: 0}, None, "contradicted by today's engine", [f"{asked} is 0, not 3", "deepspeed 1.0"]),
        ({}, "ValueError: no", "contradicted by today's engine", ["ValueError: no", "deepspeed 1.0"]),
    ):
        given(**result(tmp_path, found, message))
        one = decided(tmp_path)
        assert one.verdict == verdict
        assert all(fact in one.why for fact in facts)
        assert one.evidence == [f"reports/cpu/published/snippets.json: {NAME}: {one.observed.value}"]


def test_what_is_measured_decides(tmp_path, given):
    for value, measured, message, verdict, fact in (
        (2, 2, None, "works as printed", "gives 2"),
        (2, 1, None, "contradicted by today's engine", "gives 1"),
        (False, True, None, "contradicted by today's engine", "says yes"),
        ("gpu", "cpu", None, "contradicted by today's engine", "gives cpu"),
        (True, None, "ValueError: no", "contradicted by today's engine", "ValueError: no"),
    ):
        write(tmp_path, expected={**NUMBER, "value": value}, wants=None, measures="1")
        given(**result(tmp_path, message=message, measured=measured))
        one = decided(tmp_path)
        assert one.verdict == verdict
        assert fact in one.why


# ---------------------------------------------------------------- for real


def test_every_claim_that_is_executed_has_its_result():
    rules = {
        claim.id: claim.rule for source in ledger.read() for claim in source.claims if isinstance(claim.rule, Execution)
    }
    committed = by_execution.read()
    assert set(committed.results) == set(rules)
    assert {one.outcome for one in committed.results.values()} == set(by_execution.OUTCOMES)
    libraries = {"torch", "deepspeed", "accelerate", "transformers", "datasets", "huggingface_hub"}
    assert set(committed.versions) == libraries
    assert not re.search(r"/(work|tmp|home|root)/", by_execution.RESULTS.read_text())


@pytest.mark.slow
@pytest.mark.launches
def test_the_committed_results_come_again(tmp_path):
    """Through the command, with all four ways and all three outcomes."""
    path = tmp_path / "snippets.json"
    asked = [word for name in REAL for word in ("--claim", name)]
    done = launching.attempt(["python", "-m", "study.claims.snippets", "--output", path, *asked])
    assert done.returncode == 0, done.stderr
    found, committed = by_execution.read(path).results, by_execution.read().results
    rules = {claim.id: claim.rule for source in ledger.read() for claim in source.claims}
    for name, (through, outcome) in REAL.items():
        assert (rules[name].through, found[name].outcome) == (through, outcome)
        assert found[name] == committed[name]


@pytest.mark.slow
@pytest.mark.launches
def test_the_command_refuses_what_it_cannot_execute(tmp_path):
    def refused(*words: str | Path) -> str:
        done = launching.attempt(["python", "-m", "study.claims.snippets", *words])
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        return done.stderr

    name = "papers.none.such"
    assert f"--claim {name}: is not executed" in refused("--claim", name)
    content = json.loads(by_execution.RESULTS.read_text())
    content["versions"]["deepspeed"] = "0.0"
    path = tmp_path / "snippets.json"
    path.write_text(json.dumps(content))
    assert "versions: these are not installed here" in refused("--output", path, "--claim", next(iter(REAL)))
