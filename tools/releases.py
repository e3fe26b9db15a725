"""Write study/engines/releases.json: the keys and defaults of each release of the engines, read from its source code.

    python tools/releases.py [FOLDER]

pip downloads the releases into FOLDER, or into a temporary folder (2 GB, a quarter of an hour). No release is installed
or imported. However, pip runs DeepSpeed's setup.py to read the name of the package.
"""

from __future__ import annotations

import ast
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from study import files
from study.engines.conformance import committed
from study.engines.known_bad import base_release
from study.engines.upgrade import INDEX

SINCE = {"transformers": "4.44.0", "trl": "0.12.0", "accelerate": "1.2.0", "deepspeed": "0.16.0"}
BY_MINOR, NEWEST = ("transformers", "trl"), 8  # the last of each minor version: the newest 8, then every second
READ = {
    "deepspeed": r"/deepspeed/(runtime/.*(config|constants)|compile/config)\.py$",
    "accelerate": r"/accelerate/(utils/dataclasses|parallelism_config|commands/launch)\.py$",
    "transformers": r"/transformers/training_args\.py$",
    "trl": r"/trl/.*_config\.py$",
}
ASKS = r"^Requires.*: (torch|accelerate|deepspeed|transformers)[^;\n]*>=([\d.]+)(?:; extra == .(?:torch|deepspeed).)?$"
OWN = "TrainingArguments' own"  # of a class of trl that says nothing
Classes = dict[str, dict[str, str]]  # defaults as source text, by class and name


def pip(*words: str) -> str:
    command, environment = [sys.executable, "-m", "pip", *words], os.environ | {"DS_BUILD_OPS": "0"}
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout


def chosen(package: str) -> list[str]:
    """List the releases to read, the oldest first."""
    listed = re.findall(r"(?<= )\d+\.\d+\.\d+(?=,|$)", pip("index", "versions", package).split("\n")[1])
    since = base_release(SINCE[package])
    releases = sorted((version for version in listed if base_release(version) >= since), key=base_release)
    last_of_minors = list({base_release(version).release[:2]: version for version in releases}.values())[::-1]
    return [*last_of_minors[:NEWEST], *last_of_minors[NEWEST + 1 :: 2]][::-1] if package in BY_MINOR else releases


def shipped(package: str, version: str, folder: Path) -> tuple[list[str], str]:
    """Return the source files of a release that are read, and its metadata."""
    place = folder / f"{package}-{version}"
    if not place.is_dir():
        pip("download", "-q", "--no-deps", "--no-build-isolation", "-d", str(place), f"{package}=={version}")
        (archive,) = place.iterdir()
        shutil.unpack_archive(archive, place, "zip" if archive.suffix == ".whl" else "gztar")
    # trl's experimental classes come before those that stand in for them
    sources = [path.read_text() for path in sorted(place.rglob("*.py")) if re.search(READ[package], path.as_posix())]
    return sources, next(path for name in ("METADATA", "PKG-INFO") for path in place.glob(f"*/{name}")).read_text()


def value(node: ast.expr | None, names: dict[str, str]) -> str:
    """Return a default as source text. A name that the file assigns is replaced by its value."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("field", "Field", "pp_int", "int", "float"):
        said = {keyword.arg: keyword.value for keyword in node.keywords}
        return value(said.get("default", said.get("default_factory", node.args[0] if node.args else None)), names)
    text = ast.unparse(node) if node else "(required)"
    return names.get(text, text)


def defaults(sources: list[str]) -> Classes:
    """Return every default of a release by class. The launcher's flags and DeepSpeed's constants are classes, too."""
    own: Classes = {"launch": {}, "constants": {}}
    bases: dict[str, set[str]] = {}
    for nodes in (list(ast.walk(ast.parse(source))) for source in sources):
        names: dict[str, str] = {}
        for node in nodes:  # under a condition, too
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, said = node.targets[0].id, value(node.value, names)
                names[name] = f"{names[name]} or {said}" if names.get(name, said) != said else said
        own["constants"] |= {name[:-8].lower(): said for name, said in names.items() if name.endswith("_DEFAULT")}
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                name, inner = node.name.lstrip("_"), [one for one in node.body if isinstance(one, ast.AnnAssign)]
                bases.setdefault(name, set()).update(ast.unparse(base).lstrip("_") for base in node.bases)
                own.setdefault(name, {}).update({ast.unparse(one.target): value(one.value, names) for one in inner})
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument") and node.args:
                given = {one.arg: one.value for one in node.keywords}.get("default")
                own["launch"][ast.unparse(node.args[0]).strip("'")] = value(given or ast.Constant(None), names)

    def inherited(name: str) -> dict[str, str]:
        above = [inherited(base) for base in sorted(bases.get(name, ())) if base in own and base != name]
        return {key: text for part in above for key, text in part.items()} | own[name]

    return {name: inherited(name) for name in own}


def changes(before: Classes, after: Classes, own: dict[str, str]) -> list[list[str | None]]:
    """List keys whose default differs between two releases. None: a release lacks the key. `own`: OWN's values."""
    together: dict[tuple[str, str | None, str | None], list[str]] = {}
    for name in sorted({*before} & {*after}):
        for key in sorted({*before[name], *after[name]}):
            old, new = (one[name].get(key, OWN if key in own else None) for one in (before, after))
            if old != new and key[0] != "_" and not (OWN in (old, new) and own[key] in (old, new)):
                together.setdefault((key, old, new), []).append(name)
    return [[",".join(names), *what] for what, names in together.items()]


def index(folder: Path) -> dict[str, object]:
    """Build the whole index. Releases that are not in the folder yet are downloaded."""
    packages: dict[str, object] = {"torch": {"releases": [*committed.released("torch")], "changes": [], "requires": {}}}
    own: dict[str, str] = {}
    for package in SINCE:
        read = {version: shipped(package, version, folder) for version in chosen(package)}
        found = {version: defaults(sources) for version, (sources, _) in read.items()}
        packages[package] = {
            "releases": list(found),
            "changes": [[b, *change] for a, b in pairwise(found) for change in changes(found[a], found[b], own)],
            "requires": {version: dict(re.findall(ASKS, said, re.MULTILINE)) for version, (_, said) in read.items()},
        }
        own = found[list(found)[-1]].get("TrainingArguments", {})  # for trl, which comes after transformers
    return {"made": str(datetime.date.today()), "packages": packages}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as deleted:
        content = index(Path(sys.argv[1] if len(sys.argv) > 1 else deleted))
    files.write_whole(INDEX, json.dumps(content).replace("], [", "],\n[").replace('}, "', '},\n"').encode() + b"\n")
