"""The planner's page: every number is a prediction's, and what does not fit says so."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ElementTree

import pytest
from reported import read as text_of

from study import planner
from study.planner import choose, published_rows
from study.report import figures
from study.report import planner_page as page
from study.theory import model_states


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


def test_where_nothing_fits_it_is_said():
    nothing = planner.advise("llama-2-70b", asked("t4", 1, batch=1))
    assert "Nothing to recommend. none fits; " in text_of(page.asked(nothing))
    assert "<td" not in page.front(nothing)
    rows = rows_of(page.memory(nothing))
    assert rows.pop("strategy")[1] == "free"
    assert {" ".join(cells[1].split()[:2]) for cells in rows.values()} == {"short of", "too little"}


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


def test_speed_table_gives_none_to_what_does_not_fit(advice):
    rows = rows_of(page.speed(advice))
    head = rows.pop("strategy")
    for option in advice.options:
        cells = dict(zip(head, rows[option.strategy.name], strict=True))
        if option.prediction.fits:
            total = float(cells["seconds per step"].split()[0])
            assert total == pytest.approx(option.prediction.step.total, rel=0.01)
            assert cells["tokens/s per GPU"].replace(",", "") == f"{option.prediction.tokens_per_second_per_gpu:.0f}"
        else:
            assert cells["seconds per step"] == "does not fit"
            assert cells["tokens/s per GPU"] == cells["$ per billion tokens"] == ""


def test_front_has_what_nothing_beats(advice):
    front = choose.pareto(choose.choices(advice))
    assert list(rows_of(page.front(advice)))[1:] == list(dict.fromkeys(choice.strategy for choice in reversed(front)))


def test_paper_and_engine_differ_by_what_is_named(advice):
    rows = rows_of(page.differences(advice))
    option = next(option for option in advice.options if option.strategy.name == "ddp")
    paper = model_states.paper_bytes(option.prediction.engine, advice.shape.num_params, "stepping").total
    by_paper, held, difference, why = rows["ddp"]
    assert float(by_paper) == pytest.approx(paper / 2**30, abs=0.05)
    assert float(held) - float(by_paper) == pytest.approx(float(difference), abs=0.11)
    assert why == f"ddp-buckets {difference}"
    assert "reduce-bucket" in rows["zero3"][-1]
    explained = text_of(page.differences(advice))
    assert "ddp-buckets. DistributedDataParallel keeps flat buckets" in explained
    assert all(
        name.split()[0] in explained for cells in rows.values() for name in re.findall(r"[a-z0-9]+-[a-z-]+", cells[-1])
    )


def test_the_form_asks_what_was_answered_beforehand():
    shown = page.form()
    assert shown.count("<select") == 6
    assert shown.count(" selected>") == 6


AXES = {
    "memory_by_part": ["predicted memory of a GPU, GiB", "to give", "optimizer states", "allocator's slack"],
    "memory_by_gpus": ["GPUs (axis logarithmic)", "predicted memory of a GPU, GiB", "fsdp2_no_reshard"],
}


@pytest.mark.parametrize("kind", AXES)
def test_figure_is_whole_and_names_its_axes(advice, kind):
    figure = getattr(figures, kind)(advice)
    root = ElementTree.fromstring(figure.svg)
    text = "\n".join("".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text"))
    assert all(word in text for word in AXES[kind]), text
    assert "redicted" in figure.title
    other = planner.advise("gpt-j-6b", asked("a100-40gb", batch=32))
    assert getattr(figures, kind)(other).name != figure.name


def test_errors_stand_beside_rules_of_thumb_and_the_worst_is_named(found):
    shown = page.errors(found)
    assert {"planner", "constant share of peak", "line per GPU"} <= set(rows_of(shown))
    text = text_of(shown)
    for row in found.content["errors"]:
        if row["predictor"] == "planner":
            assert row["worst_case"] in text


def test_intervals_stand_with_how_often_they_held(found):
    text = text_of(page.intervals(found))
    for entry in found.content["intervals"]:
        assert f"{entry['inside']} of {entry['predictions']} {entry['held']} of {entry['tried']}" in text


def test_published_numbers_stand_beside_predicted(found):
    shown = page.cases(found)
    assert shown.count("<em>") == len(found.content["cases"])
    assert "A800 is an A100-80GB with NVLink at 400 GB/s" in text_of(shown)
    rows = rows_of(shown)
    name = next(name for name in rows if name.startswith("qwen2.5-3b, 2 x a100-40gb, zero3 offload optimizer"))
    assert rows[name][2] == "2.38"


def test_published_memory_stands_beside_estimators():
    text = text_of(page.memory_cases())
    for estimator in ("planner", "DeepSpeed's estimator", "accelerate's estimator"):
        assert estimator in text
    assert "mistral-7b, 1 x a100-80gb" in text
