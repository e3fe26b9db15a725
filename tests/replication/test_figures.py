"""In the figures of all notebooks, texts have space between them and are whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest import mock

import nbformat
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from study.report import build, captions, drawing

pytestmark = pytest.mark.pages

SPACE = 4  # pixels: texts in a line with less between them look like one text
NOTEBOOKS = [path for path in sorted(build.NOTEBOOKS.glob("*.ipynb")) if path.stem != build.OF_AN_ARTICLE]
HEAD = captions.Head("Peak memory", captions.MEASURED)


def boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """The texts that are drawn, such as the labels of ticks, with their places. Also each legend as a whole."""
    drawn: list[tuple[str, Bbox]] = []

    def draw(text, renderer, *_) -> None:
        if text.get_visible() and text.get_text().strip():
            drawn.append((text.get_text(), text.get_window_extent(renderer)))

    FigureCanvasAgg(figure).draw()
    with mock.patch.object(Text, "draw", draw):
        figure.canvas.draw()
    words = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    drawn = [(text, box) for text, box in drawn if text not in words]
    return drawn + [("legend", legend.get_window_extent()) for legend in figure.legends]


def faults(figure: Figure) -> Iterator[str]:
    """The texts that leave the figure, and the pairs that overlap or nearly touch."""
    drawn = boxes(figure)
    width, height = figure.bbox.size
    for text, box in drawn:
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1:
            yield f"{text!r} leaves the figure"
    for (text, box), (other, place) in itertools.combinations(drawn, 2):
        across = min(box.x1, place.x1) - max(box.x0, place.x0)
        along = min(box.y1, place.y1) - max(box.y0, place.y0)
        if across > -SPACE and along > 1:
            yield f"{text!r} and {other!r}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_text_overlaps_another_or_leaves_its_figure(path, monkeypatch):
    """The notebook is executed here with the committed records, and each figure that it finishes is examined."""
    figures: list[tuple[str, Figure]] = []

    def add_head(figure: Figure, head: captions.Head) -> None:
        figures.append((head.title, figure))
        added(figure, head)

    added = drawing._add_head
    monkeypatch.setattr(drawing, "_add_head", add_head)
    monkeypatch.chdir(build.ROOT)
    names: dict[str, object] = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code" and "colab" not in cell.metadata.get("tags", []):
            exec(cell.source, names)
    assert figures
    assert [(title, fault) for title, figure in figures for fault in faults(figure)] == []


def test_an_overlap_and_a_text_outside_are_found():
    figure, axes = drawing.panel(2)
    axes.set(xlabel="optimizer step", ylabel="memory (GiB)", xlim=(0, 10))
    drawing.finish(figure, HEAD)
    assert list(faults(figure)) == []
    axes.set_xticks([5, 5.01], ["five", "six"])
    figure.text(0.9, 0.5, "beyond the right end")
    assert list(faults(figure)) == ["'beyond the right end' leaves the figure", "'five' and 'six'"]
