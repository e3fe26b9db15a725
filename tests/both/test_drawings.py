"""The drawings of docs/concepts.md and README's picture: current, legible on a phone, and copied into the site."""

from __future__ import annotations

import itertools
import re
import statistics
import xml.etree.ElementTree as ET
from pathlib import Path

import docs_tables
import drawings
import measured_on_gpus
import pages
import pytest
from launching import ROOT
from matplotlib.text import Text

from study.compare import public_cards
from study.public_runs import archive

pytestmark = pytest.mark.pages

SMALLEST_TEXT = 12  # pixels on a screen of 390 pixels
PAGE_WIDTH = 390 - 2 * 16  # what the margins of a page leave
CONTRAST = 4.5  # of text, by WCAG 2 AA
IMAGE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<path>[^)#\s:]+)\)")
SVG = "{http://www.w3.org/2000/svg}"
DRAWINGS = drawings.drawings()


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_committed_drawing_is_what_the_script_draws(name):
    """If this fails: python tools/derive/drawings.py."""
    assert (drawings.FOLDER / name).read_text(encoding="utf-8") == DRAWINGS[name]


def test_every_committed_drawing_has_a_source():
    assert {path.name for path in drawings.FOLDER.iterdir()} == set(DRAWINGS)


def luminance(color):
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("name", DRAWINGS)
def test_text_is_legible_on_a_phone_and_on_every_ground(name):
    root = ET.fromstring(DRAWINGS[name])
    scale = min(1, PAGE_WIDTH / float(root.get("width"))) * float(root.get("width")) / drawings.WIDTH
    texts = list(root.iter(f"{SVG}text"))
    assert len(texts) > 5
    assert min(float(text.get("font-size")) for text in texts) * scale >= SMALLEST_TEXT
    fills = {rect.get("fill") for rect in root.iter(f"{SVG}rect")} - {"none"}
    colors = {text.get("fill") for text in texts}
    for text_color in colors:
        for fill in fills:
            light, dark = sorted((luminance(text_color), luminance(fill)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= CONTRAST, (name, text_color, fill)
    card = next(root.iter(f"{SVG}rect"))  # behind everything, so the page's own color does not matter
    assert float(card.get("width")) == drawings.WIDTH


def test_every_picture_of_a_page_is_copied_into_the_site():
    displayed = {}
    for source in pages.sources().values():
        if source.suffix == ".md":
            for image in IMAGE.finditer(source.read_text(encoding="utf-8")):
                displayed[(source.parent / image["path"]).resolve()] = image["alt"]
    assert set(displayed) <= set(map(Path.resolve, pages.pictures()))
    assert {ROOT / "docs" / "drawings" / name for name in DRAWINGS} <= set(displayed)
    assert all(len(alt) > 20 for alt in displayed.values())


# ---------------------------------------------------------------- README's picture

PICTURES = list(itertools.product(measured_on_gpus.SIZES, measured_on_gpus.COLORS))
SHOWN = {"wide": 1000, "tall": 360}  # pixels


@pytest.mark.parametrize(("kind", "ground"), PICTURES)
def test_readmes_picture_is_what_the_program_draws(kind, ground):
    """If this fails: python tools/derive/measured_on_gpus.py."""
    committed = (ROOT / measured_on_gpus.file(kind, ground)).read_text(encoding="utf-8")
    assert committed == measured_on_gpus.svg(kind, ground)
    assert len(committed) < 150_000
    paper = re.search(r'<g id="patch_1">\n<path [^>]*fill: (#\w+)', committed)[1]
    assert paper == measured_on_gpus.COLORS[ground]["paper"]


@pytest.mark.parametrize(("kind", "ground"), PICTURES)
def test_every_text_of_readmes_picture_is_legible(kind, ground):
    figure = measured_on_gpus.draw(kind, ground)
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    assert len(texts) > 50
    assert min(text.get_fontsize() for text in texts) * SHOWN[kind] / (72 * figure.get_figwidth()) > 10
    paper = luminance(measured_on_gpus.COLORS[ground]["paper"])
    for color in {text.get_color() for text in texts}:
        light, dark = sorted((luminance(color), paper), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= CONTRAST, color
    places = {text: text.get_window_extent() for text in texts}
    beyond = [
        text
        for text, place in places.items()
        if not figure.bbox.contains(*place.min) & figure.bbox.contains(*place.max)
    ]
    pairs = itertools.combinations(texts, 2)
    overlapping = [(one, other) for one, other in pairs if places[one].overlaps(places[other])]
    assert (beyond, overlapping) == ([], [])


def test_the_text_of_readmes_picture_has_the_numbers_of_the_archive():
    text = re.search(r'alt="([^"]+)"', docs_tables.between("README.md", "picture"))[1]
    minutes = []
    for gpus, entry in ((1, "prefix-1375"), (8, "prefix-1375-8x")):
        runs = [run for run in archive.source("modded-nanogpt") if run.setting.entry == entry]
        assert {run.setting.num_gpus for run in runs} == {gpus}
        assert f"{len(runs)} runs each" in text
        ends = [{name: values[-1] for name, values in run.evaluation.columns.items()} for run in runs]
        minutes.append(statistics.mean(end["seconds"] for end in ends) / 60)
        loss = statistics.mean(end["evaluation_loss"] for end in ends)
        peak = statistics.mean(run.totals["peak_allocated_bytes"] for run in runs) / 2**30
        assert f"{gpus} H100: {minutes[-1]:.1f} minutes, loss {loss:.3f}, {peak:.1f} GiB" in text
        versions = runs[0].setting.versions
        assert {versions["cuda"], versions["torch"].partition("+")[0]} <= set(re.findall(r"[\d.]+\d", text))
    assert f"{minutes[0] / minutes[1]:.1f} times as fast" in text
    runs = {run.name: run.totals for run in archive.source("lightning-minigpt")}
    for name, entry in {
        "DDP": "DDP",
        "ZeRO-2": "DeepSpeed-ZeRO-Stage-2",
        "ZeRO-3": "DeepSpeed-ZeRO-Stage-3",
        "ZeRO-3 with CPU offload": "DeepSpeed-ZeRO-Stage-3-Offload",
        "FSDP": "Fully-Sharded-Training-Wrap",
    }.items():
        run = runs[f"1-{entry}"]
        shown = f"{name}: {run['peak_allocated_bytes'] / 2**30:.1f} GiB, {run['seconds_per_step']:.2f} s per step"
        assert shown in text
    pairs, *tests = (row.spread for row in public_cards.rows() if row.comparison.source in ("llm-foundry", "megatron"))
    assert f"{pairs.num} pairs" in text
    assert f"{pairs.median:.2f} times as long on A100 ({pairs.least:.2f} to {pairs.most:.2f})" in text
    assert f"{min(test.median for test in tests):.2f} to {max(test.median for test in tests):.2f} times in" in text


def test_the_site_shows_readmes_picture_by_its_own_switch():
    picture = pages.PICTURE.sub(pages.with_switch, docs_tables.between("README.md", "picture"))
    for ground in measured_on_gpus.COLORS:
        wide, tall = (measured_on_gpus.file(kind, ground) for kind in measured_on_gpus.SIZES)
        assert f'<source media="(max-width: 700px)" srcset="{tall}">\n  <img src="{wide}#only-{ground}" alt=' in picture
    assert picture.count("<source") == 2
