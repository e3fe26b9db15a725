"""Read which releases an environment pins: from lock files, requirements, lists of packages, and files of conda.

Nothing is guessed. If a line about a package of interest does not name one release, the line is kept with the reason,
so that a comparison of two files can say what was not compared. A file that pins a package by platform is read for
Linux on x86_64. A file that pins it by the version of Python is read for every version, not for the one that runs this
program. The format of a file is recognized by its content, because people give lock files any name.
"""

from __future__ import annotations

import codecs
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml
from packaging.markers import InvalidMarker, Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from ..errors import Refusal
from ..files import parse_json, read_whole, reading
from ..terminal import printable

# The platform whose pins are read.
PLATFORM = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"}
CONDA_PLATFORMS = ("linux-64", "noarch")  # the same platform, as conda names it
CONDA_NAMES = {"pytorch": "torch", "pytorch-cpu": "torch", "pytorch-gpu": "torch"}
# Versions of Python for which a file is read. A marker can name a patch release, so each has an early and a late one.
PYTHONS = tuple(f"3.{minor}.{patch}" for minor in range(8, 17) for patch in (0, 30))
# Local parts of a version that only name a build of a release, as in the indexes of PyTorch and NVIDIA, and in the
# wheels of flash-attn.
_BUILDS = re.compile(
    r"cpu|xpu|cu\d+|cuda[\d.]*|rocm[\d.]+|cxx11[.]?abi|pt[\d.]+|cu\d+torch[\d.]+(cxx11abi(true|false))?", re.IGNORECASE
)
# A text that names unchangeable content: a commit of git, or a hash of an archive.
_UNCHANGEABLE = re.compile(r"[0-9a-f]{40}|sha256[:=][0-9a-f]{64}")
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
    # Packages in `unread` whose content is nevertheless known: if it is the same in two files, nothing changes.
    fixed: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)  # packages that are only for other platforms -> releases


class PinsNothing(Refusal):
    """A lock file can be read, and has none of the packages of interest."""


@dataclass(frozen=True)
class _Pin:
    """One mention of a package: a version, or the reason why there is none."""

    name: str
    version: str | None
    text: str  # as it is written in the file
    reason: str = ""
    pythons: frozenset[str] = frozenset(PYTHONS)  # versions of Python it is for, on the platform that is read


def read(path: Path, packages: Collection[str], python: str | None = None) -> Lock:
    """Return the releases that are pinned by a file and by the files that it includes.

    `packages` are the packages of interest. `python` is the version of Python for which markers are evaluated, such as
    3.12; None: all versions. Raises Refusal if the file cannot be read, or mentions none of the packages.
    """
    mentions: dict[str, list[_Pin]] = {}
    for pin in _mentions(path, ()):
        clean = replace(pin, name=printable(pin.name), text=printable(pin.text), reason=printable(pin.reason))
        clean = replace(clean, version=None if pin.version is None else printable(pin.version))
        mentions.setdefault(clean.name, []).append(clean)
    lock = Lock({})
    for name, pins in mentions.items():
        _add(lock, name, pins, name in packages or name.startswith("-"), _chosen_pythons(python))
    if not (lock.pins or lock.unread or lock.elsewhere):
        raise PinsNothing(
            f"{path}: this file pins none of {', '.join(packages)}. Name a lock file, or a file with "
            "exact releases (==) as `pip freeze` prints."
        )
    return lock


def _chosen_pythons(python: str | None) -> list[str]:
    """Return the versions of Python for which a file is read. Raises Refusal if `python` is not a version."""
    if python is None:
        return list(PYTHONS)
    if not re.fullmatch(r"3\.\d{1,2}(\.\d{1,2})?", python):
        raise Refusal(f"--python {python}: this is not a version of Python. Write for instance 3.12.")
    minor = ".".join(python.split(".")[:2])
    chosen = [version for version in PYTHONS if version.rpartition(".")[0] == minor]
    if not chosen:
        raise Refusal(f"--python {python}: only versions from 3.8 to 3.16 are known. Name one of them.")
    return chosen[:1] if python.endswith(".0") else chosen[1:] if python.count(".") == 2 else chosen


