"""What README and docs/ say in numbers is what the records say now; to mend it: python tools/docs_tables.py."""

from __future__ import annotations

import re
import sys

import pytest
from launching import ROOT
from test_docs import PAGES

from study.engines.conformance import committed
from study.engines.conformance.cells import PACKAGES

sys.path.insert(0, str(ROOT / "tools"))
import docs_tables


@pytest.mark.parametrize(("page", "name"), docs_tables.PLACES)
def test_it_is_what_the_records_say(page, name):
    assert docs_tables.between(page, name) == docs_tables.PLACES[page, name]()


def test_the_page_of_errors_is_what_its_command_prints():
    page, *folders = docs_tables.THEORY
    made = docs_tables.whole_theory()
    assert f"Made by `zero-study compare --view theory {' '.join(folders)}`." in made
    assert (ROOT / page).read_text(encoding="utf-8") == f"{made}\n"


def test_every_place_is_known():
    marked = {(page, name) for page in PAGES for name in re.findall(r"<!-- /(\w+) -->", (ROOT / page).read_text())}
    assert marked == set(docs_tables.PLACES)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_oldest_version_that_is_supported_was_examined(package):
    assert docs_tables.lower_bound(package) in committed.read(package)
