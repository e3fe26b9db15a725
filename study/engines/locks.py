"""Read which releases an environment pins: from lock files, requirements, lists of packages, and files of conda.

Nothing is guessed. If a line about a package of interest does not name one release, the line is kept with the reason,
so that a comparison of two files can say what was not compared. A file that pins a package by platform is read for
Linux on x86_64.
"""

from __future__ import annotations

import codecs
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from packaging.markers import InvalidMarker, Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from ..errors import Refusal
from ..files import read_whole, reading

# The platform whose pins are read.
PLATFORM = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"}
CONDA_PLATFORMS = ("linux-64", "noarch")  # the same platform, as conda names it
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
    by_platform: dict[str, str] = field(default_factory=dict)  # packages with other releases elsewhere -> those


@dataclass(frozen=True)
class _Pin:
    """One mention of a package: a version, or the reason why there is none."""

    name: str
    version: str | None
    text: str  # as it is written in the file
    reason: str = ""
    applies: bool = True  # whether it is for the platform that is read


def read(path: Path, packages: Collection[str]) -> Lock:
    """Return the releases that are pinned by a file and by the files that it includes.

    `packages` are the packages of interest. Raises Refusal if the file cannot be read, or mentions none of them.
    """
    mentions: dict[str, list[_Pin]] = {}
    for pin in _mentions(path, ()):
        mentions.setdefault(pin.name, []).append(pin)
    lock = Lock({})
    for name, all_pins in mentions.items():
        pins = [pin for pin in all_pins if pin.applies] or all_pins
        versions = list(dict.fromkeys(pin.version for pin in pins if pin.version is not None))
        if name not in packages and not name.startswith("-"):
            lock.others.update({name: versions[0]} if len(versions) == 1 else {})
        elif reason := _why_no_release(pins, versions):
            lock.unread[name] = reason
        else:
            lock.pins[name] = versions[0]
            elsewhere = {pin.version: None for pin in all_pins if pin.version and not pin.applies}
            if different := [version for version in elsewhere if _comparable(version) != _comparable(versions[0])]:
                lock.by_platform[name] = ", ".join(different)
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
        return f"{pins[0].name} pinned to {' and to '.join(versions)}, depending on the platform or on extras"
    return None


