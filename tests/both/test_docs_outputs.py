"""The outputs in README and the guides are what their commands print."""

from __future__ import annotations

from pathlib import Path

import docs_outputs
import launching
import pytest

pytestmark = pytest.mark.pages

PLACES = [place for page in docs_outputs.pages() for place in docs_outputs.places(page)]
name_of = lambda place: place.name  # noqa: E731
RUNS = [place for place in PLACES if place.is_run]
PLANS = [place for place in RUNS if place.commands.startswith("zero-study plan ")]  # which start no training


@pytest.mark.launches
@pytest.mark.parametrize("place", [place for place in PLACES if not place.is_run], ids=name_of)
def test_a_page_shows_what_its_commands_print(place):
    """To write it anew: python tools/derive/docs_outputs.py PAGE."""
    launching.use()
    assert docs_outputs.printed(place) == place.shown


@pytest.mark.launches
@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=() if place in PLANS else pytest.mark.nightly) for place in RUNS], ids=name_of
)
def test_a_page_shows_what_its_runs_print_but_for_numbers(place):
    """To write it anew: python tools/derive/docs_outputs.py --runs PAGE."""
    launching.use()
    printed = docs_outputs.printed(place)
    assert docs_outputs.without_numbers(printed) == docs_outputs.without_numbers(place.shown)


def page_of(folder: Path, comment: str) -> Path:
    launching.use()
    page = folder / "page.md"
    page.write_text(f"# A page\n\n```sh\necho first 1\necho second\n```\n\n{comment}\n\n```text\nstale\n```\n\nText.\n")
    return page


@pytest.mark.launches
def test_outputs_are_written_where_a_comment_asks_for_them(tmp_path):
    page = page_of(tmp_path, "<!-- output -->")
    assert docs_outputs.update(page, with_runs=False) == 1
    assert "```text\nfirst 1\nsecond\n```\n\nText.\n" in page.read_text()
    assert docs_outputs.update(page, with_runs=False) == 0


@pytest.mark.launches
def test_an_output_of_a_run_is_written_on_request(tmp_path):
    page = page_of(tmp_path, "<!-- output of a run, lines 2-2 -->")
    assert docs_outputs.update(page, with_runs=False) == 0
    assert docs_outputs.update(page, with_runs=True) == 1
    assert "```text\n...\nsecond\n```" in page.read_text()


@pytest.mark.launches
def test_progress_is_left_out(tmp_path):
    page = page_of(tmp_path, "<!-- output -->")
    progress = ["  5 s, starting", "[1/2] bert-imdb-tiny-ddp-2x-seed0: 15 s, step 5, loss 0.7679; about 35 s left"]
    progress.append("Reading earlier runs ...")
    page.write_text(page.read_text().replace("echo second", "\n".join(f"echo '{line}'" for line in progress)))
    assert docs_outputs.update(page, with_runs=False) == 1
    assert "```text\nfirst 1\n```" in page.read_text()


def test_outputs_of_two_machines_are_compared_without_numbers():
    first, second = "peak  237 MiB  0.78 x\n", "peak  1,237 MiB   0.8 x\n"
    assert docs_outputs.without_numbers(first) == docs_outputs.without_numbers(second)
    assert docs_outputs.without_numbers(first) != docs_outputs.without_numbers("peak  237 GiB  0.78 x\n")
    short = "----  ---\nabc   1 B\nThe median is 9 s and\n  falls."
    long = "----  ------\nabc   1000 B\nThe median is\n  12 s and falls."
    assert docs_outputs.without_numbers(short) == docs_outputs.without_numbers(long)
    assert docs_outputs.without_numbers("about 63 s\n") == docs_outputs.without_numbers("about 2 min\n")
    first, second = (
        "packed 1 runs on Intel(R) Xeon(R), 2 cores into a.zip\n",
        "packed 1 runs on AMD EPYC, 8 cores into a.zip\n",
    )
    assert docs_outputs.without_numbers(first) == docs_outputs.without_numbers(second)
