"""Write the address of the repository from zero_study/version.py into every file that shows it.

    python tools/derive/address.py

The files are pyproject.toml, CITATION.cff and the notebooks. The pages are written by docs_tables.py, from the texts of
this module. As long as the address is empty, the texts say what works without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from study.report import colab
from study.report.build import OF_RUNS
from zero_study.files import ROOT
from zero_study.version import REPOSITORY, __version__

BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
TAG = "colab"

# The set-up cell of a notebook. Colab has neither the repository nor its packages.
SET_UP = """# Only in Colab: install the project. Without an address, choose its zip file or its wheel.
import pathlib
import shutil
import subprocess
import sys

if "google.colab" in sys.modules:
    from google.colab import files

    repository, folder = "{repository}", pathlib.Path.home() / "zero-study"
    if repository and not folder.exists():
        subprocess.run(["git", "clone", "--depth", "1", repository, folder], check=True)
    elif not folder.exists():
        shutil.unpack_archive(next(iter(files.upload()), "No file was chosen: nothing"), folder, "zip")
    sys.path.insert(0, str(next(folder.rglob("study/__init__.py")).parents[1]))
    from study.report import set_up

    """
INSTALL, TRAIN = "set_up.install()", "records = set_up.install_and_train(records)"


def project_urls() -> str:
    """Return the table of addresses for pyproject.toml. Empty without an address, because an index checks them."""
    if not REPOSITORY:
        return ""
    lines = [f'Repository = "{REPOSITORY}"', f'Issues = "{REPOSITORY}/issues"']
    lines += [f'Changelog = "{REPOSITORY}/blob/main/CHANGELOG.md"', f'Documentation = "{REPOSITORY}/tree/main/docs"']
    return "\n".join(["[project.urls]", *lines, ""])


def clone_line() -> str:
    """Return README's sentence that says how to get the project."""
    needed = "You need Linux and Python 3.11 or newer."
    if REPOSITORY:
        return f"{needed} Run `git clone {REPOSITORY} zero-study`, and in the folder `zero-study`:"
    return f"{needed} Run these commands in a clone of this repository, or in its unpacked zip file:"


def colab_sentence() -> str:
    """Return the guide's sentence on how to open a notebook in Colab."""
    if REPOSITORY:
        opened = f"[the notebook about the planner]({colab.address('planner')})"
        return f"The badge at the top of a notebook opens it in Colab, for example {opened}."
    return (
        "The project has no public address yet. Upload a notebook to Colab and run its set-up cell, which "
        "asks for the zip file of the repository, or for the project's wheel. The wheel is enough for the notebooks "
        "`a100-or-h100` and `article`, and for those that train first. All other notebooks need the zip "
        "file, because the stored results are only part of the repository."
    )


def pre_commit_block() -> str:
    """Return what another project writes into its .pre-commit-config.yaml."""
    place = REPOSITORY or "/path/to/a/clone/of/this/repository"
    lines = ["repos:", f"  - repo: {place}", f"    rev: {f'v{__version__}' if REPOSITORY else 'main'}", "    hooks:"]
    return "\n".join(["```yaml", *lines, "      - id: zero-study-doctor", "```"])


def set_up_cells(name: str) -> Iterator[dict[str, Any]]:
    """Yield the cells that a notebook has for Colab: the badge if there is an address, and the set-up."""
    trains = name in OF_RUNS
    if REPOSITORY:
        yield _cell("markdown", "colab-badge", f"[![Open in Colab]({BADGE})]({colab.address(name)})")
    cell = SET_UP.replace("{repository}", REPOSITORY) + (TRAIN if trains else INSTALL)
    yield _cell("code", "colab-set-up", cell)


def with_set_up(text: str, name: str) -> str:
    """Return a notebook with the cells for Colab right after its parameters."""
    notebook = json.loads(text)
    cells = [cell for cell in notebook["cells"] if TAG not in cell["metadata"].get("tags", [])]
    (parameters,) = _tagged(notebook, "parameters")
    at = cells.index(parameters) + 1
    notebook["cells"] = [*cells[:at], *set_up_cells(name), *cells[at:]]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _tagged(notebook: dict[str, Any], tag: str) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if tag in cell["metadata"].get("tags", [])]


def _cell(kind: str, name: str, text: str) -> dict[str, Any]:
    of_code: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
    cell = {"cell_type": kind, "id": name, "metadata": {"tags": [TAG]}, "source": text.splitlines(keepends=True)}
    return dict(sorted({**cell, **of_code}.items()))


def written() -> dict[Path, str]:
    """Return the text that each file has to have."""
    pyproject, citation = ROOT / "pyproject.toml", ROOT / "CITATION.cff"
    block = re.compile(r"(# address: .*\n)(.*?)(# /address\n)", re.DOTALL)
    result = {pyproject: block.sub(lambda m: m[1] + project_urls() + m[3], pyproject.read_text(encoding="utf-8"))}
    text = re.sub(r"^(repository-code: .*|version: .*)\n", "", citation.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [f"version: {__version__}", *([f'repository-code: "{REPOSITORY}"'] if REPOSITORY else []), "license: "]
    result[citation] = text.replace("license: ", "\n".join(lines))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        result[path] = with_set_up(path.read_text(encoding="utf-8"), path.stem)
    return result


def main() -> None:
    """Write the files that differ, and name them."""
    for path, text in written().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
