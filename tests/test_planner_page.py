"""The planner's page: every number is a prediction's, and what does not fit says so."""

from __future__ import annotations

import html
import re

import pytest
from reported import read as text_of

from study import planner
from study.planner import choose, published_rows
from study.report import planner_page as page


def asked(gpu: str = "a100-80gb", num_gpus: int = 8, batch: int = 16, length: int = 1024, **more) -> planner.Asked:
    return planner.Asked(gpu=gpu, num_gpus=num_gpus, sequence_length=length, global_batch_size=batch, **more)


@pytest.fixture(scope="module")
def advice():
    """A model of which some strategies fit and others do not."""
    return planner.advise("gpt-j-6b", asked("a100-40gb"))


@pytest.fixture(scope="module")
def found():
    return published_rows.load()


def rows_of(piece: str) -> dict[str, list[str]]:
    """The cells of each row, by its heading."""
    found = [
        [
            " ".join(html.unescape(re.sub("<[^>]*>", " ", cell)).split())
            for cell in re.findall(r"<t[hd].*?</t[hd]>", row)
        ]
        for row in re.findall("<tr>.*?</tr>", piece)
    ]
    return {cells[0]: cells[1:] for cells in found}


def test_what_is_asked_and_recommended_comes_first(advice):
    text = text_of(page.asked(advice))
    assert "gpt-j-6b, 6,050,882,784 parameters" in text
    assert "16 sequences of 1,024 tokens per step" in text
    assert advice.reason in text
    longer = planner.advise("gpt2", asked(length=2048))
    assert "Note. gpt2 has 1,024 positions" in text_of(page.asked(longer))


def test_memory_table_has_what_is_predicted(advice):
    rows = rows_of(page.memory(advice))
    head = rows.pop("strategy")
    assert list(rows) == [option.strategy.name for option in advice.options]
    for option in advice.options:
        cells = dict(zip(head, rows[option.strategy.name], strict=True))
        one = option.prediction
        assert cells["needed"] == f"{one.needed_bytes / 2**30:.1f}"
        assert float(cells["parameters"] or 0) == pytest.approx(one.peak.parts["parameters"] / 2**30, abs=0.051)
        assert cells["free"] == (
            f"{one.free_bytes / 2**30:.1f}" if one.fits else f"short of {-one.free_bytes / 2**30:.1f}"
        )
    assert {bool(option.prediction.fits) for option in advice.options} == {True, False}


def test_front_has_what_nothing_beats(advice):
    front = choose.pareto(choose.choices(advice))
    assert list(rows_of(page.front(advice)))[1:] == list(dict.fromkeys(choice.strategy for choice in reversed(front)))
