"""Test the list of numbers that may disagree, and that quantities which several pages state have one value."""

from __future__ import annotations

from pathlib import Path

import number_pairs
import pytest
from launching import ROOT

pytestmark = pytest.mark.pages

SPEED = {"speed": r"(\d+\.\d+) times as fast"}


def page(folder: Path, text: str, name: str = "page.md") -> Path:
    (path := folder / name).write_text(text, encoding="utf-8")
    return path


def test_pages_state_one_value_for_one_quantity(capsys):
    status = number_pairs.check([*number_pairs.pages(), ROOT / "Makefile", ROOT / "AGENTS.md"], number_pairs.QUANTITIES)
    assert status == 0, capsys.readouterr().out


def test_two_values_for_one_quantity_are_found(tmp_path, capsys):
    pages = [page(tmp_path, "It is **1.50** times as fast.", "a.md"), page(tmp_path, "1.46 times as fast", "b.md")]
    assert number_pairs.check(pages, SPEED) == 1
    printed = capsys.readouterr().out
    assert "1.50" in printed
    assert "1.46" in printed
    assert number_pairs.check(pages[:1], SPEED) == 0


def test_a_quantity_that_no_page_states_was_not_compared(tmp_path):
    assert number_pairs.check([page(tmp_path, "Nothing is said.")], SPEED) == 3


def test_numbers_have_units_and_names_are_no_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(number_pairs, "ROOT", tmp_path)
    path = page(
        tmp_path, "ZeRO-3 of DeepSpeed 0.19.8 needs 34 GiB.\n\n| model | time |\n| --- | --- |\n| GPT-2 | 1.2 s |\n"
    )
    found = [(each.value, each.unit, each.is_prose) for each in number_pairs.numbers(path)]
    assert found == [("34", "GiB", True), ("1.2", "s", False)]


def test_similar_sentences_with_other_values_are_a_pair(tmp_path, monkeypatch):
    monkeypatch.setattr(number_pairs, "ROOT", tmp_path)
    found = [
        each
        for name, text in {
            "a.md": "The tuned strategy takes 1.55 times as long.\n\nA checkpoint has 5 MB.",
            "b.md": "The tuned strategy takes 1.46 times as long.\n\nThe disk has 9 MB.",
        }.items()
        for each in number_pairs.numbers(page(tmp_path, text, name))
    ]
    (_, one, other), *_ = number_pairs.pairs(found, 1)
    assert {one.value, other.value} == {"1.55", "1.46"}
