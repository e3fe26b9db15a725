"""Is the house as light as it is to be? Lines of Python by folder, and words that somebody has written."""

from __future__ import annotations

import re

import pytest
from launching import ROOT

# Of Python, at most: 30,000 of study/, and what its engines have been asked since (900 lines, 1,200 for `diff`, and
# 1,200 for `dry-run`).
LINES = {"study": 33_300, "tools": 4_000, "tests": 18_000}
WORDS = 15_000  # of README and docs/, at most, without what is fenced and what is generated
GUIDE = 1_200  # words of one guide, at most

FENCED = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!-- (\w+)(?:: [^>]*)? -->\n.*?<!-- /\1 -->", re.DOTALL)


def num_lines(folder: str) -> int:
    """Lines of all Python files below a folder of the project."""
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def written(text: str) -> list[str]:
    """The words of a Markdown text that are neither fenced nor between the two comments of a generated block."""
    return FENCED.sub("", GENERATED.sub("", text)).split()


@pytest.mark.parametrize(("folder", "most"), LINES.items())
def test_lines_of_python(folder, most):
    assert 0 < num_lines(folder) <= most, f"{folder}/ has {num_lines(folder):,} lines"


def test_words_of_readme_and_docs():
    words = {
        path: len(written(path.read_text())) for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    }
    assert max(words.values()) <= GUIDE
    assert sum(words.values()) <= WORDS, "; ".join(f"{path.relative_to(ROOT)} {num:,}" for path, num in words.items())


def test_only_what_is_written_is_counted():
    text = "one <!-- answer: a b -->\nnot this\n<!-- /answer --> two\n```sh\nnot this\n```\nthree `four`\n"
    assert written(text) == ["one", "two", "three", "`four`"]
