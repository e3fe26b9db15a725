"""Build the project. pyproject.toml holds everything but the long description and the folders of a build.

The long description is README.md. An index of packages has no other file of the repository, so links and pictures get
absolute addresses. As long as zero_study/version.py has no address, the pictures are left out, and of each link to a
file only its text remains; the build says so.

A wheel is built in a temporary folder, so that `pip install .` leaves nothing behind in the folder of the sources.
"""

from __future__ import annotations

import re
import runpy
import sys
import tempfile
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"\[([^]]*)\]\((?!https?:|#)([^)]+)\)")
SOURCE = re.compile(r'((?:src|srcset)=")(?!https?:)([^"]+)')
PICTURE = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)
NEED_THE_FOLDER = {"sdist", "editable_wheel"}  # they keep the metadata in the folder of the sources


def long_description(readme: str, repository: str, version: str) -> str:
    """Return README as an index shows it: links lead to the files of the release in the repository."""
    if not repository:
        return LINK.sub(r"\1", PICTURE.sub("", readme))
    raw = repository.replace("//github.com/", "//raw.githubusercontent.com/")
    linked = LINK.sub(rf"[\1]({repository}/blob/v{version}/\2)", readme)
    return SOURCE.sub(rf"\1{raw}/v{version}/\2", linked)


def main() -> None:
    """Build what the command line asks for."""
    version = runpy.run_path(str(HERE / "zero_study" / "version.py"))
    repository = version["REPOSITORY"]
    if not repository:
        print("zero_study/version.py has no address: the long description has no pictures and no links to files.")
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="zero-study-build-") as folder:
        places = {"build": {"build_base": folder}, "egg_info": {"egg_base": folder}}
        setup(
            long_description=long_description(readme, repository, version["__version__"]),
            long_description_content_type="text/markdown",
            options={} if NEED_THE_FOLDER & {*sys.argv} else places,
        )


if __name__ == "__main__":
    main()
