"""List what an upgrade changes in a training: `zero-study upgrade OLD NEW`.

Four files contain what is known about releases. releases.json.gz has the defaults that each release ships, as
tools/releases.py reads them. known_bad.json has the faults that conformance runs found. faults.yaml has the other
faults and crashes, with their public threads. no_effect.yaml has changes of defaults that do not change a training.
Nothing is known about releases that are not in releases.json.gz.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .. import terminal
from . import known_bad, locks, release_index
from .known_bad import base_release
from .locks import Lock
from .release_index import Classes, Index, Package

FAULTS = Path(__file__).with_name("faults.yaml")
NO_EFFECT = Path(__file__).with_name("no_effect.yaml")
# Keys that say what is logged, displayed, cached or stored, or where a server runs. They do not change the training.
HARMLESS = re.compile(
    r"log_|logging_|hub_|push_to|report_to|run_name|exp_name|output_dir|save_|project|trackio_|wandb_|include_|"
    r"num_completions_to_print|vllm_(?!importance)|dataset_(num_proc|batch)|dataloader_|remove_unused|--use_xpu|"
    r"num_proc$|num_threads$|commit_|cache_dir|keep_in_memory|verbose|steps_per_print|pin_memory|new_fingerprint"
)
OWN = "TrainingArguments' own"  # the value of a key that a class of trl does not define itself
DEPRECATED = "(deprecated)"  # the value of a key that only warns if somebody sets it
NOTHING = {"None", "{}", "[]", "()"}  # values that mean that nothing was given
EMPTY = {*NOTHING, "False", "''"}  # values that are false
REQUIRED = "(required)"  # the value of a parameter without a default


@dataclass(frozen=True)
class Change:
    """A property of releases of a package that an upgrade adds or removes."""

    package: str
    kind: Literal["fault", "crash", "change", "default", "gone", "new", "pair", "unknown"]
    id: str
    summary: str
    introduced: str | None  # the first release that has it; None: it is older than all that were examined
    fixed: str | None = None  # the first release without it again; None: there is none yet
    threads: Sequence[str] = ()
    date: str = ""  # of the first thread, or of the post in it that reports this
    how: Literal["comes", "goes", "stays"] = "comes"
    alarms: bool = False  # the upgrade may affect training, or its effect is unknown
    beside: Mapping[str, str] = field(default_factory=dict)  # releases of other packages that must also be installed
    with_feature: bool = False  # it came with the feature that has it, so it breaks nothing that worked
    file: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # keys of DeepSpeed files, and affected values

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

    def set_of_packages(self) -> tuple[str, ...]:
        """Return the packages of a fault of a set of packages; nothing for a fault of one package."""
        return (self.package, *self.beside) if self.beside else ()

    def as_osv(self) -> dict[str, Any]:
        """Return the change as an entry of OSV (https://ossf.github.io/osv-schema/), with versions of the package."""
        events = [{"introduced": self.introduced or "0"}, *([{"fixed": self.fixed}] if self.fixed else [])]
        package = {"ecosystem": "PyPI", "name": self.package}
        return {
            "schema_version": "1.7.0",
            "id": f"ZS-{self.package}-{self.id}",
            "modified": f"{self.date or index().made}T00:00:00Z",
            "summary": self.summary,
            "affected": [{"package": package, "ranges": [{"type": "ECOSYSTEM", "events": events}]}],
            "references": [{"type": "REPORT", "url": url} for url in self.threads],
            "database_specific": {"kind": self.kind, "how": self.how, "alarms": self.alarms},
        }


def index() -> Index:
    """Return the committed index: its date, and what is known about the releases of each package."""
    return release_index.read()


@cache
def known_faults() -> list[Change]:
    """Return all known faults, crashes and changes of behavior: those that conformance found, and faults.yaml."""
    faults = [Change(**entry) for entry in yaml.safe_load(FAULTS.read_text())]
    releases = index().packages["deepspeed"].releases
    for fault in known_bad.read():
        fixed = next((version for version in releases if base_release(version) > base_release(fault.last)), None)
        summary = fault_summary(fault, fault.engines)
        faults.append(Change("deepspeed", "fault", fault.id, summary, fault.first, fixed, fault.threads))
    return faults


@cache
def _without_effect() -> list[dict[str, Any]]:
    """Return the changes of defaults that do not change a training, with the reason, as no_effect.yaml lists them."""
    return list(yaml.safe_load(NO_EFFECT.read_text()))


def fault_summary(fault: known_bad.Fault, engines: Sequence[str]) -> str:
    """Return a text on which trainings of these engines a fault of DeepSpeed affects, and how."""
    several = " with several micro batches" if fault.several_micro_batches else ""
    only = f", only for {fault.models}" if fault.models else ""
    return f"{', '.join(engines)} in {', '.join(fault.precisions)}{several}{only}: {fault.what}"


def why_unknown(package: str, version: str) -> str | None:
    """Return why nothing is known about a version; None if it was examined."""
    releases = index().packages[package].releases
    if examined_release(package, version) is not None:
        return None
    if locks.release_of(version) is None:
        return f"{package} {version} is not a final release, so nothing is known about it"
    first, *_, last = releases
    made = index().made
    return f"{package} {version} is unknown: all releases from {first} to {last} were examined, on {made}"


def examined_release(package: str, version: str) -> str | None:
    """Return the release of the index of which a version is a build, for example 2.9.1 for 2.9.1+cpu, if there is one.

    A pre-release or a custom build is none, although it has the numbers of a release. Some releases of flash-attn exist
    only as post-releases on PyPI, which differ only in their packaging. One of them stands for all of their release.
    """
    release = locks.release_of(version)
    if release is None:
        return None
    examined = {Version(text): text for text in index().packages[package].releases}
    posts = {Version(key.base_version): text for key, text in examined.items() if key.is_postrelease}
    return examined.get(release) or posts.get(Version(release.base_version))


def read_lock(path: Path) -> Lock:
    """Return the releases that a file pins, for the packages in the index. Raises Refusal as `locks.read` does."""
    return locks.read(path, tuple(index().packages))


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
    changes = [*_changed_faults(old, new)]
    for package in (package for package in new if old.get(package) != new[package]):
        changes += _unknown_releases(package, old.get(package), new[package])
        if package in old:
            changes += _changed_defaults(package, old, new)
    return sorted([*changes, *_new_conflicts(old, new)], key=lambda change: not change.alarms)


def _changed_faults(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    """Yield what comes or goes of known_faults, and crashes of sets of releases that stay although a release changes.

    A change of behavior may affect training in both directions.
    """
    for fault in known_faults():
        was_there, is_there = fault.is_among(old), fault.is_among(new)
        if was_there != is_there:
            alarms = fault.kind == "change" or (is_there and not fault.with_feature)
            yield replace(fault, how="comes" if is_there else "goes", alarms=alarms)
        elif is_there and fault.kind == "crash" and any(old.get(name) != new[name] for name in fault.set_of_packages()):
            yield replace(fault, how="stays")


def _unknown_releases(package: str, old: str | None, new: str) -> Iterator[Change]:
    """Yield a change for each of the two versions of a package if that version was not examined."""
    for version in filter(None, (old, new)):
        if reason := why_unknown(package, version):
            yield Change(package, "unknown", version, reason, version, alarms=True)


def _nearest_examined(package: str, version: str) -> str:
    """Return the examined release that a version is compared as: itself, or the last one before it."""
    if release := examined_release(package, version):
        return release
    releases = list(index().packages[package].releases)
    position = bisect_right(
        [Version(release) for release in releases], locks.release_of(version) or base_release(version)
    )
    return releases[max(0, position - 1)]


class _DefaultChange(NamedTuple):
    """The value of a key of a class before and after an upgrade; None if the class has no such key."""

    key: str
    before: str | None
    after: str | None


def _changed_defaults(package: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    """Yield the changes of keys and defaults of a package. Classes with the same change share one item."""
    entry = index().packages[package]
    before, after = (_defaults(package, pins) for pins in (old, new))
    by_change: dict[_DefaultChange, list[str]] = {}
    for name in sorted({*before} & {*after}):
        for key in sorted({*before[name], *after[name]}):
            change = _DefaultChange(key, before[name].get(key), after[name].get(key))
            if not _is_same(change, entry) and not _is_listed_without_effect(package, name, change):
                by_change.setdefault(change, []).append(name)
    for change, classes in by_change.items():
        yield _as_change(package, change, classes, _nearest_examined(package, new[package]))


def _defaults(package: str, pins: Mapping[str, str]) -> Classes:
    """Return the defaults of the pinned release of a package.

    Classes of trl inherit from TrainingArguments. A key of TrainingArguments that such a class does not define itself
    gets the value OWN.
    """
    classes = index().packages[package].defaults_at(_nearest_examined(package, pins[package]))
    if package != "trl":
        return classes
    newest = list(index().packages["transformers"].releases)[-1]
    release = _nearest_examined("transformers", pins.get("transformers", newest))
    inherited = dict.fromkeys(_training_arguments(release), OWN)
    return {name: inherited | keys if name.endswith("Config") else keys for name, keys in classes.items()}


@cache
def _training_arguments(release: str) -> dict[str, str]:
    return index().packages["transformers"].defaults_at(release)["TrainingArguments"]


def _is_same(change: _DefaultChange, package: Package) -> bool:
    """Return whether two defaults are equal, or differ only in spelling.

    - A value and a list with only this value are the same, and so are 0 and 0.0.
    - None and an empty container are the same. None, False and an empty text are the same for a key that the code only
      tests for truth.
    - The value that a class inherits from TrainingArguments is the same as that value, if the class writes it down.
    - Who had to give a value before is not affected by a default.
    """
    before, after = change.before, change.after
    if before in (after, REQUIRED):
        return True
    if before is None or after is None:
        return False
    if OWN in (before, after):
        return _newest_training_arguments().get(change.key) in (before, after)
    values = {before, after}
    number = _number(before)
    is_only_spelling = (
        f"[{before}]" == after or f"[{after}]" == before or (number is not None and number == _number(after))
    )
    return is_only_spelling or values <= NOTHING or (values <= EMPTY and change.key not in package.distinguished)


def _number(text: str) -> float | None:
    """Return the number that a text is; None if it is none."""
    with suppress(ValueError):
        return float(text)
    return None


def _newest_training_arguments() -> dict[str, str]:
    return _training_arguments(list(index().packages["transformers"].releases)[-1])


def _is_listed_without_effect(package: str, name: str, change: _DefaultChange) -> bool:
    """Return whether no_effect.yaml lists a change of a key of a class."""
    return any(
        entry["package"] == package
        and {*entry["keys"]} & {change.key, f"{name}.{change.key}"}
        and {change.before, change.after} <= {*entry["values"]}
        for entry in _without_effect()
    )


def _as_change(package: str, change: _DefaultChange, classes: Sequence[str], version: str) -> Change:
    """Return the change of a default, with its summary."""
    key, before, after = change
    other_classes = f" (also of {', '.join(classes[1:])})" if classes[1:] else ""
    line = f"{classes[0]}.{key}{other_classes}: {before or 'missing'} -> {after or 'missing'}"
    is_removed = after in (None, DEPRECATED)
    change_of_default = Change(package, "default", f"{classes[0]}-{key}", line, version, alarms=not HARMLESS.match(key))
    if before in (None, DEPRECATED):
        return replace(change_of_default, kind="new", alarms=False)
    if is_removed:
        return replace(change_of_default, kind="gone", how="goes", alarms=False)
    return change_of_default


def _new_conflicts(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    """Yield a change for each new release that requires another version of a package than the pinned one.

    Conflicts that existed before the upgrade are left out.
    """
    for package, version in new.items():
        required_versions = index().packages[package].requires_at(_nearest_examined(package, version))
        for required, specifier in required_versions.items():
            is_new = (old.get(package), old.get(required)) != (version, new.get(required))
            if is_new and required in new and base_release(new[required]) not in SpecifierSet(specifier):
                line = f"{package} {version} requires {required}{specifier}, but {required} is {new[required]}"
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
    for package in (package for package in index().packages if package in {*old.pins, *new.pins}):
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
    if by_platform := {**old.by_platform, **new.by_platform}:
        lines.append(f"Pinned by platform, compared as for Linux on x86_64: {', '.join(by_platform)}.")
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
    ("change", "comes"): "Changed behavior",
    ("change", "goes"): "Changed behavior, undone",
    ("change", "there"): "Behavior of NEW, perhaps also of OLD",
    ("crash", "comes"): "New crash",
    ("crash", "goes"): "Crash no longer present",
    ("crash", "stays"): "Crash of OLD and of NEW",
    ("crash", "there"): "Crash in NEW, perhaps also in OLD",
    ("default", "comes"): "Changed default",
    ("pair", "comes"): "Releases that do not fit together",
    ("unknown", "comes"): "Not examined",
}


def _label(change: Change, old: Lock) -> str:
    """Return how a change begins in the text."""
    is_known = change.kind in ("fault", "crash", "change")
    if is_known and change.package in old.unread:
        return _LABELS[change.kind, "there"]
    if change.with_feature and change.how == "comes":
        return f"{change.kind.capitalize()} of a new feature"
    return _LABELS[change.kind, change.how]


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
                items.append(f"{_label(change, old)}: {change.summary}")
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
