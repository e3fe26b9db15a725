"""Record where libraries are imported from, and refuse modules that shadow the installed ones.

PYTHONPATH, files in the current folder, `sitecustomize` and `.pth` files can change what a run imports, and no version
number shows it.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import os
import site
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

from zero_study.errors import Refusal
from zero_study.files import relative_to_cwd, sha256

# The libraries that affect a run.
LIBRARIES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "evaluate", "tokenizers", "numpy")
OF_ADAPTERS = ("peft", "bitsandbytes")  # those that affect a run only if it trains an adapter
_CUSTOMIZES = ("sitecustomize", "usercustomize")  # modules that Python imports at its start if they exist
_SUFFIXES = (".py", ".pyc", ".so")


def check(program: Path) -> None:
    """Raise Refusal if a module shadows one of Python or of a library, or if another copy of the study is imported.

    `program` is the file that was started. It must belong to the copy of the study that Python imports.
    """
    if program.name == "train.py" and not program.samefile(Path(__file__).parents[1] / "train.py"):
        raise Refusal(
            f"{program} was started, but Python imports the project from {Path(__file__).parents[2]}. "
            "Start the program of the second folder, or install the project from the first one: pip install -e ."
        )
    names = sys.stdlib_module_names | {*_CUSTOMIZES}
    imported = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    for folder in _python_path():
        # accelerate adds the current folder to PYTHONPATH, and train.py removes it again. So of this folder only the
        # modules that were already imported count.
        is_current = folder.resolve() == Path.cwd().resolve()
        for path in _modules_in(folder):
            is_in_use = not is_current or not imported.isdisjoint({str(path), str(path / "__init__.py")})
            if is_in_use and path.stem.partition(".")[0] in names:
                raise Refusal(
                    f"PYTHONPATH: every process of the run would import {path} instead of Python's own module. Rename "
                    "it, or unset PYTHONPATH."
                )
    for name in LIBRARIES:
        spec, installed = importlib.util.find_spec(name), _distribution(name)
        if spec is None or spec.origin is None or installed is None or _is_editable(installed):
            continue
        if not Path(spec.origin).is_relative_to(Path(str(installed.locate_file("")))):
            raise Refusal(
                f"{name}: this library would be imported from {spec.origin} and not from its installation "
                f"({installed.locate_file('')}). Rename that file or folder, or unset PYTHONPATH."
            )


def describe() -> dict[str, Any]:
    """Return the folders and digests of the code that this process has imported.

    For each library, the result lists the imported files that differ from the installed ones.
    """
    return {
        "python_path": [relative_to_cwd(folder) for folder in _python_path()],
        "at_start": {path.name: sha256(path) for path in sorted(_run_at_start())},
        "libraries": {name: _library(name) for name in LIBRARIES if name in sys.modules},
    }


def _python_path() -> list[Path]:
    return [Path(word) for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]


def _modules_in(folder: Path) -> Iterator[Path]:
    """Yield the modules that Python would import from a folder on its path.

    Folders without __init__.py are left out, because any regular module comes before them.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix in _SUFFIXES or (path / "__init__.py").is_file():
            yield path


def _run_at_start() -> Iterator[Path]:
    """Yield the files whose code Python ran at its start.

    They are `sitecustomize`, `usercustomize` and the .pth files that contain an import.
    """
    for name in _CUSTOMIZES:
        if file := getattr(sys.modules.get(name), "__file__", None):
            yield Path(file)
    for folder in {*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])}:
        for path in Path(folder).glob("*.pth"):
            if any(line.startswith(("import ", "import\t")) for line in path.read_text(errors="replace").splitlines()):
                yield path


def _library(name: str) -> dict[str, Any]:
    """Return the digest of a library, including later changes, and the imported files that were changed.

    If there is no list of the installed files (for an editable installation, for example), every imported file counts
    as changed.
    """
    installed = _distribution(name)
    expected = _expected(name, (installed and installed.read_text("RECORD")) or "")
    digest, changed = hashlib.sha256(repr(sorted(expected.items())).encode()), []
    for path in sorted(_imported_files(name)):
        relative = f"{name}/{path.relative_to(_folder(name))}"
        status = path.stat()
        content = _digest(path, status.st_mtime_ns, status.st_size)
        in_record = base64.urlsafe_b64encode(content).rstrip(b"=").decode()
        if expected.get(relative) != f"sha256={in_record}":
            changed.append(relative)
            digest.update(f"{relative} {content.hex()}\n".encode())
    return {"sha256": digest.hexdigest(), "changed": changed}


@cache
def _expected(name: str, listed: str) -> dict[str, str]:
    """Return the digests of a library's files at the installation, from the list of all files that pip installed."""
    rows = csv.reader(listed.splitlines())
    return {row[0]: row[1] for row in rows if row[0].startswith(f"{name}/") and row[1]}


@cache  # thousands of files, which the runs that are forked from one process need not read again
def _digest(path: Path, changed_at: int, size: int) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def _imported_files(name: str) -> set[Path]:
    modules = [module for key, module in list(sys.modules.items()) if key.partition(".")[0] == name]
    files = {Path(str(getattr(module, "__file__", None))) for module in modules}
    return {path for path in files if path.is_relative_to(_folder(name)) and path.is_file()}


def _folder(name: str) -> Path:
    return Path(str(sys.modules[name].__file__)).parent


def _distribution(name: str) -> Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except PackageNotFoundError:
        return None


def _is_editable(installed: Distribution) -> bool:
    return '"editable": true' in (installed.read_text("direct_url.json") or "")
