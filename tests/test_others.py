"""The page of what others measured: never called measured here, and each sentence follows from the rows."""

from __future__ import annotations

import re

import pytest
from reported import read as text_of

from study.planner import published_rows
from study.report.pages import others as page


def test_rows_are_of_their_family_and_in_order():
    rows = published_rows.runs("InternEvo")
    assert len(rows) == 20
    counts = [row.num_gpus for row in rows if published_rows.engine_words(row.case) == "ZeRO-1"]
    assert counts == sorted(counts)
    assert all(0 < row.share_of_peak < 1 for row in rows)
    assert published_rows.runs("nobody") == []


def test_precision_classes_are_told_apart():
    mistral = [row for row in published_rows.runs("fms-acceleration liger") if row.case.shape.name == "mistral-7b"]
    assert {published_rows.state_bytes(row.case) for row in mistral} == {8, 16}


@pytest.mark.parametrize("draw", [page.data_parallel, page.states_split, page.sharded_memory])
def test_figures_say_whose_figures_they_are(draw):
    figure = draw()
    assert figure.alt.startswith("Measured by others")
    assert "measured by others" in figure.caption
    assert "redicted" in figure.caption


def test_the_opening_follows_from_the_rows():
    rows = {
        row.num_gpus: row
        for row in published_rows.runs("InternEvo")
        if published_rows.engine_words(row.case) == "ZeRO-1"
    }
    share = 100 * rows[1024].published_speed / 4062  # of its printed rate on 8
    said = text_of(page.opening()).replace("\N{NO-BREAK SPACE}", " ")
    assert f"each of 1024 kept {share:.0f} %" in said
    assert "each of 128 kept 95 %" in said
    assert "on 400 Gbit/s between nodes" in said
    assert "2.3 to 10.4 times as long" in said


def test_every_row_says_what_can_be_checked():
    text = text_of(page.checked())
    assert "16 (16-bit compute, fp32 masters)" in text
    assert "8 (all bf16)" in text
    assert re.search(r"All \d\d rows", text)
    assert text.count("no it trained") == 6
    assert text.count("sequences binned by length") == 2


def test_offload_is_held_against_states_on_the_gpu_of_the_same_source():
    text = text_of(page.offloaded())
    assert text.count("on the host") >= 6


def test_what_theory_leaves_out_of_a_wide_split_follows_from_the_rows():
    text = text_of(page.split_over_all()).replace("\N{NO-BREAK SPACE}", " ")
    whole, within = ({row.num_gpus: row for row in page._split()[name]} for name in ("ZeRO-1", "ZeRO-1 within nodes"))
    assert f"{whole[512].seconds - within[512].seconds:.1f} s on 512" in text
    assert max(whole) == 1024
    short = 1 - whole[1024].predicted.total / whole[1024].seconds
    assert f"{100 * short:.0f} % on 1,024" in text
    assert short > 0.2  # or there is nothing to say
    assert "nobody printed" in text  # what one message costs
