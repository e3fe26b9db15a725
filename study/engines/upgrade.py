"""`zero-study upgrade OLD NEW`: what other releases change in a training, from what is known of each.

releases.json has the keys and defaults that releases ship, as tools/releases.py reads them; known_bad.json what
conformance found; threads.json the rest, most by public threads. Outside the releases of the first nothing is known.
"""

from __future__ import annotations

import json
import re
import tomllib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from study.engines import known_bad
from study.engines.known_bad import release
from study.errors import Refusal
from study.files import read_whole, reading

INDEX = Path(__file__).with_name("releases.json")
THREADS = Path(__file__).with_name("threads.json")
PIN = re.compile(r"([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*===?\s*([^\s;#,*\\]+)\s*(?:[;#\\].*)?")
# Keys that say what is written, shown or stored, or where a server runs: whatever they are, training is the same.
HARMLESS = re.compile(
    r"log_|logging_|hub_|push_to|report_to|run_name|exp_name|output_dir|save_|project|trackio_|wandb_|include_|"
    r"num_completions_to_print|vllm_(?!importance)|dataset_(num_proc|batch)|dataloader_|remove_unused|--use_xpu"
)


@dataclass(frozen=True)
class Change:
    """Something that releases of a package have, and that an upgrade brings or takes away."""

    package: str
    kind: Literal["fault", "default", "gone", "new", "pair", "unknown"]
    id: str
    summary: str
    introduced: str | None  # the first release that has it; None: it is older than all that were examined
    fixed: str | None = None  # the first one after them; None: there is none yet
    threads: Sequence[str] = ()
    date: str = ""  # of the first thread, or of the post in it that says so
    how: Literal["comes", "goes"] = "comes"
    alarms: bool = False  # something comes that trains otherwise, or nobody knows

    def is_in(self, version: str | None) -> bool:
        begins, ends = release(self.introduced or "0"), release(self.fixed or "9999")
        return version is not None and begins <= release(version) < ends

    def as_osv(self) -> dict[str, Any]:
        """The change as an entry of OSV (https://ossf.github.io/osv-schema/); versions are the package's own."""
        events = [{"introduced": self.introduced or "0"}, *([{"fixed": self.fixed}] if self.fixed else [])]
        package = {"ecosystem": "PyPI", "name": self.package}
        return {
            "schema_version": "1.7.0",
            "id": f"ZS-{self.package}-{self.id}",
            "modified": f"{self.date or index()['made']}T00:00:00Z",
            "summary": self.summary,
            "affected": [{"package": package, "ranges": [{"type": "ECOSYSTEM", "events": events}]}],
            "references": [{"type": "REPORT", "url": url} for url in self.threads],
            "database_specific": {"kind": self.kind, "how": self.how, "alarms": self.alarms},
        }


@cache
def index() -> dict[str, Any]:
    """The committed index: the day when it was made, and of each package its releases, changes and requirements."""
    return dict(json.loads(INDEX.read_text()))


@cache
def known() -> list[Change]:
    """Every fault that is known of a release: what conformance found, and what threads say."""
    found = [Change(**{**entry, "kind": "fault"}) for entry in json.loads(THREADS.read_text())]
    for fault in known_bad.read():
        later = (one for one in index()["packages"]["deepspeed"]["releases"] if release(one) > release(fault.last))
        range_of = (fault.first, next(later, None))
        found.append(Change("deepspeed", "fault", fault.id, said(fault, fault.engines), *range_of, fault.threads))
    return found


def said(fault: known_bad.Fault, engines: Sequence[str]) -> str:
    """Which trainings of these engines a fault of DeepSpeed hits, and how."""
    several = " with several micro batches" if fault.several_micro_batches else ""
    only = f", of {fault.models}" if fault.models else ""
    return f"{', '.join(engines)} in {', '.join(fault.precisions)}{several}{only}: {fault.what}"


def unknown(package: str, version: str) -> str | None:
    """Say that nothing is known of a release; None: it is within those that were examined."""
    first, *_, last = index()["packages"][package]["releases"]
    said = f"{package} {version} is unknown: {first} to {last} were examined, until {index()['made']}"
    return None if release(first) <= release(version) <= release(last) else said


def read_lock(path: Path) -> dict[str, str]:
    """Versions by package: what uv.lock (pylock.toml, poetry.lock), requirements or `pip freeze` pin of the index.

    Raises Refusal where the file cannot be read, pins none of them, or one of them at two versions.
    """
    with reading(path, "a lock file or requirements"):
        text = read_whole(path).decode()
        if path.suffix in (".lock", ".toml"):
            content = tomllib.loads(text)
            parts = [content[key] for key in ("package", "packages") if isinstance(content.get(key), list)]
            pins = [(str(x.get("name")), str(x.get("version"))) for part in parts for x in part if isinstance(x, dict)]
        else:
            pins = [(pin[1], pin[2]) for line in text.splitlines() if (pin := PIN.fullmatch(line.strip()))]
    found: dict[str, str] = {}
    for name, version in pins:
        if name.lower() in index()["packages"] and release(version):
            first = found.setdefault(name.lower(), version)
            if release(first) != release(version):
                raise Refusal(f"{path}: pins {name} at {first} and at {version}; write a file for each environment")
    if not found:
        raise Refusal(f"{path}: pins none of {', '.join(index()['packages'])}; write it as `pip freeze` does, with ==")
    return found


