"""The sample of sentences for a reader: what counts as a sentence, and that a seed decides the choice."""

import re

import pytest
from click.testing import CliRunner

from tools.measure import sample_sentences


def test_code_comments_and_quotations_of_sources_are_no_sentences() -> None:
    page = (
        "# A heading is not a sentence of the page\n\n"
        "The first sentence has five words. Too short.\n\n```sh\nthis is code and no prose\n```\n"
        "<!-- a comment that nobody can read -->\n"
        "- A list item with [a link to read](page.md) counts.\n"
        "| cell one has five words | quoted from a source text, line 12 |\n"
    )
    assert list(sample_sentences.of_markdown(page)) == [
        "The first sentence has five words.",
        "A list item with a link to read counts.",
        "cell one has five words",
    ]


def test_a_seed_draws_the_same_sentences(monkeypatch) -> None:
    kinds = {"README": sample_sentences.KINDS["README"], "questions": sample_sentences.KINDS["questions"]}
    monkeypatch.setattr(sample_sentences, "KINDS", kinds)
    first, second, other = (
        CliRunner().invoke(sample_sentences.main, ["--seed", seed, "--number", "10"]).output for seed in "112"
    )
    assert first == second != other
    assert len(re.findall(r"^- \[", first, re.MULTILINE)) == 10


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("verdicts", "hf-analysis.memory.peak.zero0.least", "We predict a peak of 145 GiB"),
        ("corrections", "study/claims/corrections.yaml", "states a maximum of 2,048 tokens"),
        ("faults", "zero_study/upgrade/faults.json", "safe_set_local_grad"),
        ("keys", "zero_study/engines/keys/keys.yaml", "gradient_clipping"),
        ("rules", "zero_study/why/rules/memory.yaml", "memory"),
        ("changelog", "CHANGELOG.md", "zero-study"),
    ],
)
def test_each_kind_has_its_own_text(kind, source, words) -> None:
    sentences = list(sample_sentences.KINDS[kind]())
    assert any(place == source and words in sentence for place, sentence in sentences)


def test_every_kind_gets_an_equal_share(monkeypatch) -> None:
    pages = {kind: (lambda kind=kind: iter((kind, f"sentence {n} of it") for n in range(9))) for kind in "abc"}
    monkeypatch.setattr(sample_sentences, "KINDS", pages)
    output = CliRunner().invoke(sample_sentences.main, ["--seed", "1", "--number", "9"]).output
    assert [len(re.findall(rf"^- \[{kind}\]", output, re.MULTILINE)) for kind in "abc"] == [3, 3, 3]
