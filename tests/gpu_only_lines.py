"""Find the lines of the study and of its tools that only a machine with a GPU reaches, from their syntax.

They are the statements that name CUDA or NVML, and those in a branch, or after an early return, that a condition on a
GPU decides. Conditions inside expressions, and conditions on recorded machines, are not looked for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

NO_GPU = re.compile(
    r"type != 'cuda'|type == 'cpu'|not torch\.cuda\.(is_available|device_count)|not (self\.)?on_gpu|^on_cpu$"
    r"|None in gpus"
)
GPU = re.compile(r"type == 'cuda'|type != 'cpu'|torch\.cuda\.is_available\(\)|not on_cpu|\bon_gpu\b|\bis_cuda\b")
NAMES = re.compile(
    r"\bpynvml\.|\bnvml_handle\(|torch\.cuda\.(?!is_available|device_count|OutOfMemoryError)\w+\(|nvidia-smi"
)


def of_project() -> set[str]:
    """Return all such lines, as path:line."""
    paths = [path for folder in ("study", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {f"{path.relative_to(ROOT)}:{line}" for path in paths for line in of_source(path.read_text())}


def of_source(source: str) -> Iterator[int]:
    """Yield the numbers of such lines in a module."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _of_block(function.body, False)


def _of_block(statements: list[ast.stmt], needs_gpu: bool) -> Iterator[int]:
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if needs_gpu and not isinstance(statement, ast.ClassDef):
                yield from _of_block(statement.body, True)
            continue
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and (needs_gpu or NAMES.search(_own_text(statement))):
            yield statement.lineno
        if isinstance(statement, ast.If):
            test = ast.unparse(statement.test)
            is_without = bool(NO_GPU.search(test))
            is_with = not is_without and bool(GPU.search(test))
            yield from _of_block(statement.body, needs_gpu or is_with)
            yield from _of_block(statement.orelse, needs_gpu or is_without)
            if is_without and isinstance(statement.body[-1], (ast.Return, ast.Raise, ast.Continue)):
                needs_gpu = True
            continue
        for block in ("body", "orelse", "finalbody"):
            yield from _of_block(getattr(statement, block, []), needs_gpu)
        for handler in getattr(statement, "handlers", []):
            yield from _of_block(handler.body, needs_gpu)


def _own_text(statement: ast.stmt) -> str:
    """Return the text of a statement without the blocks in it."""
    if hasattr(statement, "body"):
        return ast.unparse(statement).partition("\n")[0]
    return ast.unparse(statement)


def texts(lines: set[str]) -> set[str]:
    """Return lines as path: text, which stays as it is when lines are added above it."""
    read = {}
    for path, _, number in (line.partition(":") for line in lines):
        source = (ROOT / path).read_text().splitlines()
        read[path, number] = f"{path}: {source[int(number) - 1].strip()}"
    return set(read.values())