def compare(old: dict[str, str], new: dict[str, str]) -> list[Change]:
    """What the second set of releases changes in a training, what alarms first."""
    packages = [package for package in new if old.get(package) != new[package]]
    found = [change for package in packages for change in _of_package(package, old.get(package), new[package])]
    return sorted([*found, *_pairs(old, new)], key=lambda change: not change.alarms)


def _of_package(package: str, old: str | None, new: str) -> Iterator[Change]:
    releases = index()["packages"][package]["releases"]
    for fault in known():
        if fault.package == package and fault.is_in(old) != (comes := fault.is_in(new)):
            yield replace(fault, how="comes" if comes else "goes", alarms=comes)
    for version in filter(None, (old, new)):
        low, high = (releases[place] for place in _around(releases, version))
        if (outside := unknown(package, version)) or low != high:
            between = f"{version} was not examined: all that changes from {low} to {high} is listed"
            yield Change(package, "unknown", version, outside or between, version, alarms=bool(outside))
    if old is not None:
        yield from _of_keys(package, old, new)


def _around(releases: Sequence[str], version: str) -> tuple[int, int]:
    """The places of the examined releases around one, which are the same where it is one of them."""
    numbers = [release(one) for one in releases]
    low = bisect_right(numbers, release(version)) - 1
    return max(0, low), min(len(numbers) - 1, bisect_left(numbers, release(version)))


def _of_keys(package: str, old: str, new: str) -> Iterator[Change]:
    """What becomes of keys and defaults: what the last release between has beside the first, by key and classes."""
    entry = index()["packages"][package]
    older, newer = sorted((old, new), key=release)
    between = entry["releases"][_around(entry["releases"], older)[0] + 1 : _around(entry["releases"], newer)[1] + 1]
    ends: dict[tuple[str, str], tuple[str | None, str | None, str]] = {}
    for version, classes, key, before, after in entry["changes"]:
        for name in classes.split(",") if version in between else ():
            ends[name, key] = (ends.get((name, key), (before,))[0], after, version)
    together: dict[tuple[str, str | None, str | None, str], list[str]] = {}
    for (name, key), (before, after, version) in ends.items():
        if before != after:
            pair = (before, after) if older == old else (after, before)
            together.setdefault((key, *pair, version), []).append(name)
    for (key, was, will, version), names in together.items():
        others = f" (and of {', '.join(names[1:])})" if names[1:] else ""
        line = f"{names[0]}.{key}{others}: {was or 'not there'} -> {will or 'not there'}"
        found = Change(package, "default", f"{names[0]}-{key}", line, version, alarms=not HARMLESS.match(key))
        if will is None:
            found = replace(found, kind="gone", how="goes", alarms=False)
        yield replace(found, kind="new", alarms=False) if was is None else found


def _pairs(old: dict[str, str], new: dict[str, str]) -> Iterator[Change]:
    """Which of the new releases asks for another version of one of them, and did not so far."""
    for package, version in new.items():
        entry = index()["packages"][package]
        examined = entry["releases"][_around(entry["releases"], version)[0]]
        for other, lowest in entry["requires"].get(examined, {}).items():
            is_new = (old.get(package), old.get(other)) != (version, new.get(other))
            if is_new and other in new and release(new[other]) < release(lowest):
                line = f"{version} asks for {other}>={lowest}, and {other} is {new[other]}"
                yield Change(package, "pair", f"{version}-{other}", line, version, alarms=True)


def text(changes: Sequence[Change], old: dict[str, str], new: dict[str, str]) -> str:
    """One line a change, keys that are gone or new in one line each, under the two releases of their package."""
    lines = [f"What is pinned, and compared: {', '.join(new)}"]
    for package in (package for package in index()["packages"] if old.get(package) != new.get(package)):
        lines.append(f"{package} {old.get(package, '(none)')} -> {new.get(package, '(none)')}")
        mine = [change for change in changes if change.package == package]
        shown = [change for change in mine if change.kind not in ("gone", "new")]
        lines += [f"{'!' if one.alarms else ' '} {one.kind:7} {one.how:5}  {one.summary}" for one in shown]
        for kind in ("gone", "new"):
            if keys := [change.summary.partition(":")[0] for change in mine if change.kind == kind]:
                lines.append(f"  {kind:7} {len(keys):5}  {', '.join(keys[:6])}{', ...' * (len(keys) > 6)}")
    alarms = sum(change.alarms for change in changes)
    return "\n".join([*lines, f"{alarms} of {len(changes)} changes (!) may train otherwise, or are unknown"])
