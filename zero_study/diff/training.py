"""Describe the code and settings of a recorded training, so that noise runs of another training are refused."""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..engines.readback.facts import unwrapped_optimizer
from ..errors import Refusal
from .recorded import facts_of

_LIBRARIES = ("site-packages", "dist-packages")
_OWN = ("study", "zero_study")  # this package, and its other name


class Training:
    """The script, the arguments and the optimizers of one recorded training."""

    def __init__(self, script: Path | None, arguments: Sequence[str] | None) -> None:
        """Read the script. If it is None, the script is the program that runs, and its arguments are not compared.

        Such a script starts the recording itself, so its arguments may differ between a recording and its noise run.
        """
        self._script = _main() if script is None else script.resolve()
        self._arguments = None if arguments is None else list(arguments)
        self._text = None if self._script is None else _code(self._script)
        self._optimizers: list[dict[str, Any]] = []  # the groups at the first update
        self._rates: dict[int, list[float]] = {}

    def token_of_same(self, folder: Path, rank: int) -> str:
        """Return the identity of the recording in a folder, to which this run with random rounding belongs.

        Raises Refusal if the folder has no recording, or one of another number of ranks or other arguments.
        """
        facts = facts_of(folder, rank)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if facts["world_size"] != world_size:
            difference = f"it runs on {world_size} ranks, and the recording on {facts['world_size']}"
        elif None not in (facts["arguments"], self._arguments) and facts["arguments"] != self._arguments:
            difference = f"the arguments of the script are {self._arguments}, not {facts['arguments']}"
        else:
            return str(facts["token"])
        raise Refusal(
            f"{folder}: this run with noise does not repeat the training that was recorded in this "
            f"folder: {difference}. Its noise would hide real differences. Start it with the same "
            "command as the recording."
        )

    def note_update(self, step: int, optimizer: Any) -> None:
        """Record the settings of an optimizer at its first update, and its learning rates at every update."""
        groups = _groups(optimizer)
        if step == 1:
            self._optimizers += groups
        self._rates.setdefault(step, []).extend(group["lr"] for group in groups if type(group.get("lr")) is float)

    def facts(self, steps: int) -> dict[str, Any]:
        """Return the facts about the training that a recording of this many steps stores."""
        return {
            "script": None if self._script is None else self._digest(self._script),
            "arguments": self._arguments,
            "optimizers": self._optimizers,
            "rates": [self._rates.get(step, []) for step in range(1, steps + 1)],
        }

    def _digest(self, script: Path) -> str:
        """Return a digest of the script's code, and of the modules in its folder that it has imported."""
        parts, folder = {"": self._text or ""}, str(script.parent / "_")[:-1]  # ends with a separator
        for name, module in sorted(sys.modules.items()):
            path = _source(module)
            if path is None or name.partition(".")[0] in _OWN or path == script:
                continue
            if str(path).startswith(folder) and not set(path.parts) & set(_LIBRARIES):
                parts[name] = _code(path) or ""
        return hashlib.sha256(repr(sorted(parts.items())).encode(errors="replace")).hexdigest()


def _main() -> Path | None:
    """Return the program that this Python process runs. None if it is not a file, or belongs to a library."""
    path = _source(sys.modules.get("__main__"))
    return None if path is None or set(path.parts) & set(_LIBRARIES) else path


def _source(module: Any) -> Path | None:
    name = getattr(module, "__file__", None)
    return _resolved(name) if isinstance(name, str) and name.endswith(".py") else None


@functools.cache
def _resolved(name: str) -> Path:
    """Return the real path of a file. Results are cached, because each recording needs thousands of paths."""
    return Path(name).resolve()


def _code(path: Path) -> str | None:
    """Return the code of a file without comments, and without the arguments of calls of `record`.

    The number of the noise run may be written there. None if the file cannot be read.
    """
    try:
        text = path.read_bytes()
    except OSError:
        return None
    try:
        return ast.dump(_WithoutRecording().visit(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return text.decode(errors="replace")


class _WithoutRecording(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "record":
            node.args, node.keywords = [], []
        return node


# ---------------------------------------------------------------- optimizers


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the settings of each group of parameters. Equal groups in a row are listed once, with their number."""
    base = unwrapped_optimizer(optimizer)
    groups: list[dict[str, Any]] = []
    for group in getattr(optimizer, "param_groups", None) or getattr(base, "param_groups", None) or ():
        num_parameters = len(group.get("params", ()))
        settings = {"optimizer": type(base).__name__, "parameters": num_parameters, **dict(_settings(group))}
        if groups and groups[-1] == settings | {"groups": groups[-1]["groups"]}:
            groups[-1]["groups"] += 1
        else:
            groups.append(settings | {"groups": 1})
    return groups


def _settings(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        if (isinstance(value, torch.Tensor) and value.numel() == 1) or (name == "lr" and type(value) is int):
            yield name, float(value)
        elif isinstance(value, (bool, int, float, str, type(None))):
            yield name, value
        elif isinstance(value, (list, tuple)) and name != "params":
            yield name, [part for part in value if isinstance(part, (bool, int, float, str))]
