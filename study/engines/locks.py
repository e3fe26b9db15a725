"""Read which releases an environment pins: from lock files, requirements, `pip freeze` and conda's environment.yml.

Nothing is guessed. If a line about a package of interest does not name one release, the line is kept with the reason,
so that a comparison of two files can say what was not compared.
"""

from __future__ import annotations

import codecs
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from ..errors import Refusal
from ..files import read_whole, reading

CONDA_NAMES = {"pytorch": "torch", "pytorch-cpu": "torch", "pytorch-gpu": "torch"}
# Local parts of a version that only name a build of a release, as in the indexes of PyTorch and NVIDIA.
_BUILDS = re.compile(r"cpu|xpu|cu\d+|cuda[\d.]*|rocm[\d.]+|cxx11[.]?abi|pt[\d.]+")
_OPTION = re.compile(r"\s--?[a-z][\w-]*[ =].*", re.DOTALL)  # behind a requirement: --hash=..., --config-settings ...


@dataclass(frozen=True)
class Lock:
    """The releases that a file pins."""

    pins: dict[str, str]  # packages of interest, each at one release
    unread: dict[str, str] = field(
        default_factory=dict
    )  # packages of interest, or included files, that name no release -> the reason
    others: dict[str, str] = field(default_factory=dict)  # all other packages that are pinned


@dataclass(frozen=True)
class _Pin:
    """One mention of a package: a version, or the reason why there is none."""

    name: str
    version: str | None
    text: str  # as it is written in the file
    reason: str = ""


def read(path: Path, packages: Collection[str]) -> Lock:
    """Return the releases that are pinned by a file and by the files that it includes.

    `packages` are the packages of interest. Raises Refusal if the file cannot be read, or mentions none of them.
    """
    mentions: dict[str, list[_Pin]] = {}
    for pin in _mentions(path, ()):
        mentions.setdefault(pin.name, []).append(pin)
    lock = Lock({})
    for name, pins in mentions.items():
        versions = list(dict.fromkeys(pin.version for pin in pins if pin.version is not None))
        if name not in packages and not name.startswith("-"):
            lock.others.update({name: versions[0]} if len(versions) == 1 else {})
        elif reason := _why_no_release(pins, versions):
            lock.unread[name] = reason
        else:
            lock.pins[name] = versions[0]
    if not (lock.pins or lock.unread):
        raise Refusal(
            f"{path}: pins none of {', '.join(packages)}. Name a lock file, or a file with "
            "exact releases (==) as `pip freeze` prints."
        )
    return lock


def _why_no_release(pins: Sequence[_Pin], versions: Sequence[str]) -> str | None:
    """Return why the mentions of a package do not name one release; None if they do."""
    if unplaced := next((pin for pin in pins if pin.version is None), None):
        return f'"{unplaced.text}", which {unplaced.reason}'
    if len(set(map(_comparable, versions))) > 1:
        return f"{pins[0].name} pinned to {' and to '.join(versions)}, depending on the platform"
    return None


