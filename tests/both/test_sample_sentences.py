"""The sample of sentences for a reader: what counts as a sentence, and that a seed decides the choice."""

import re

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
