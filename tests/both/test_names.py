"""Names say what a value is: few contain a word that could stand for any value."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILLERS = {
    "one", "ones", "other", "others", "found", "told", "said", "asked", "held", "each", "both", "seen", "given",
    "taken", "kept", "left", "known", "shown", "made", "done", "got", "rest", "thing", "things", "what", "where",
    "which", "who", "whom", "how", "why", "when", "all", "any", "some", "same", "such", "this", "that", "these",
    "those", "it", "them", "they", "here", "there", "beside", "apart", "away", "wanted", "named", "called", "read",
    "written", "come", "comes", "gone", "goes", "stands", "begins", "begun", "says", "tells", "asks", "holds",
    "holding", "finds", "takes", "gives",
}  # fmt: skip
# Percent of assigned names and parameters; accelerate has 1.0 and papermill 0.6. The rest are fields of records and
# of public functions, whose names are promised, and names that are plain as they are (held_out, steps_done).
MOST = {"study": 3.0, "zero_study": 3.2, "tools": 5.0, "tests": 7.0}


def assigned_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def has_filler(name: str) -> bool:
    return not FILLERS.isdisjoint(name.lower().strip("_").split("_"))


@pytest.mark.parametrize("folder", MOST)
def test_few_names_could_stand_for_any_value(folder):
    names = [name for path in (ROOT / folder).rglob("*.py") for name in assigned_names(ast.parse(path.read_text()))]
    assert len(names) > 1000
    assert 100 * sum(map(has_filler, names)) / len(names) < MOST[folder]


def test_a_word_counts_wherever_it_stands_in_a_name():
    source = "found = 1\nfor other_run in runs:\n    def read(asked): ...\nprocesses = founded = 2"
    assert [name for name in assigned_names(ast.parse(source)) if has_filler(name)] == ["found", "other_run", "asked"]
