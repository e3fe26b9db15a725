"""Snippets that are executed: whether a result is of its rule, and that the committed ones are real."""

from __future__ import annotations

import json
import re
from pathlib import Path

import launching
import pytest

from study.claims import ledger
from study.claims.rules import by_execution
from study.claims.rules.by_execution import Execution
from zero_study import terminal

RULE = {
    "type": "execution",
    "through": "deepspeed-json",
    "snippet": '{"zero_optimization": {"stage": 3}}',
    "wants": {"engine.zero_optimization_stage()": 3},
}
# All four ways to give lines, and all three outcomes; a few seconds each.
REAL = {
    "zero3-blog.pitfall.increase-pin-memory": ("deepspeed-json", "rejected"),
    "stages-analysis.configuration.stage2-accepted": ("deepspeed-json", "accepted"),
    "stages-analysis.init-and-save.init-flag-precision": ("accelerate-yaml", "ignored"),
    "a100-replication.appendix.deepspeed-settings.at-construction": ("training-arguments", "rejected"),
    "a100-replication.appendix.settings-reach-engine": ("python", "ignored"),
    "stages-analysis.precision.bf16-exponent": ("python", "accepted"),
}


def test_any_change_of_a_rule_changes_its_digest():
    changes = [{"snippet": '{"zero_optimization": {"stage": 2}}'}, {"wants": {}}, {"processes": 2}, {"measures": "1"}]
    changes += [{"wants": {"engine.zero_optimization_stage()": 2}}, {"through": "python"}]
    digests = {Execution.model_validate({**RULE, **change}).sha256 for change in [{}, *changes]}
    assert len(digests) == 1 + len(changes)


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


@pytest.mark.nightly
@pytest.mark.launches
def test_the_committed_results_come_again(tmp_path):
    """Through the command, with all four ways and all three outcomes."""
    path = tmp_path / "snippets.json"
    requested = [word for name in REAL for word in ("--claim", name)]
    completed = launching.attempt(["python", "-m", "study.claims.snippets", "--output", path, *requested])
    assert completed.returncode == 0, completed.stderr
    result, committed = by_execution.read(path).results, by_execution.read().results
    rules = {claim.id: claim.rule for source in ledger.read() for claim in source.claims}
    for name, (through, outcome) in REAL.items():
        assert (rules[name].through, result[name].outcome) == (through, outcome)
        assert result[name] == committed[name]


@pytest.mark.nightly
@pytest.mark.launches
def test_the_command_refuses_what_it_cannot_execute(tmp_path):
    def refused(*words: str | Path) -> str:
        completed = launching.attempt(["python", "-m", "study.claims.snippets", *words])
        assert (completed.returncode, completed.stdout, completed.stderr.count("zero-study: ")) == (2, "", 1)
        return terminal.last_error(completed.stderr)

    name = "papers.none.such"
    assert f"--claim {name}: this claim has no code lines" in refused("--claim", name)
    content = json.loads(by_execution.RESULTS.read_text())
    content["versions"]["deepspeed"] = "0.0"
    path = tmp_path / "snippets.json"
    path.write_text(json.dumps(content))
    assert "these versions are not installed here" in refused("--output", path, "--claim", next(iter(REAL)))
