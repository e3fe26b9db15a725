"""How values and tables read."""

from __future__ import annotations

import pytest

from study import formatting
from study.engines.strategy_names import in_order


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formatting.gib(3 << 29), "1.50"),
        (formatting.gib(3 << 29, digits=1), "1.5"),
        (formatting.gib(None), ""),
        (formatting.bytes_text(3 << 29), "1.5 GiB"),
        (formatting.bytes_text(700 << 20), "700 MiB"),
        (formatting.bytes_text(1 << 9), "0.5 KiB"),
        (formatting.three_digits(1234.5), "1,234"),
        (formatting.three_digits(-0.5), "\N{MINUS SIGN}0.5"),
        (formatting.three_digits(2.1e-6), "2.1e-6"),
        (formatting.signed_percent(0.01), "+1.000"),
        (formatting.signed_percent(-1e-6), "-1e-4"),
        (formatting.percent(0.5), "50 %"),
        (formatting.percent(1e-6), "1e-4 %"),
        (formatting.powers(0), "0"),
        (formatting.difference(2.1e-6), "2.1e-06"),
        (formatting.difference(None), "unknown"),
        (formatting.processes(1), "1 process"),
        (formatting.processes(2), "2 processes"),
        (formatting.shown("a | b\n<c>\N{RIGHT-TO-LEFT OVERRIDE}"), r"a \| b &lt;c>\\u202e"),
    ],
)
def test_values_read(text, expected):
    assert text == expected


def test_strategies_are_ordered_from_nothing_sharded_to_everything_offloaded():
    names = ["mine", "fsdp2", "zero3_nvme_offload", "zero3_cpu_offload", "zero3", "ddp", "ddp", "single"]
    assert in_order(names) == [*names[:-3:-1], *names[4:0:-1], "mine"]


def test_markdown_table():
    assert formatting.markdown(["a", "b"], [["x", 1]]) == ["| a | b |", "| --- | ---: |", "| x | 1 |"]
    assert formatting.markdown(["a", "b"], [["x", "y"]], num_texts=2)[1] == "| --- | --- |"
