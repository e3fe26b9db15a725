"""Test what a release changes: version, changelog, citation, and the links of README on an index."""

from __future__ import annotations

import datetime
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import release
import yaml
from readme_renderer import markdown

DAY = datetime.date(2027, 1, 31)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "zero_study").mkdir()
    (tmp_path / "zero_study" / "version.py").write_text('__version__ = "0.2.0"\n\nREPOSITORY = ""\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- new\n\n## 0.2.0 (2027-01-01)\n\n- old\n")
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.2.0\n")
    return tmp_path


def test_a_release_moves_the_changes_below_its_heading(clone):
    texts = {path.name: text for path, text in release.edited(clone, "0.3.0", DAY).items()}
    assert texts["version.py"] == '__version__ = "0.3.0"\n\nREPOSITORY = ""\n'
    assert "## Unreleased\n\n## 0.3.0 (2027-01-31)\n\n- new\n\n## 0.2.0 (2027-01-01)" in texts["CHANGELOG.md"]
    assert texts["CITATION.cff"] == "cff-version: 1.2.0\nversion: 0.3.0\n"


@pytest.mark.parametrize("version", ["0.2.0", "0.1.9", "new", "0.2.0.dev1"])
def test_a_version_that_is_not_newer_is_refused(version, clone):
    with pytest.raises(ValueError, match=version):
        release.edited(clone, version, DAY)


def test_a_release_without_changes_is_refused(clone):
    (clone / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0\n")
    with pytest.raises(ValueError, match="Unreleased"):
        release.edited(clone, "0.3.0", DAY)


def test_the_first_release_may_have_the_version_of_the_clone(clone):
    (clone / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased (0.2.0)\n\n- new\n")
    texts = {path.name: text for path, text in release.edited(clone, "0.2.0", DAY).items()}
    assert '__version__ = "0.2.0"' in texts["version.py"]
    assert "## 0.2.0 (2027-01-31)\n\n- new" in texts["CHANGELOG.md"]


def test_a_release_finds_its_places_in_this_project():
    assert {path.name for path in release.edited(release.ROOT, "99.0", DAY)} == {
        "version.py", "CHANGELOG.md", "CITATION.cff",
    }  # fmt: skip


SETUP = SimpleNamespace(**runpy.run_path(str(release.ROOT / "setup.py")))
README = (release.ROOT / "README.md").read_text()


def test_links_of_the_readme_are_absolute_on_an_index():
    readme = '[a](docs/a.md#b) [c](https://c.org) [d](#d) <img src="reports/x.svg"> <source srcset="reports/y.svg">'
    assert SETUP.long_description(readme, "https://github.com/o/n", "1.0") == (
        "[a](https://github.com/o/n/blob/v1.0/docs/a.md#b) [c](https://c.org) [d](#d) "
        '<img src="https://raw.githubusercontent.com/o/n/v1.0/reports/x.svg"> '
        '<source srcset="https://raw.githubusercontent.com/o/n/v1.0/reports/y.svg">'
    )


@pytest.mark.parametrize("repository", ["", "https://github.com/o/n"], ids=["without an address", "with an address"])
def test_every_link_of_the_rendered_readme_leads_somewhere(repository):
    """43 links led to files that an index of packages does not have."""
    html = markdown.render(SETUP.long_description(README, repository, "1.0"))
    places = re.findall(r'(?:href|src)="([^"]*)"', html)
    anchors = {f"#{name}" for name in re.findall(r'id="(.*?)"', html)}
    files = [place for place in places if place not in anchors]
    assert bool(files) == ("<img" in html) == bool(repository)
    for place in files:
        name = re.match(r"https://(?:github.com/o/n/blob|raw.githubusercontent.com/o/n)/v1.0/([^#]+)", place)
        assert (release.ROOT / name[1]).exists(), place


def test_what_is_published_was_tested():
    """The workflow published whatever was tagged."""
    jobs = yaml.safe_load((release.ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    (publishing,) = [job for job in jobs.values() if "id-token" in job.get("permissions", {})]
    testing = jobs[publishing["needs"]]
    assert ".ci/run" in [step.get("run") for step in testing["steps"]]
    promised = re.findall(r"Python :: (3\.\d+)", (release.ROOT / "pyproject.toml").read_text())
    assert testing["strategy"]["matrix"]["python"] == [promised[0], promised[-1]]
    assert any("twine check --strict" in step.get("run", "") for step in publishing["steps"])


def test_the_changelog_is_a_page():
    """Its first entry had 33 kB and described states that nobody had installed."""
    entry = (release.ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert len(entry.splitlines()) <= 90
