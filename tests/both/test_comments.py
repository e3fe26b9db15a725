"""Comments and docstrings name only files that exist, in this project or in a library that it installs."""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("accelerate", "deepspeed", "torch", "transformers")
# Files of programs that are not installed here.
ELSEWHERE = {"litgpt/config.py", "setup.py"}

NAMED_FILE = re.compile(r"(?<![\w/.*{<-])(?:[\w.-]+/)*[\w-]+\.(?:py|md|ipynb|yaml)\b(?![\w*(])")


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone: there is no list of the project's files")
    return listed.stdout.split()


@cache
def library_files() -> dict[str, list[str]]:
    """Return the files of the libraries by their names."""
    folders = [
        Path(spec.origin).parent for name in LIBRARIES if (spec := importlib.util.find_spec(name)) and spec.origin
    ]
    return by_name(str(path) for folder in folders for path in folder.rglob("*.py"))


def by_name(files: Iterable[str]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for path in files:
        result.setdefault(path.rpartition("/")[2], []).append(path)
    return result


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment and docstring."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def missing(source: str, files: dict[str, list[str]]) -> list[tuple[int, str]]:
    """List the lines that name a file that is neither among `files` nor a library's; both are given by their names."""
    mentions = [(line, match[0]) for line, text in comments(source) for match in NAMED_FILE.finditer(text)]
    return [
        (line, name)
        for line, name in mentions
        if name not in ELSEWHERE
        and not any(
            path == name or path.endswith(f"/{name}")
            for each in (files, library_files())
            for path in each.get(name.rpartition("/")[2], ())
        )
    ]


def test_comments_name_files_that_exist():
    tracked = tracked_files()
    files = by_name(tracked)
    assert {
        path: result
        for path in tracked
        if path.endswith(".py") and (ROOT / path).exists() and (result := missing((ROOT / path).read_text(), files))
    } == {}


def test_a_file_that_is_gone_is_found():
    source = '"""See study/train.py."""\n# study/gone.py did it; zero/stage3.py is DeepSpeed\'s\n'
    assert missing(source, by_name(["study/train.py"])) == [(2, "study/gone.py")]
