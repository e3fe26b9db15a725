"""The drawings of docs/concepts.md: current, legible on a phone, and copied into the site."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import drawings
import pages
import pytest
from launching import ROOT

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