def _add(lock: Lock, name: str, all_pins: Sequence[_Pin], is_of_interest: bool, pythons: Sequence[str]) -> None:
    """Add the mentions of a package, or of an included file, to a lock."""
    pins = [pin for pin in all_pins if not pin.pythons.isdisjoint(pythons)]
    elsewhere = list(dict.fromkeys(pin.version or pin.text for pin in all_pins if not pin.pythons))
    versions = list(dict.fromkeys(pin.version for pin in pins if pin.version is not None))
    if not is_of_interest:
        lock.others.update({name: versions[0]} if len(versions) == 1 else {})
    elif not pins:
        lock.elsewhere.update({name: ", ".join(elsewhere)} if elsewhere else {})
    elif reason := _why_no_release(pins, versions, pythons):
        lock.unread[name] = reason
        if all(pin.version or _UNCHANGEABLE.search(pin.text) for pin in pins):
            lock.fixed[name] = " ".join(sorted(f"{pin.version or pin.text} {sorted(pin.pythons)}" for pin in pins))
    else:
        lock.pins[name] = versions[0]
        different = [version for version in elsewhere if _comparable(version) != _comparable(versions[0])]
        lock.by_platform.update({name: ", ".join(different)} if different else {})


def _why_no_release(pins: Sequence[_Pin], versions: Sequence[str], pythons: Sequence[str]) -> str | None:
    """Return why the mentions of a package do not name one release; None if they do."""
    if unplaced := next((pin for pin in pins if pin.version is None), None):
        return f'"{unplaced.text}", which {unplaced.reason}'
    if len(set(map(_comparable, versions))) == 1:
        return None
    by_python = [{_comparable(pin.version or "") for pin in pins if python in pin.pythons} for python in pythons]
    pinned = f"{pins[0].name} pinned to {' and to '.join(versions)}"
    if all(len(releases) <= 1 for releases in by_python):
        return f"{pinned}, depending on the version of Python (name yours with --python)"
    return f"{pinned}, depending on the platform or on extras"


def release_of(version: str) -> Version | None:
    """Return the release to which a version belongs. None for a pre-release, a nightly or a custom build."""
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
    if re.match(r"\s*(\{|\[\s*\{)", text):
        with reading(path, "a Pipfile.lock, or a list of packages in JSON"):
            content = parse_json(text)
        yield from _of_list(content) if isinstance(content, list) else _of_pipfile(content)
    elif _is_yaml(path, text):
        with reading(path, "a file of conda or pixi"):
            content = _shallow(yaml.safe_load, text)
        yield from _of_yaml(content if isinstance(content, dict) else {}, path, including)
    elif _is_toml(text) or (path.suffix in (".lock", ".toml") and not _has_requirements(text)):
        with reading(path, "a lock file or requirements"):
            content = _shallow(tomllib.loads, text)
        yield from _of_lock(content)
    else:
        yield from _of_requirements(text, path, including)


def _shallow(parse: Callable[[str], Any], text: str) -> Any:
    """Parse a text. Raises ValueError if it is nested too deeply for the parser."""
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _is_yaml(path: Path, text: str) -> bool:
    """Return whether a file is one of conda or pixi, by its name, or by a top-level key that lists packages."""
    has_yaml_name = path.suffix in (".yml", ".yaml") or path.name == "pixi.lock"
    return has_yaml_name or bool(re.search(r"^(dependencies|package|packages):\s*$", text, re.MULTILINE))


def _is_toml(text: str) -> bool:
    """Return whether a text lists packages as uv, Poetry, PDM and pip do in their lock files."""
    return bool(re.search(r"^\s*\[\[packages?\]\]\s*(#.*)?$", text, re.MULTILINE))


def _has_requirements(text: str) -> bool:
    """Return whether a line of a text is a requirement, or an option of pip."""
    return bool(re.search(r"^(-[-\w]|[A-Za-z][\w.-]*(\[[\w, .-]*\])?\s*([=<>~!]=|[<>@;]|$))", text, re.MULTILINE))


def _for_pythons(*markers: object) -> frozenset[str]:
    """Return the versions of Python for which an entry applies on the platform that is read.

    `markers` are its environment markers, of which one must hold. An entry without markers applies to all. So does one
    with a marker that cannot be evaluated, for example one about extras.
    """
    texts = [str(marker) for marker in markers if marker]
    if not texts:
        return frozenset(PYTHONS)
    return frozenset(python for python in PYTHONS if any(_holds(text, python) for text in texts))


@cache
def _holds(marker: str, python: str) -> bool:
    environment = {**PLATFORM, "extra": "", "python_full_version": python, "python_version": python.rpartition(".")[0]}
    try:
        return Marker(marker).evaluate(environment) or "extra" in marker
    except (InvalidMarker, UndefinedComparison, UndefinedEnvironmentName, ValueError):
        return True


