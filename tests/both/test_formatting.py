"""How values and tables read."""

from __future__ import annotations

import pytest

from zero_study import terminal
from zero_study.engines.strategy_names import in_order


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (terminal.gib(3 << 29), "1.50"),
        (terminal.gib(3 << 29, digits=1), "1.5"),
        (terminal.gib(None), ""),
        (terminal.bytes_text(3 << 29), "1.5 GiB"),
        (terminal.bytes_text(700 << 20), "700 MiB"),
        (terminal.bytes_text(1 << 9), "0.5 KiB"),
        (terminal.significant(1234.5), "1,234"),
        (terminal.significant(-0.5), "\N{MINUS SIGN}0.5"),
        (terminal.significant(2.1e-6), "2.1e-6"),
        (terminal.significant(12.34, 2), "12"),
        (terminal.significant(1234.5, 2), "1,234"),
        (terminal.signed_percent(0.01), "+1.000"),
        (terminal.signed_percent(-1e-6), "-1e-4"),
        (terminal.percent(0.5), "50 %"),
        (terminal.percent(1e-6), "1e-4 %"),
        (terminal.percent(0.01234, 3), "1.23 %"),
        (terminal.whole_percent(0.0156), "2 %"),
        (terminal.scientific(2.14e-6, 1), "2e-6"),
        (terminal.names(["a", "b"]), "a, b"),
        (terminal.names(["a", "b", "c", "d", "e"], 2), "a, b and 3 more"),
        (terminal.scientific(0), "0"),
        (terminal.scientific(float("nan"), 1), "nan"),
        (terminal.difference(2.1e-6), "2.1e-06"),
        (terminal.difference(None), "unknown"),
        (terminal.count(1, "process", "processes"), "1 process"),
        (terminal.count(2, "process", "processes"), "2 processes"),
        (terminal.escape_markdown("a | b\n<c>\N{RIGHT-TO-LEFT OVERRIDE}"), r"a \| b &lt;c>\\u202e"),
    ],
)
def test_values_read(text, expected):
    assert text == expected


def test_strategies_are_ordered_from_nothing_sharded_to_everything_offloaded():
    names = ["mine", "fsdp2", "zero3_nvme_offload", "zero3_cpu_offload", "zero3", "ddp", "ddp", "single"]
    assert in_order(names) == [*names[:-3:-1], *names[4:0:-1], "mine"]


def test_markdown_table():
    assert terminal.markdown(["a", "b"], [["x", 1]]) == ["| a | b |", "| --- | ---: |", "| x | 1 |"]
    assert terminal.markdown(["a", "b"], [["x", "y"]], num_texts=2)[1] == "| --- | --- |"


def test_table_in_a_terminal():
    head, rows = ["name", "ranks", "outcome"], [["zero2", 16, "out of\nmemory"], ["ddp", 2, "ok"]]
    assert terminal.table(head, rows, 80, has_ruler=True) == [
        "name   ranks  outcome",
        "-----  -----  -------",
        "zero2     16  out of",
        "              memory",
        "ddp        2  ok",
    ]
    assert terminal.table(head[:2], [row[:2] for row in rows], 80, sides="><")[1:] == ["zero2  16", "  ddp  2"]
