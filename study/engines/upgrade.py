"""`zero-study upgrade OLD NEW`: what other releases change in a training, from what is known of each.

releases.json has the keys and defaults that releases ship, as tools/releases.py reads them; known_bad.json what
conformance found; threads.json the rest, most by public threads. Outside the releases of the first nothing is known.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from . import known_bad, locks
from .known_bad import release
from .locks import Lock

INDEX = Path(__file__).with_name("releases.json")
THREADS = Path(__file__).with_name("threads.json")
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
    beside: Mapping[str, str] = field(default_factory=dict)  # other packages that have to be there, and which releases

    def is_in(self, version: str | None) -> bool:
        """Say whether a release of the package has this, whatever is installed beside it."""
        begins, ends = release(self.introduced or "0"), release(self.fixed or "9999")
        return version is not None and begins <= release(version) < ends

    def is_among(self, pins: Mapping[str, str]) -> bool:
        """Say whether these releases have this together."""
        return self.is_in(pins.get(self.package)) and all(
            package in pins and SpecifierSet(asked).contains(Version(".".join(map(str, release(pins[package])))))
            for package, asked in self.beside.items()
        )

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
    """Say that nothing is known of a version, and why; None if it was examined, or lies between two that were."""
    first, *_, last = index()["packages"][package]["releases"]
    if locks.release_of(version) is None:
        return f"{package} {version} is no final release, so nothing is known of it"
    said = f"{package} {version} is unknown: {first} to {last} were examined, until {index()['made']}"
    return None if release(first) <= release(version) <= release(last) else said


def read_lock(path: Path) -> Lock:
    """Read what a file pins of the packages in the index. Raises Refusal as `locks.read` does."""
    return locks.read(path, tuple(index()["packages"]))


def not_compared(old: Lock, new: Lock) -> list[str]:
    """Say of each package that is in a file and cannot be compared why; what both files have alike is no change."""
    said = []
    for name in dict.fromkeys([*old.unread, *new.unread]):
        if old.unread.get(name) != new.unread.get(name) or name in {*old.pins, *new.pins}:
            files = (("OLD", old), ("NEW", new))
            said.append("; ".join(f"{which} has {lock.unread[name]}" for which, lock in files if name in lock.unread))
    return said


def compare(old: Mapping[str, str], new: Mapping[str, str]) -> list[Change]:
    """List what the second set of releases changes in a training, what alarms first."""
    found = [
        replace(fault, how="comes" if comes else "goes", alarms=comes)
        for fault in known()
        if fault.is_among(old) != (comes := fault.is_among(new))
    ]
    for package in (package for package in new if old.get(package) != new[package]):
        found += _of_package(package, old.get(package), new[package])
    return sorted([*found, *_pairs(old, new)], key=lambda change: not change.alarms)


def _of_package(package: str, old: str | None, new: str) -> Iterator[Change]:
    releases = index()["packages"][package]["releases"]
    for version in filter(None, (old, new)):
        low, high = (releases[place] for place in _around(releases, version))
        if (outside := unknown(package, version)) or low != high:
            between = f"{package} {version} was not examined, only {low} and {high} around it"
            yield Change(package, "unknown", version, outside or between, version, alarms=True)
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
    examined = entry["releases"]
    between = examined[_around(examined, older)[0] + 1 : _around(examined, newer)[1] + 1]
    # A change that was first seen in a release lies after the one that was examined before it: not always within these.
    certain = {
        version
        for before, version in pairwise(examined)
        if release(older) <= release(before) and release(version) <= release(newer)
    }
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
        if version not in certain:
            line += f" (somewhere after {examined[examined.index(version) - 1]} and until {version}: perhaps not here)"
        alarms = version in certain and not HARMLESS.match(key)
        found = Change(package, "default", f"{names[0]}-{key}", line, version, alarms=alarms)
        if will is None:
            found = replace(found, kind="gone", how="goes", alarms=False)
        yield replace(found, kind="new", alarms=False) if was is None else found


def _pairs(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    """Which of the new releases asks for another version of one of them, and did not so far."""
    for package, version in new.items():
        entry = index()["packages"][package]
        examined = entry["releases"][_around(entry["releases"], version)[0]]
        for other, lowest in entry["requires"].get(examined, {}).items():
            is_new = (old.get(package), old.get(other)) != (version, new.get(other))
            if is_new and other in new and release(new[other]) < release(lowest):
                line = f"{version} asks for {other}>={lowest}, and {other} is {new[other]}"
                yield Change(package, "pair", f"{version}-{other}", line, version, alarms=True)


def text(changes: Sequence[Change], old: Lock, new: Lock, width: int | None = None) -> str:
    """Say what changes: the summary first, then a line for each change under the two releases of its package.

    `width`: of the lines, in characters; None: the terminal's.
    """
    width = width or shutil.get_terminal_size((80, 24)).columns
    gone = [package for package in old.pins if package not in new.pins and package not in new.unread]
    missing = not_compared(old, new) + [f"{package} {old.pins[package]} is in OLD and not in NEW" for package in gone]
    alarms = sum(change.alarms for change in changes)
    lines = [f"{alarms} of {len(changes)} changes may train otherwise, or are unknown (marked !)"]
    if missing:
        lines += [f"{len(missing)} not compared:", *(f"! {line}" for line in missing)]
    lines.append(f"compared: {', '.join(package for package in new.pins if package in old.pins) or 'nothing'}")
    for package in (package for package in index()["packages"] if package in {*old.pins, *new.pins}):
        was, will = (lock.pins.get(package, "not pinned") for lock in (old, new))
        if was == will:
            continue
        lines.append(f"{package} {was} -> {will}")
        mine = [change for change in changes if change.package == package]
        shown = [change for change in mine if change.kind not in ("gone", "new")]
        for one in shown:
            how = "there" if package in old.unread else one.how  # nobody knows whether it was there before
            lines.append(f"{'!' if one.alarms else ' '} {one.kind:7} {how:5}  {one.summary}")
        for kind in ("gone", "new"):
            if keys := [change.summary.partition(":")[0] for change in mine if change.kind == kind]:
                lines.append(f"  {kind:7} {len(keys):5}  {', '.join(keys[:6])}{', ...' * (len(keys) > 6)}")
    others = [name for name in {**old.others, **new.others} if old.others.get(name) != new.others.get(name)]
    if others:
        shown_others = ", ".join(sorted(others)[:12]) + ", ..." * (len(others) > 12)
        lines.append(f"not in the index, and so not compared: {shown_others}")
    wrapped = (textwrap.fill(line, width, subsequent_indent=" " * 17, break_on_hyphens=False) for line in lines)
    return "\n".join(wrapped)


def is_fine(changes: Sequence[Change], old: Lock, new: Lock) -> bool:
    """Say whether everything could be compared, and nothing comes that trains otherwise."""
    return not (any(change.alarms for change in changes) or not_compared(old, new) or {*old.pins} - {*new.pins})