def _for_conda(platform: object) -> frozenset[str]:
    """Return the versions of Python for which a package for a platform of conda applies: all of them, or none."""
    return frozenset(PYTHONS if platform in CONDA_PLATFORMS else ())


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
        yield from _of_include(value or option[2:], path, including)  # -rmore.txt


def _of_include(value: str, path: Path, including: tuple[Path, ...]) -> Iterator[_Pin]:
    """Yield the pins of an included file, or a mention of the file if it cannot be read."""
    unread = _Pin(f"-r {value}", None, f"-r {value}", "cannot be read, so the releases in it are unknown")
    if "://" in value:
        yield unread
        return
    try:
        included = (path.parent / value).resolve()
        if included not in (*including, path.resolve()):
            yield from list(_mentions(included, (*including, path.resolve())))
    except (OSError, Refusal, ValueError, RuntimeError):  # not there, no file, no text, or links in a circle
        yield unread


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
    return _Pin(_name_on_pypi(match["name"]), match["version"], line, pythons=_for_conda(match["platform"]))


def _name_on_pypi(name: str) -> str:
    """Return the name on PyPI of a package of conda."""
    return CONDA_NAMES.get(name.lower(), str(canonicalize_name(name)))


def _of_requirement(line: str) -> _Pin:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        if line.endswith(".whl") or "/" in line:
            version = _version_of_archive(line)
            return _Pin(_name_of_address(line), version, line, "is a file or an address, so its release is unknown")
        first_word = re.match(r"[\w.-]+", line)
        name = str(canonicalize_name(first_word[0])) if first_word else line
        return _Pin(name, None, line, "cannot be read as a requirement")
    name = str(canonicalize_name(requirement.name))
    pythons = _for_pythons(requirement.marker)
    if requirement.url:
        version = _version_of_archive(requirement.url)
        return _Pin(name, version, line, "is an address, so its release is unknown", pythons)
    exact = [
        spec.version for spec in requirement.specifier if spec.operator in ("==", "===") and "*" not in spec.version
    ]
    if len(requirement.specifier) == 1 and exact:
        return _Pin(name, exact[0], line, pythons=pythons)
    reason = "names a range and not one release" if requirement.specifier else "names no release"
    return _Pin(name, None, line, reason, pythons)


def _name_of_address(address: str) -> str:
    """Return the name of the package at an address: from `#egg=`, a wheel's name, or the last part of the path."""
    if egg := re.search(r"[#&]egg=([\w.-]+)", address):
        return str(canonicalize_name(egg[1]))
    place = re.split(r"[#?@]", address.rpartition("://")[2] or address)[0]
    last: str = place.rstrip("/").rpartition("/")[2]
    with suppress(InvalidWheelFilename, InvalidVersion):
        return str(parse_wheel_filename(unquote(last))[0])
    with suppress(InvalidSdistFilename, InvalidVersion):
        return str(parse_sdist_filename(unquote(last))[0])
    return str(canonicalize_name(re.sub(r"(\.git|\.zip|\.tar\.gz)$", "", last) or address))


def _version_of_archive(address: str) -> str | None:
    """Return the release that the name of a wheel or of a source archive states; None for any other address.

    pip refuses an archive whose content has another version than its name.
    """
    name = unquote(re.split(r"[#?]", address)[0].rpartition("/")[2])
    with suppress(InvalidWheelFilename, InvalidVersion):
        return str(parse_wheel_filename(name)[1])
    with suppress(InvalidSdistFilename, InvalidVersion):
        return str(parse_sdist_filename(name)[1])
    return None


# ---------------------------------------------------------------- lock files, and conda


def _of_lock(content: Mapping[str, Any]) -> Iterator[_Pin]:
    """Yield the pins of a uv.lock, poetry.lock, pdm.lock or pylock.toml."""
    parts = [content[key] for key in ("package", "packages") if isinstance(content.get(key), list)]
    for entry in (entry for part in parts for entry in part if isinstance(entry, dict) and "name" in entry):
        name = str(canonicalize_name(str(entry["name"])))
        # One of the environment markers must hold. The tools write them under different names.
        of_uv = entry.get("resolution-markers")
        markers = (entry.get("marker"), entry.get("markers"), *(of_uv if isinstance(of_uv, list) else ()))
        pythons = _for_pythons(*markers)
        version = entry.get("version")
        if (kinds := _kinds_of_source(entry)) or not isinstance(version, str):
            text = f"{name} ({', '.join(sorted(kinds)) or 'no version'}{_commit_of(entry)})"
            yield _Pin(name, None, text, "is not a release of a package index", pythons)
        else:
            yield _Pin(name, version, f"{name}=={version}", pythons=pythons)


