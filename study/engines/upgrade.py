"""List what an upgrade of the engines changes in a training: `zero-study upgrade OLD NEW`.

Three files contain what is known about releases. releases.json has the keys and defaults that each release ships, as
tools/releases.py reads them. known_bad.json has the faults that conformance runs found. threads.json has the other
faults, most of them from public threads. Nothing is known about releases that are not in releases.json.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from packaging.specifiers import SpecifierSet

from .. import terminal
from . import known_bad, locks
from .known_bad import base_release
from .locks import Lock

INDEX = Path(__file__).with_name("releases.json")
THREADS = Path(__file__).with_name("threads.json")
# Keys that say what is logged, displayed or stored, or where a server runs. Their values do not change the training.
HARMLESS = re.compile(
    r"log_|logging_|hub_|push_to|report_to|run_name|exp_name|output_dir|save_|project|trackio_|wandb_|include_|"
    r"num_completions_to_print|vllm_(?!importance)|dataset_(num_proc|batch)|dataloader_|remove_unused|--use_xpu"
)


@dataclass(frozen=True)
class Change:
    """A property of releases of a package that an upgrade adds or removes."""

    package: str
    kind: Literal["fault", "default", "gone", "new", "pair", "unknown"]
    id: str
    summary: str
    introduced: str | None  # the first release that has it; None: it is older than all that were examined
    fixed: str | None = None  # the first release without it again; None: there is none yet
    threads: Sequence[str] = ()
    date: str = ""  # of the first thread, or of the post in it that reports this
    how: Literal["comes", "goes"] = "comes"
    alarms: bool = False  # the upgrade may affect training, or its effect is unknown
    beside: Mapping[str, str] = field(default_factory=dict)  # releases of other packages that must also be installed

    def is_in(self, version: str | None) -> bool:
        """Return whether a release of the package has this property, regardless of other packages."""
        first, end = base_release(self.introduced or "0"), base_release(self.fixed or "9999")
        return version is not None and first <= base_release(version) < end

    def is_among(self, pins: Mapping[str, str]) -> bool:
        """Return whether a set of releases has this property, including its conditions on other packages."""
        return self.is_in(pins.get(self.package)) and all(
            package in pins and base_release(pins[package]) in SpecifierSet(required)
            for package, required in self.beside.items()
        )

    def as_osv(self) -> dict[str, Any]:
        """Return the change as an entry of OSV (https://ossf.github.io/osv-schema/), with versions of the package."""
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
    """Return the committed index: its date, and the releases, changes and requirements of each package."""
    return dict(json.loads(INDEX.read_text()))


@cache
def known_faults() -> list[Change]:
    """Return all known faults of releases: those that conformance found, and those in threads.json."""
    faults = [Change(**{**entry, "kind": "fault"}) for entry in json.loads(THREADS.read_text())]
    releases = index()["packages"]["deepspeed"]["releases"]
    for fault in known_bad.read():
        fixed = next((version for version in releases if base_release(version) > base_release(fault.last)), None)
        summary = fault_summary(fault, fault.engines)
        faults.append(Change("deepspeed", "fault", fault.id, summary, fault.first, fixed, fault.threads))
    return faults


def fault_summary(fault: known_bad.Fault, engines: Sequence[str]) -> str:
    """Return a text on which trainings of these engines a fault of DeepSpeed affects, and how."""
    several = " with several micro batches" if fault.several_micro_batches else ""
    only = f", only for {fault.models}" if fault.models else ""
    return f"{', '.join(engines)} in {', '.join(fault.precisions)}{several}{only}: {fault.what}"


def why_unknown(package: str, version: str) -> str | None:
    """Return why nothing is known about a version; None if it is an examined release or between two of them."""
    first, *_, last = index()["packages"][package]["releases"]
    if locks.release_of(version) is None:
        return f"{package} {version} is not a final release, so nothing is known about it"
    if base_release(first) <= base_release(version) <= base_release(last):
        return None
    return f"{package} {version} is unknown: releases {first} to {last} were examined, on {index()['made']}"


def read_lock(path: Path) -> Lock:
    """Return the releases that a file pins, for the packages in the index. Raises Refusal as `locks.read` does."""
    return locks.read(path, tuple(index()["packages"]))


def not_compared(old: Lock, new: Lock) -> list[str]:
    """Return a text for each package of the files that cannot be compared, with the reason.

    Packages with equal entries in both files are left out, because the upgrade does not change them.
    """
    reasons = []
    for name in dict.fromkeys([*old.unread, *new.unread]):
        if old.unread.get(name) != new.unread.get(name) or name in {*old.pins, *new.pins}:
            sides = (("OLD", old), ("NEW", new))
            reasons.append("; ".join(f"{side} has {lock.unread[name]}" for side, lock in sides if name in lock.unread))
    return reasons


def compare(old: Mapping[str, str], new: Mapping[str, str]) -> list[Change]:
    """Return what changes for a training if packages are upgraded from the releases `old` to `new`.

    Those that may affect training come first.
    """
    changes = [
        replace(fault, how="comes" if comes else "goes", alarms=comes)
        for fault in known_faults()
        if fault.is_among(old) != (comes := fault.is_among(new))
    ]
    for package in (package for package in new if old.get(package) != new[package]):
        changes += _unknown_releases(package, old.get(package), new[package])
        if package in old:
            changes += _changed_keys(package, old[package], new[package])
    return sorted([*changes, *_new_conflicts(old, new)], key=lambda change: not change.alarms)


def _unknown_releases(package: str, old: str | None, new: str) -> Iterator[Change]:
    """Yield a change for each of the two versions of a package if that version was not examined."""
    releases = index()["packages"][package]["releases"]
    for version in filter(None, (old, new)):
        low, high = (releases[position] for position in _examined_around(releases, version))
        if (reason := why_unknown(package, version)) or low != high:
            between = f"{package} {version} itself was not examined, only the releases {low} and {high} around it"
            yield Change(package, "unknown", version, reason or between, version, alarms=True)


def _examined_around(releases: Sequence[str], version: str) -> tuple[int, int]:
    """Return the positions of the examined releases before and after a version; twice its own if it was examined."""
    examined = [base_release(release) for release in releases]
    low = bisect_right(examined, base_release(version)) - 1
    return max(0, low), min(len(examined) - 1, bisect_left(examined, base_release(version)))


class _KeyChange(NamedTuple):
    """The value of a key of a class before and after an upgrade; None if the class has no such key."""

    key: str
    before: str | None
    after: str | None
    version: str  # the examined release in which it changed last


def _changed_keys(package: str, old: str, new: str) -> Iterator[Change]:
    """Yield the changes of keys and defaults between two versions. Classes with the same change share one item."""
    releases = index()["packages"][package]["releases"]
    older, newer = sorted((old, new), key=base_release)
    first, last = _examined_around(releases, older)[0], _examined_around(releases, newer)[1]
    # A change was made somewhere between the release in which it was first seen and the one examined before that. If
    # both are between the two versions, the upgrade has the change; else it may have it.
    certain = {
        version
        for previous, version in pairwise(releases)
        if base_release(older) <= base_release(previous) and base_release(version) <= base_release(newer)
    }
    for change, classes in _net_changes(package, releases[first + 1 : last + 1]).items():
        if older != old:
            change = change._replace(before=change.after, after=change.before)
        previous = releases[releases.index(change.version) - 1]
        yield _as_change(package, change, classes, previous, change.version in certain)


def _net_changes(package: str, between: Sequence[str]) -> dict[_KeyChange, list[str]]:
    """Return the net change of each key over these releases, with the classes that have the key."""
    ends: dict[tuple[str, str], _KeyChange] = {}
    for version, classes, key, before, after in index()["packages"][package]["changes"]:
        for name in classes.split(",") if version in between else ():
            first = ends.get((name, key), _KeyChange(key, before, after, version))
            ends[name, key] = _KeyChange(key, first.before, after, version)
    by_change: dict[_KeyChange, list[str]] = {}
    for (name, _), change in ends.items():
        if change.before != change.after:
            by_change.setdefault(change, []).append(name)
    return by_change


def _as_change(package: str, change: _KeyChange, classes: Sequence[str], previous: str, is_certain: bool) -> Change:
    """Return the change of a key, with its summary.

    `previous` is the release that was examined before the one in which the key changed.
    """
    key, before, after, version = change
    other_classes = f" (also of {', '.join(classes[1:])})" if classes[1:] else ""
    line = f"{classes[0]}.{key}{other_classes}: {before or 'missing'} -> {after or 'missing'}"
    if not is_certain:
        line += f" (it changed between {previous} and {version}, so perhaps not in this upgrade)"
    alarms = is_certain and not HARMLESS.match(key)
    change_of_default = Change(package, "default", f"{classes[0]}-{key}", line, version, alarms=alarms)
    if before is None:
        return replace(change_of_default, kind="new", alarms=False)
    if after is None:
        return replace(change_of_default, kind="gone", how="goes", alarms=False)
    return change_of_default


def _new_conflicts(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    """Yield a change for each new release that requires a higher version of another package than the pinned one.

    Conflicts that existed before the upgrade are left out.
    """
    for package, version in new.items():
        entry = index()["packages"][package]
        examined = entry["releases"][_examined_around(entry["releases"], version)[0]]
        for required, lowest in entry["requires"].get(examined, {}).items():
            is_new = (old.get(package), old.get(required)) != (version, new.get(required))
            if is_new and required in new and base_release(new[required]) < base_release(lowest):
                line = f"{package} {version} requires {required}>={lowest}, but {required} is {new[required]}"
                yield Change(package, "pair", f"{version}-{required}", line, version, alarms=True)


# ---------------------------------------------------------------- in words


def text(changes: Sequence[Change], old: Lock, new: Lock, width: int | None = None) -> str:
    """Return the changes for a terminal: the summary first, then the changes under the two releases of each package.

    `width` is the maximum length of lines in characters; None means the width of the terminal.
    """
    columns = width or terminal.width()
    lines = [terminal.wrapped(line, columns=columns) for line in _summary(changes, old, new)]
    if missing := _not_compared_packages(old, new):
        lines += ["", "Not compared:"]
        lines += [terminal.wrapped(line, "  - ", "    ", columns) for line in missing]
    for package in (package for package in index()["packages"] if package in {*old.pins, *new.pins}):
        lines += _lines_of_package(
            package, [change for change in changes if change.package == package], old, new, columns
        )
    if names := _other_packages(old, new):
        line = f"These packages also differ. Nothing is known about their releases: {_shortened(names, 12)}."
        lines += ["", terminal.wrapped(line, columns=columns)]
    return "\n".join(lines)


def _summary(changes: Sequence[Change], old: Lock, new: Lock) -> list[str]:
    """Return lines with the number of changes, the number of unexamined releases, and the compared packages."""
    known = [change for change in changes if change.kind != "unknown"]
    affecting = sum(change.alarms for change in known)
    number = f"{len(known)} known change{'s' * (len(known) != 1)}"
    lines = [f"{affecting} of {number} between these files may affect training."]
    unexamined = len(changes) - len(known)
    if unexamined:
        lines.append(
            "1 release was not examined, so it may have other changes."
            if unexamined == 1
            else f"{unexamined} releases were not examined, so they may have other changes."
        )
    if missing := len(_not_compared_packages(old, new)):
        lines.append(
            "1 package could not be compared." if missing == 1 else f"{missing} packages could not be compared."
        )
    compared = [package for package in new.pins if package in old.pins]
    lines.append(f"Compared packages: {', '.join(compared) or 'none'}.")
    return lines


def _not_compared_packages(old: Lock, new: Lock) -> list[str]:
    """Return a text for each package that could not be compared, with the reason."""
    removed = [package for package in old.pins if package not in new.pins and package not in new.unread]
    return not_compared(old, new) + [f"{package} {old.pins[package]} is in OLD but not in NEW" for package in removed]


# How a change begins in the text, by its kind and its direction.
_LABELS = {
    ("fault", "comes"): "New fault",
    ("fault", "goes"): "Fault no longer present",
    ("fault", "there"): "Fault in NEW, perhaps also in OLD",
    ("default", "comes"): "Changed default",
    ("pair", "comes"): "Releases that do not fit together",
    ("unknown", "comes"): "Not examined",
}


def _lines_of_package(package: str, changes: Sequence[Change], old: Lock, new: Lock, columns: int) -> list[str]:
    """Return a heading with both releases, then the changes: those that may affect training, then the others."""
    before, after = (lock.pins.get(package, "(not pinned)") for lock in (old, new))
    if before == after:
        return []
    lines = ["", f"{package} {before} -> {after}"]
    for alarms in (True, False):
        items = []
        for change in changes:
            if change.alarms == alarms and change.kind not in ("gone", "new"):
                direction = "there" if package in old.unread and change.kind == "fault" else change.how
                items.append(f"{_LABELS[change.kind, direction]}: {change.summary}")
        if not alarms:
            items += _counted_keys(changes)
        if items:
            lines.append("  May affect training:" if alarms else "  Other changes:")
        lines += [terminal.wrapped(item, "  - ", "    ", columns) for item in items]
    return lines


def _counted_keys(changes: Sequence[Change]) -> Iterator[str]:
    """Yield a line on the removed keys of a package and one on the new keys, with their number and the first names."""
    for kind, word in (("gone", "Removed"), ("new", "New")):
        if keys := [change.summary.partition(":")[0] for change in changes if change.kind == kind]:
            yield f"{word} keys ({len(keys)}): {_shortened(keys, 6)}"


def _other_packages(old: Lock, new: Lock) -> list[str]:
    """Return the packages that differ and are not in the index."""
    return sorted(name for name in {**old.others, **new.others} if old.others.get(name) != new.others.get(name))


def _shortened(words: Sequence[str], number: int) -> str:
    left_out = len(words) - number
    return ", ".join(words[:number]) + (f" and {left_out} more" if left_out > 0 else "")


def is_fine(changes: Sequence[Change], old: Lock, new: Lock) -> bool:
    """Return whether all packages could be compared and no change may affect training."""
    return not (any(change.alarms for change in changes) or not_compared(old, new) or {*old.pins} - {*new.pins})
