"""Install other releases of the engines in separate folders, from which only the training processes import."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from .. import processes
from ..engines import extensions
from ..errors import Refusal, RunFailed
from ..files import ROOT
from .cells import PACKAGES

FOLDER = ROOT / ".releases"
INSTALL_SECONDS = 1800
LAST_LINES = 3
DIGITS = 12
# torch is installed with its dependencies, which are some GB. The others use the dependencies that are installed.
PIP = {"torch": [], "deepspeed": ["--no-deps", "--no-build-isolation"], "accelerate": ["--no-deps"]}
# What the extensions are built from.
SOURCES = ("ops/csrc/adam", "ops/csrc/lion", "ops/csrc/cpu", "ops/csrc/includes", "ops/op_builder")


def parse(requirements: Sequence[str]) -> dict[str, str]:
    """Return versions by package from the values of --release.

    Raises Refusal if a value is not PACKAGE==VERSION, or a package has two releases.
    """
    versions: dict[str, str] = {}
    for text in requirements:
        package, _, version = text.partition("==")
        if package not in PACKAGES or not re.fullmatch(r"\d+\.\d+\.\d+", version):
            raise Refusal(
                f"--release {text}: write {', '.join(PACKAGES[:-1])} or {PACKAGES[-1]} with == and a version, for "
                "instance deepspeed==0.18.2."
            )
        if package in versions:
            raise Refusal(
                f"--release {text}: {package}=={versions[package]} is requested as well. Name only one release of a "
                "package."
            )
        versions[package] = version
    return versions


def environment(releases: Mapping[str, str], needs: Collection[str], folder: Path = FOLDER) -> dict[str, str]:
    """Install releases, compile the extensions in `needs`, and return the environment variables that select them.

    In this environment, Python finds these releases first. Their dependencies are the installed packages; only torch is
    installed with its own. Raises Refusal if a release cannot be installed or imported, or an extension cannot be
    compiled.
    """
    chosen = {package: _installed(package, version, folder) for package, version in releases.items()}
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, chosen.values())), "DS_ACCELERATOR": "cpu"}
    for package, version in releases.items():
        check_version = (
            f"import {package}; found = {package}.__version__; assert found.split('+')[0] == '{version}', found"
        )
        _run(
            ["-c", check_version],
            variables,
            f"{package} {version} cannot be imported with the other installed packages",
        )
    extensions.use_own_folder()  # and the ninja of this Python
    variables |= {name: os.environ[name] for name in ("TORCH_EXTENSIONS_DIR", "PATH")}
    if "torch" in releases or "deepspeed" in releases:
        digest = _digest(releases.get("torch") or importlib.metadata.version("torch"), chosen.get("deepspeed"))
        variables["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions" / digest)
    names = " and ".join(f"{package} {version}" for package, version in releases.items())
    for name in sorted(needs):
        extension = extensions.EXTENSIONS[name]
        program = ["-c", f"from {extension.module} import {extension.builder} as Builder; Builder().load()"]
        _run(program, variables, f"DeepSpeed's extensions cannot be compiled under {names}")
    return variables


def _installed(package: str, version: str, folder: Path) -> Path:
    """Install a release if it is not installed yet, and return the folder to import it from.

    The folder is a link that is the same for all releases of a package. Two releases with the same sources therefore
    have the same compiler commands and share one build.
    """
    place = folder / f"{package}-{version}"
    if not (place / package).is_dir():
        print(f"installing {package} {version} into {place.name}/ ...", flush=True)
        pip = ["-m", "pip", "install", "-q", *PIP[package], "--target", str(place)]
        build = os.environ | {"DS_BUILD_OPS": "0"}
        _run([*pip, f"{package}=={version}"], build, f"{package} {version} cannot be installed")
    current = folder / f"current-{package}"
    current.unlink(missing_ok=True)
    current.symlink_to(place.name)
    return current


def _digest(torch: str, deepspeed: Path | None) -> str:
    """Return a digest of everything on which a build of the extensions depends.

    This is the release of torch, and DeepSpeed's sources. The modification times of the sources are reset, so that
    releases with equal sources share a build. If `deepspeed` is None, the installed DeepSpeed is used, and only torch
    counts.
    """
    digest = hashlib.sha256(torch.encode())
    if deepspeed is None:
        return digest.hexdigest()[:DIGITS]
    for source in SOURCES:
        for path in sorted((deepspeed / "deepspeed" / source).rglob("*.*")):
            if path.suffix in (".cpp", ".h", ".py"):
                digest.update(path.read_bytes())
                os.utime(path, (0, 0))  # not newer than what was compiled from it for another release
    return digest.hexdigest()[:DIGITS]


def _run(program: list[str], environment: Mapping[str, str], failure: str) -> None:
    try:
        (ended,) = processes.run(program, timeout_seconds=INSTALL_SECONDS, environment=environment, folder=ROOT.parent)
    except RunFailed as late:
        raise Refusal(f"{failure}: {late}") from None
    if ended.returncode:
        raise Refusal(f"{failure}: {' '.join(ended.errors[-LAST_LINES:])}")
