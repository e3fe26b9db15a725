"""Make a release: version, changelog, source distribution, wheel, checks, SBOM and tag. Nothing is uploaded.

    python tools/release/release.py 0.2.0          # in build/release; the clone stays as it is
    python tools/release/release.py 0.2.0 --tag    # also commit version and changelog in the clone, and tag the commit

First, `make site` builds the pages and JSON Schemas that are not committed. If one cannot be made, the release ends.
The program then works on a copy of HEAD, and installs the programs that check a release into build/release/tools.

The upload is done by .github/workflows/release.yml when a tag is pushed. That workflow also makes the attestations,
because they are signed with the identity of the workflow: a person at a terminal has no such identity. The index has to
know the workflow as a trusted publisher.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "release"
TOOLS = ("build", "check-wheel-contents", "cyclonedx-bom", "twine")
VERSION = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
REPOSITORY = re.compile(r'^REPOSITORY = "(.*)"$', re.MULTILINE)
UNRELEASED = re.compile(r"^## Unreleased.*$", re.MULTILINE)


def edited(root: Path, version: str, day: date) -> dict[Path, str]:
    """Return the files that a release changes, with their new text.

    Raises ValueError if the version is not newer than that of the clone, or if the changelog has no unreleased part.
    """
    of_version, changelog, citation = root / "zero_study" / "version.py", root / "CHANGELOG.md", root / "CITATION.cff"
    text, changes = of_version.read_text(encoding="utf-8"), changelog.read_text(encoding="utf-8")
    before = _first(VERSION, text)
    is_first = not re.search(r"^## \d", changes, re.MULTILINE)
    try:
        is_newer = Version(version) > Version(before) or (is_first and Version(version) == Version(before))
    except InvalidVersion:
        raise ValueError(f"{version} is not a version. Write it like {before}.") from None
    if not is_newer:
        raise ValueError(f"{version} is not newer than {before}, the version in zero_study/version.py.")
    if not UNRELEASED.search(changes):
        raise ValueError('CHANGELOG.md has no heading "## Unreleased", so the release would have no list of changes.')
    released = f"## Unreleased\n\n## {version} ({day.isoformat()})"
    return {
        of_version: VERSION.sub(f'__version__ = "{version}"', text),
        changelog: UNRELEASED.sub(released, changes, count=1),
        citation: re.sub(r"^version: .*$", f"version: {version}", citation.read_text(encoding="utf-8"), flags=re.M),
    }


def build(version: str, source: Path) -> list[Path]:
    """Build and check the source distribution and the wheel of a folder. Return the files of the release."""
    python = _environment(FOLDER / "tools", *TOOLS)
    output = FOLDER / "dist"
    _run(python, "-m", "build", "--outdir", output, source)
    wheel, packed = next(output.glob("*.whl")), next(output.glob("*.tar.gz"))
    _run(python, "-m", "twine", "check", "--strict", wheel, packed)
    _run(python.with_name("check-wheel-contents"), "--config", source / "pyproject.toml", wheel)
    installed = _environment(FOLDER / "installed", wheel)
    answer = subprocess.run(
        [installed.with_name("zero-study"), "--version"], cwd=FOLDER, capture_output=True, text=True
    )
    if version not in answer.stdout:
        raise ValueError(f"the installed wheel does not report version {version}: {answer.stdout}{answer.stderr}")
    bill = output / f"zero_study-{version}.cdx.json"
    options = ["--output-reproducible", "--output-file", str(bill), str(installed)]
    _run(python.with_name("cyclonedx-py"), "environment", "--pyproject", source / "pyproject.toml", *options)
    return [wheel, packed, bill]


def _environment(folder: Path, *packages: str | Path) -> Path:
    """Make an environment with these packages, unless it exists, and return its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        _run(sys.executable, "-m", "venv", folder)
        _run(python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *packages)
    return python


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    if match is None:
        raise ValueError(f"zero_study/version.py has no line {pattern.pattern}")
    return match[1]


def main() -> None:
    """Make the release, and say what is left to do."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", help="the new version, for instance 0.2.0")
    parser.add_argument("--tag", action="store_true", help="commit version and changelog in the clone, and tag it")
    chosen = parser.parse_args()
    if changed := _git("status", "--porcelain"):
        sys.exit(f"The clone has changes that are not committed, so they would not be released:\n{changed}")
    _run("make", "-C", ROOT, "site")
    source = FOLDER / "source"
    for folder in (source, FOLDER / "dist", FOLDER / "installed"):
        shutil.rmtree(folder, ignore_errors=True)
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "x", "-C", source], input=archive, check=True)
    try:
        texts = edited(source, chosen.version, date.today())
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        repository = _first(REPOSITORY, (source / "zero_study" / "version.py").read_text(encoding="utf-8"))
        made = build(chosen.version, source)
    except ValueError as error:
        sys.exit(str(error))
    for path in made:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes, sha256 {digest}")
    if not repository:
        print("zero_study/version.py has no address: an index would show README without links to files and pictures.")
    if not chosen.tag:
        print("This was a rehearsal: no commit, no tag, no upload. Add --tag to commit and tag.")
        return
    for path, text in texts.items():
        (ROOT / path.relative_to(source)).write_text(text, encoding="utf-8")
    _git("commit", "-am", f"Release {chosen.version}")
    _git("tag", "-a", f"v{chosen.version}", "-m", f"zero-study {chosen.version}")
    print(f"Tagged v{chosen.version}. To publish it: git push origin HEAD v{chosen.version}")


if __name__ == "__main__":
    main()