def release_of(version: str) -> Version | None:
    """Return the release of which a version is a build; None for a pre-release, a nightly or a custom build."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return None
    if parsed.is_prerelease or (parsed.local and not _BUILDS.fullmatch(parsed.local)):
        return None
    return Version(parsed.public)


def _comparable(version: str) -> str:
    """Return a text that is the same for all builds of a release: the release, or else the version itself."""
    release = release_of(version)
    return version if release is None else str(release)


def _mentions(path: Path, including: tuple[Path, ...]) -> Iterator[_Pin]:
    with reading(path, "a lock file or requirements"):
        text = _decoded(read_whole(path))
    if text.lstrip().startswith("{"):
        with reading(path, "a Pipfile.lock"):
            yield from _of_pipfile(json.loads(text))
    elif path.suffix in (".yml", ".yaml") or path.name == "pixi.lock":
        with reading(path, "a file of conda or pixi"):
            content = yaml.safe_load(text)
        yield from _of_yaml(content if isinstance(content, dict) else {})
    elif path.suffix in (".lock", ".toml"):
        with reading(path, "a lock file or requirements"):
            yield from _of_lock(tomllib.loads(text))
    else:
        yield from _of_requirements(text, path, including)


def _is_for_platform(*markers: object) -> bool:
    """Return whether an entry with these environment markers, of which one must hold, is for the platform we read.

    An entry without markers is. So is one with a marker that cannot be evaluated, for example one about extras.
    """
    texts = [str(marker) for marker in markers if marker]
    return not texts or any(_holds(text) for text in texts)


def _holds(marker: str) -> bool:
    try:
        return Marker(marker).evaluate({**PLATFORM, "extra": ""}) or "extra" in marker
    except InvalidMarker:
        return True


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
            yield _of_line(_OPTION.sub("", f"{line} ").strip())


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


# A line that is no requirement: a row of `pip list` or `conda list`, a line of `conda list --export`, or one of
# `conda list --explicit`.
_ROW = re.compile(r"(?P<name>[A-Za-z][\w.-]*)\s+(?P<version>\d[\w.+!]*)(\s+\S+)*")
_EXPORT = re.compile(r"(?P<name>[A-Za-z][\w.-]*)=(?P<version>\d[\w.+!]*)=\w+")
_CONDA_ADDRESS = re.compile(
    r".*/(?P<platform>[\w-]+)/(?P<name>[\w.-]+)-(?P<version>[\w.!+]+)-\w+\.(conda|tar\.bz2)(#.*)?"
)


def _of_line(line: str) -> _Pin:
    for pattern in (_ROW, _EXPORT):
        if match := pattern.fullmatch(line):
            return _Pin(_name_on_pypi(match["name"]), match["version"], line)
    return _of_conda_address(line) or _of_requirement(line)


def _of_conda_address(line: str) -> _Pin | None:
    """Return the pin of the address of a package of conda; None if it is no such address."""
    match = _CONDA_ADDRESS.fullmatch(line)
    if match is None:
        return None
    return _Pin(_name_on_pypi(match["name"]), match["version"], line, applies=match["platform"] in CONDA_PLATFORMS)


def _name_on_pypi(name: str) -> str:
    """Return the name on PyPI of a package of conda."""
    return CONDA_NAMES.get(name.lower(), str(canonicalize_name(name)))


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
    applies = _is_for_platform(requirement.marker)
    if requirement.url:
        return _Pin(name, None, line, "is an address, so its release is unknown", applies)
    exact = [
        spec.version for spec in requirement.specifier if spec.operator in ("==", "===") and "*" not in spec.version
    ]
    if len(requirement.specifier) == 1 and exact:
        return _Pin(name, exact[0], line, applies=applies)
    reason = "names a range and not one release" if requirement.specifier else "names no release"
    return _Pin(name, None, line, reason, applies)


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
    """Yield the pins of a uv.lock, poetry.lock, pdm.lock or pylock.toml."""
    parts = [content[key] for key in ("package", "packages") if isinstance(content.get(key), list)]
    for entry in (entry for part in parts for entry in part if isinstance(entry, dict) and "name" in entry):
        name = str(canonicalize_name(str(entry["name"])))
        applies = _is_for_platform(*_markers(entry))
        version = entry.get("version")
        if (kinds := _kinds_of_source(entry)) or not isinstance(version, str):
            text = f"{name} ({', '.join(sorted(kinds)) or 'no version'})"
            yield _Pin(name, None, text, "is not a release of a package index", applies)
        else:
            yield _Pin(name, version, f"{name}=={version}", applies=applies)


def _markers(entry: Mapping[str, Any]) -> list[Any]:
    """Return the environment markers of a package, of which one must hold, under the names that the tools use."""
    of_uv = entry.get("resolution-markers")
    return [entry.get("marker"), entry.get("markers"), *(of_uv if isinstance(of_uv, list) else ())]


def _kinds_of_source(entry: Mapping[str, Any]) -> set[str]:
    """Return the kinds of the source of a package if it is not an index: git, url, path and so on."""
    source = entry["source"] if isinstance(entry.get("source"), dict) else {}
    if "type" in source:  # of poetry, whose type "legacy" is another index, such as PyTorch's
        return {str(source["type"])} & {"git", "url", "file", "directory"}
    return {"git", "url", "path", "directory", "editable", "virtual", "vcs", "archive"} & {*source, *entry}


def _of_pipfile(content: Mapping[str, Any]) -> Iterator[_Pin]:
    """Yield the pins of a Pipfile.lock."""
    for section in ("default", "develop"):
        entries = content.get(section)
        for name, entry in (entries if isinstance(entries, dict) else {}).items():
            name = str(canonicalize_name(str(name)))
            if kinds := {"git", "file", "path", "editable"} & {*entry}:
                text = f"{name} ({', '.join(sorted(kinds))})"
                yield _Pin(name, None, text, "is not a release of a package index")
            else:
                marker = f"; {entry['markers']}" if entry.get("markers") else ""
                yield _of_requirement(f"{name}{entry.get('version', '')}{marker}")


def _of_yaml(content: Mapping[str, Any]) -> Iterator[_Pin]:
    """Yield the pins of an environment.yml of conda, a conda-lock.yml, or a pixi.lock."""
    readers = {"dependencies": _of_environment, "package": _of_conda_lock, "packages": _of_pixi}
    for key, reader in readers.items():
        if isinstance(content.get(key), list):
            yield from reader(content[key])


def _of_environment(entries: Sequence[Any]) -> Iterator[_Pin]:
    """Yield the pins of the dependencies of an environment.yml: conda's packages, and those in its section for pip.

    Conda's names are replaced by those on PyPI.
    """
    for entry in entries:
        if isinstance(entry, dict):
            for line in entry.get("pip") or ():
                yield from _of_requirements(str(line), Path(), ())
        elif isinstance(entry, str):
            yield _of_conda_spec(entry)


# name=1.2.3, name==1.2.3, name=1.2.3=build, name 1.2.3 build, each perhaps behind the name of a channel
_CONDA_SPEC = re.compile(
    r"(.*::)?(?P<name>[\w.-]+)\s*(?P<operator>==?|\s)\s*(?P<version>\d[\w.+!]*)(?P<build>[=\s]\s*[\w.*]+)?"
)


def _of_conda_spec(entry: str) -> _Pin:
    match = _CONDA_SPEC.fullmatch(entry.strip())
    # One equals sign means all releases that begin so, so =2.5 is not one release.
    if match and (match["operator"] == "==" or match["build"] or match["version"].count(".") >= 2):
        return _Pin(_name_on_pypi(match["name"]), match["version"], entry)
    name = re.split(r"[\s<>=!~\[]", entry.rpartition("::")[2].strip())[0]
    return _Pin(_name_on_pypi(name), None, entry, "does not name a single release")


def _of_conda_lock(entries: Sequence[Any]) -> Iterator[_Pin]:
    """Yield the pins of a conda-lock.yml."""
    for entry in (entry for entry in entries if isinstance(entry, dict) and {"name", "version"} <= {*entry}):
        name, version = _name_on_pypi(str(entry["name"])), str(entry["version"])
        yield _Pin(name, version, f"{name} {version}", applies=entry.get("platform", "noarch") in CONDA_PLATFORMS)


def _of_pixi(entries: Sequence[Any]) -> Iterator[_Pin]:
    """Yield the pins of a pixi.lock."""
    for entry in (entry for entry in entries if isinstance(entry, dict)):
        if isinstance(entry.get("conda"), str):
            if pin := _of_conda_address(entry["conda"]):
                yield pin
        elif isinstance(entry.get("pypi"), str) and "name" in entry:
            name, address = str(canonicalize_name(str(entry["name"]))), entry["pypi"]
            is_release = "version" in entry and address.endswith((".whl", ".tar.gz"))
            is_elsewhere = re.search(r"macosx|win(32|_amd64|_arm64)|aarch64", address)
            yield _Pin(
                name,
                str(entry["version"]) if is_release else None,
                f"{name} ({address})",
                "is not a release of a package index",
                applies=not is_elsewhere,
            )
