"""Figures: whole and self-contained SVG in the page's colours, and nothing drawn that was not measured."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pandas as pd
import pytest
from synthetic import write_outcome, write_run

from study.compare import table
from study.compare.expected import with_theory
from study.report import drawing, figures
from study.report.drawing import Figure

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"
STRATEGIES = {"ddp": 0.5, "zero2": 0.45, "zero3": 0.8, "zero3_cpu_offload": 2.0}


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> pd.DataFrame:
    """Three seeds of four strategies on 2 and 4 GPUs, `single` on one; zero1 runs out of memory, fsdp2 is skipped."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        write_run(folder, strategy="single", world_size=1, seed=seed, box="gpu", seconds=1.0, study="s")
        for (name, seconds), world_size in itertools.product(STRATEGIES.items(), (2, 4)):
            for repeat in range(2 if name == "ddp" else 1):
                taken = seconds * (1 + 0.01 * seed + 0.004 * repeat) * 2 / world_size
                write_run(folder, strategy=name, world_size=world_size, seed=seed, repeat=repeat, box="gpu",
                          seconds=taken, loss_shift=0.05 if name == "zero3" else 0.0, study="s")  # fmt: skip
        write_run(folder, strategy="zero1", world_size=2, seed=seed, box="gpu", status="out_of_memory", study="s")
    write_outcome(folder, "skipped", strategy="fsdp2")
    return with_theory(table.read([folder]))


@pytest.fixture(scope="module")
def two(everything) -> pd.DataFrame:
    """The runs on 2 GPUs, and `single`."""
    return everything[(everything["world_size"] == 2) | (everything["strategy"] == "single")]


@pytest.fixture(scope="module")
def drawn(everything, two) -> dict[str, Figure]:
    return {
        "loss_curves": figures.loss_curves(table.steps(two), "ddp", two),
        "peak_memory": figures.peak_memory(two),
        "runtime": figures.runtime(two),
        "pareto": figures.pareto(two),
        "world_sizes": figures.world_sizes(everything),
    }


ALL = ["loss_curves", "peak_memory", "runtime", "pareto", "world_sizes"]
OF_RUNS = ["peak_memory", "runtime", "pareto"]


def colours(figure: Figure, name: str) -> int:
    """How often a strategy's colour is in a figure."""
    return figure.svg.lower().count(drawing.style(name).color.lower())


# ---------------------------------------------------------------- what sits in the page


# ---------------------------------------------------------------- what sits in the page


@pytest.mark.parametrize("kind", ALL)
def test_svg_is_whole_has_ids_of_its_own_and_takes_the_pages_colours(drawn, kind):
    figure = drawn[kind]
    root = ElementTree.fromstring(figure.svg)
    nodes = list(root.iter())
    title = root.find(f"{SVG}title")
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == title.get("id")
    assert title.text == figure.title
    assert "8 x NVIDIA H200" in figure.title
    assert 300 < float(root.get("width")) < 700
    ids = [node.get("id") for node in nodes if node.get("id")]
    assert len(set(ids)) == len(ids)
    assert all(name.startswith(figure.name) for name in ids)
    used = {node.get(f"{XLINK}href", "#")[1:] for node in nodes} | set(re.findall(r"url\(#([^)]*)\)", figure.svg))
    assert used - {""} <= set(ids)
    assert "currentColor" in figure.svg
    assert drawing.INK not in figure.svg
    assert not re.search(r"#000000|#ffffff|: (?:black|white)|<style", figure.svg)
    assert figure.svg.count("font-family") == 1  # the root's, which a page's style sheet overrides
    assert "nan" not in figure.svg.lower().replace("nanosecond", "")


# ---------------------------------------------------------------- one box, one thing trained


@pytest.mark.parametrize(
    "column",
    [
        "box",
        "world_size",
        "workload",
        "size",
        "precision",
        "global_batch_size",
        "num_steps",
        "data_digest",
        "libraries",
    ],
)
@pytest.mark.parametrize("kind", OF_RUNS)
def test_mixed_runs_are_refused(two, kind, column):
    other = two.iloc[:1].assign(**{column: 1 if pd.api.types.is_numeric_dtype(two[column]) else "another"})
    with pytest.raises(ValueError, match=rf"^{column} is .* and .*; a figure is of one"):
        getattr(figures, kind)(pd.concat([two, other]))


# ---------------------------------------------------------------- what was not measured


# ---------------------------------------------------------------- what each shows


# ---------------------------------------------------------------- colours, order and numbers


def test_a_figure_is_the_same_where_its_layout_has_other_last_bits():
    def drawn(left: float) -> str:
        with drawing.house_style("here"):
            canvas, (ax,) = drawing.panels([2])
            canvas.set_layout_engine("none")
            ax.set_position([left, 0.2, 0.5, 0.5])
            ax.plot([1, 2])
            return drawing.finish(canvas, "here", "A line").svg

    assert "url(#" in drawn(0.2)
    assert drawn(0.2) == drawn(0.2 + 1e-15)
