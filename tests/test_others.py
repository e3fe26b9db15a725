"""Rows that others published, and their page, on which nothing is called measured here."""

from __future__ import annotations

import re

from reported import read as text_of

from study.planner import published_rows
from study.report import others_page as page


def test_rows_are_of_their_family_and_in_order():
    rows = published_rows.runs("InternEvo")
    assert len(rows) == 20
    counts = [row.num_gpus for row in rows if published_rows.engine_words(row.case) == "ZeRO-1"]
    assert counts == sorted(counts)
    assert all(0 < row.share_of_peak < 1 for row in rows)


def test_every_row_says_what_can_be_checked():
    text = text_of(page.checked())
    for family in page.FAMILIES:
        for row in published_rows.runs(family):
            assert row.case.name in text
    assert len(re.findall(" no ", text)) == 6  # said not to fit, though it trained
    assert len(re.findall("<tr><th scope=.row.>", page.offloaded())) >= 6
    for draw in (page.data_parallel, page.states_split):
        assert ">predicted<" in draw().svg