def _commit_of(entry: Mapping[str, Any]) -> str:
    """Return the commit or hash that an entry of a lock file names, after a space; an empty text if it names none."""
    match = _UNCHANGEABLE.search(f"{entry.get('source', '')} {entry.get('vcs', '')} {entry.get('archive', '')}")
    return f" {match[0]}" if match else ""


def _kinds_of_source(entry: Mapping[str, Any]) -> set[str]:
    """Return the kinds of the source of a package if it is not an index: git, url, path and so on."""
    source = entry["source"] if isinstance(entry.get("source"), dict) else {}
    if "type" in source:  # of poetry, whose type "legacy" is another index, such as PyTorch's
        return {str(source["type"])} & {"git", "url", "file", "directory"}
    return {"git", "url", "path", "directory", "editable", "virtual", "vcs", "archive"} & {*source, *entry}


def _of_list(entries: Sequence[Any]) -> Iterator[_Pin]:
    """Yield the pins of the output of `pip list --format json` or `conda list --json`."""
    for entry in (entry for entry in entries if isinstance(entry, dict) and "name" in entry):
        name, version = _name_on_pypi(str(entry["name"])), entry.get("version")
        is_text = isinstance(version, str)
        yield _Pin(name, version if is_text else None, f"{name} {version}", "names no release")


def _of_pipfile(content: Mapping[str, Any]) -> Iterator[_Pin]:
    """Yield the pins of a Pipfile.lock."""
    for section in ("default", "develop"):
        entries = content.get(section)
        for name, entry in (entries if isinstance(entries, dict) else {}).items():
            entry = entry if isinstance(entry, dict) else {}
            name = str(canonicalize_name(str(name)))
            if kinds := {"git", "file", "path", "editable"} & {*entry}:
                text = f"{name} ({', '.join(sorted(kinds))})"
                yield _Pin(name, None, text, "is not a release of a package index")
            else:
                marker = f"; {entry['markers']}" if entry.get("markers") else ""
                yield _of_requirement(f"{name}{entry.get('version', '')}{marker}")


def _of_yaml(content: Mapping[str, Any], path: Path, including: tuple[Path, ...]) -> Iterator[_Pin]:
    """Yield the pins of an environment.yml of conda, a conda-lock.yml, or a pixi.lock."""
    if isinstance(content.get("dependencies"), list):
        yield from _of_environment(content["dependencies"], path, including)
    for key, reader in {"package": _of_conda_lock, "packages": _of_pixi}.items():
        if isinstance(content.get(key), list):
            yield from reader(content[key])


def _of_environment(entries: Sequence[Any], path: Path, including: tuple[Path, ...]) -> Iterator[_Pin]:
    """Yield the pins of the dependencies of an environment.yml: conda's packages, and those in its section for pip.

    Conda's names are replaced by those on PyPI.
    """
    for entry in entries:
        if isinstance(entry, dict):
            lines = entry.get("pip")
            for line in lines if isinstance(lines, list) else ():
                yield from _of_requirements(str(line), path, including)
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
        yield _Pin(name, version, f"{name} {version}", pythons=_for_conda(entry.get("platform", "noarch")))


def _of_pixi(entries: Sequence[Any]) -> Iterator[_Pin]:
    """Yield the pins of a pixi.lock."""
    for entry in (entry for entry in entries if isinstance(entry, dict)):
        if isinstance(entry.get("conda"), str):
            if pin := _of_conda_address(entry["conda"]):
                yield pin
        elif isinstance(entry.get("pypi"), str) and "name" in entry:
            name, address = str(canonicalize_name(str(entry["name"]))), entry["pypi"]
            is_release = "version" in entry and address.endswith((".whl", ".tar.gz"))
            is_elsewhere = re.search(r"macosx|win(32|_amd64|_arm64)|aarch64", address) is not None
            yield _Pin(
                name,
                str(entry["version"]) if is_release else None,
                f"{name} ({address})",
                "is not a release of a package index",
                pythons=frozenset(() if is_elsewhere else PYTHONS),
            )
