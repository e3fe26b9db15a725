"""Write which lines of the study and of its tools a process executes, each as soon as it is executed the first time.

A process of the study may end at any time without Python's finalization, so nothing is kept back until the end.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
from pathlib import Path
from typing import Any

VARIABLE = "ZERO_STUDY_TEST_EXECUTED_LINES"  # the folder of the files, one per process
ROOT = Path(__file__).resolve().parents[2]
MARK = "__executed__"


class Marking(ast.NodeTransformer):
    """Put a call before every statement that tells the statement's line."""

    def __init__(self, path: str) -> None:
        self._path = path

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                setattr(node, name, [marked for statement in block for marked in self._marked(node, statement)])
        return node

    def _marked(self, parent: ast.AST, statement: ast.stmt) -> list[ast.stmt]:
        is_import = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return [statement]  # a docstring
        if is_import or isinstance(parent, (ast.Module, ast.ClassDef)):
            return [statement]
        call = ast.parse(f"{MARK}({self._path!r}, {statement.lineno})").body[0]
        return [ast.fix_missing_locations(ast.copy_location(call, statement)), statement]


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = Marking(str(Path(path).resolve().relative_to(ROOT))).visit(ast.parse(Path(path).read_bytes()))
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        spec = super().find_spec(name, path, target)
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            return None
        parts = Path(spec.origin).resolve().parts
        inside = parts[: len(ROOT.parts)] == ROOT.parts and parts[len(ROOT.parts)] in ("study", "zero_study", "tools")
        if not inside or ".venv" in parts:
            return None
        spec.loader = _Loader(name, spec.origin)
        return spec


_written: set[tuple[str, int]] = set()


def _executed(path: str, line: int) -> None:
    folder = os.environ.get(VARIABLE)  # a fork has none for a moment, until it has the environment of its program
    if folder is not None and (path, line) not in _written:
        _written.add((path, line))
        with open(Path(folder) / str(os.getpid()), "a") as file:
            file.write(f"{path}:{line}\n")


def install() -> None:
    """Mark the lines of every module of study/ and tools/ that is imported from now on."""
    import builtins

    setattr(builtins, MARK, _executed)
    sys.meta_path.insert(0, _Finder)


def read(folder: Path) -> set[str]:
    """Return the executed lines of all processes, as path:line."""
    return {line for path in folder.iterdir() for line in path.read_text().splitlines()}