def release_of(version: str) -> Version | None:
    """Return the final release of which a version is a build; None for a pre-release, a nightly or a custom build."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return None
    if parsed.is_prerelease or parsed.is_postrelease or (parsed.local and not _BUILDS.fullmatch(parsed.local)):
        return None
    return Version(parsed.public)


def _comparable(version: str) -> str:
    """Return a text that is the same for all builds of a release: the release, or else the version itself."""
    release = release_of(version)
    return version if release is None else str(release)


def _mentions(path: Path, including: tuple[Path, ...]) -> Iterator[_Pin]:
    with reading(path, "a lock file or requirements"):
        text = _decoded(read_whole(path))
    if path.suffix in (".lock", ".toml"):
        with reading(path, "a lock file or requirements"):
            yield from _of_lock(tomllib.loads(text))
    elif path.suffix in (".yml", ".yaml"):
        with reading(path, "an environment of conda"):
            content = yaml.safe_load(text)
        yield from _of_conda(content)
    else:
        yield from _of_requirements(text, path, including)


def _decoded(content: bytes) -> str:
    """Decode a file by its byte-order mark, which PowerShell writes; without one, decode it as UTF-8."""
    for mark, encoding in ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")):
        if content.startswith(mark):
            return content.decode(encoding)
    return content.decode("utf-8-sig")


# ---------------------------------------------------------------- requirements


def _of_requirements(text: str, path: Path, including: tuple[Path, ...]) -> Iterator[_Pin]:
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if not line:
            continue
        if line.startswith("-"):
            yield from _of_option(line, path, including)
        else:
            yield _of_requirement(_OPTION.sub("", f"{line} ").strip())


def _of_option(line: str, path: Path, including: tuple[Path, ...]) -> Iterator[_Pin]:
    """Yield the pins of an included file, or of an editable installation. Other options do not name releases."""
    option, _, value = (part.strip() for part in re.sub(r"=", " ", line, count=1).partition(" "))
    if option in ("-e", "--editable"):
        yield _Pin(_name_of_address(value), None, line, "is installed from a source tree, so its release is unknown")
    elif re.match(r"(-r|-c|--requirement|--constraint)", option):
        value = value or option[2:]  # -rmore.txt
        included = path.parent / value
        if "://" in value or not included.is_file():
            yield _Pin(f"-r {value}", None, line, "cannot be read, so the releases in it are unknown")
        elif included.resolve() not in (*including, path.resolve()):
            yield from _mentions(included, (*including, path.resolve()))


def _of_requirement(line: str) -> _Pin:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        if line.endswith(".whl") or "/" in line:
            return _Pin(_name_of_address(line), None, line, "is a file or an address, so its release is unknown")
        first_word = re.match(r"[\w.-]+", line)
        name = str(canonicalize_name(first_word[0])) if first_word else line
        return _Pin(name, None, line, "cannot be read as a requirement")
    name = str(canonicalize_name(requirement.name))
    if requirement.url:
        return _Pin(name, None, line, "is an address, so its release is unknown")
    exact = [
        spec.version for spec in requirement.specifier if spec.operator in ("==", "===") and "*" not in spec.version
    ]
    if len(requirement.specifier) == 1 and exact:
        return _Pin(name, exact[0], line)
    reason = "names a range and not one release" if requirement.specifier else "names no release"
    return _Pin(name, None, line, reason)


def _name_of_address(address: str) -> str:
    """Return the name of the package at an address: from `#egg=`, a wheel's name, or the last part of the path."""
    if egg := re.search(r"[#&]egg=([\w.-]+)", address):
        return str(canonicalize_name(egg[1]))
    place = re.split(r"[#?@]", address.rpartition("://")[2] or address)[0]
    last: str = place.rstrip("/").rpartition("/")[2]
    with suppress(InvalidWheelFilename):
        return str(parse_wheel_filename(last)[0])
    return str(canonicalize_name(re.sub(r"(\.git|\.zip|\.tar\.gz)$", "", last) or address))


# ---------------------------------------------------------------- lock files, and conda


def _of_lock(content: Mapping[str, Any]) -> Iterator[_Pin]:
    """Yield the pins of a uv.lock, poetry.lock or pylock.toml."""
    parts = [content[key] for key in ("package", "packages") if isinstance(content.get(key), list)]
    for entry in (entry for part in parts for entry in part if isinstance(entry, dict) and "name" in entry):
        name = str(canonicalize_name(str(entry["name"])))
        source = entry["source"] if isinstance(entry.get("source"), dict) else {}
        if "type" in source:  # of poetry, whose type "legacy" is another index, such as PyTorch's
            kinds = {str(source["type"])} & {"git", "url", "file", "directory"}
        else:
            kinds = {"git", "url", "path", "directory", "editable", "virtual", "vcs", "archive"} & {*source, *entry}
        version = entry.get("version")
        if kinds or not isinstance(version, str):
            yield _Pin(
                name,
                None,
                f"{name} ({', '.join(sorted(kinds)) or 'no version'})",
                "is not a release of a package index",
            )
        else:
            yield _Pin(name, version, f"{name}=={version}")


def _of_conda(content: Any) -> Iterator[_Pin]:
    """Yield the pins of an environment.yml: conda's packages, and those in its section for pip.

    Conda's names are replaced by those on PyPI.
    """
    entries = content.get("dependencies") if isinstance(content, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            for line in entry.get("pip") or ():
                yield from _of_requirements(str(line), Path(), ())
        elif isinstance(entry, str):
            spec = entry.rpartition("::")[2].strip()
            name, _, version = (part.strip() for part in re.sub(r"\s*(==?)\s*", "=", spec, count=1).partition("="))
            name = re.split(r"[\s<>!~]", name)[0].lower()
            version = version.partition("=")[0]  # of =2.1.0=py311_cuda
            name = CONDA_NAMES.get(name, str(canonicalize_name(name)))
            if re.fullmatch(r"\d+\.\d+\.\d+[\w.+]*", version):
                yield _Pin(name, version, entry)
            else:
                yield _Pin(name, None, entry, "does not name a single release")
