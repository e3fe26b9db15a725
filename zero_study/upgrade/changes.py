"""List what an upgrade changes in a training: `zero-study upgrade OLD NEW`.

"Different" and "worse" are two questions. A fault that ends changes a training as much as one that begins, so both
count. The text also says which release has the fewest faults.

Three files contain what is known about releases. releases.json.gz has the defaults that each release ships, as
tools/collect/releases.py reads them. faults.json has the known faults and crashes (see `faults`). no_effect.yaml has
changes of defaults that do not change a training. Nothing is known about releases that are not in releases.json.gz.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .. import terminal
from ..verdict import Checked, NotChecked, Verdict
from . import faults, locks, release_index
from .faults import Fault, base_release
from .locks import Lock
from .release_index import Classes, Index, Package
from .used import Use, classes_in_use, why_not, why_not_package

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
class Change(Fault):
    """A property of releases of a package, such as a fault or a default, that an upgrade adds or removes."""

    how: Literal["comes", "goes", "stays", "there"] = "comes"  # there: in NEW, and perhaps also in OLD
    alarms: bool = False  # the upgrade may affect training, or its effect is unknown
    classes: Sequence[str] = ()  # the classes whose default changes
    key: str = ""  # whose default changes

    @property
    def changes_training(self) -> bool:
        """Whether this change can affect the training, for better or worse.

        A crash that ends changes no training, and neither does a fault of memory or time.
        """
        ends = self.kind == "fault" and self.how == "goes" and self.effect != "cost"
        return self.kind != "unknown" and (self.alarms or ends)

    @property
    def rank(self) -> tuple[bool, ...]:
        """A sort key. Changes of gradients or weights come first, then the faults that an upgrade removes."""
        is_fault = self.kind == "fault"
        return (
            not self.changes_training,
            not (is_fault and self.effect == "training"),
            not (is_fault and self.how == "goes"),
            not self.factor,
            not is_fault,
        )

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
            "database_specific": {
                "kind": self.kind,
                "how": self.how,
                "alarms": self.alarms,
                "changes_training": self.changes_training,
                **({"factor": self.factor} if self.factor else {}),
                **({"effect": self.effect} if self.kind == "fault" else {}),
            },
        }


def index() -> Index:
    """Return the index of examined releases: its date, and what is known about each package's releases."""
    return release_index.read()


@cache
def known_faults() -> list[Change]:
    """Return all known faults, crashes and changes of behavior."""
    releases = index().packages["deepspeed"].releases

    def completed(fault: Fault) -> dict[str, Any]:
        """Return the fields of a fault. If conformance found it, its summary and fixing release are added."""
        if not fault.engines:
            return vars(fault)
        last = base_release(fault.last or "0")
        fixed = next((version for version in releases if base_release(version) > last), None)
        return vars(fault) | {"summary": faults.summary_of(fault, fault.engines), "fixed": fixed}

    return [Change(**completed(fault)) for fault in faults.read()]


@cache
def _without_effect() -> list[dict[str, Any]]:
    """Return the changes of defaults that do not change a training, with the reason, as no_effect.yaml lists them."""
    return list(yaml.safe_load(NO_EFFECT.read_text()))


def why_unknown(package: str, version: str) -> str | None:
    """Return why nothing is known about a version. None if it was examined."""
    releases = index().packages[package].releases
    if examined_release(package, version) is not None:
        return None
    if locks.release_of(version) is None:
        return f"{package} {version} is not a final release, so nothing is known about it"
    first, *_, last = releases
    made = index().made
    return f"{package} {version} is unknown, because only the releases from {first} to {last} were examined, on {made}"


def examined_release(package: str, version: str) -> str | None:
    """Return the release in the index to which a version belongs, such as 2.9.1 for 2.9.1+cpu. None if there is none.

    A pre-release or a custom build is not in the index, although it has the numbers of a release. Some releases of
    flash-attn exist only as post-releases on PyPI, which differ only in their packaging. One of them stands for all of
    their release.
    """
    release = locks.release_of(version)
    if release is None:
        return None
    examined = {Version(text): text for text in index().packages[package].releases}
    posts = {Version(key.base_version): text for key, text in examined.items() if key.is_postrelease}
    return examined.get(release) or posts.get(Version(release.base_version))


def read_lock(path: Path, python: str | None = None) -> Lock:
    """Return the releases that a lock file pins, for the packages in the index. Raises Refusal as `locks.read` does."""
    return locks.read(path, tuple(index().packages), python)


def names_package(path: Path) -> bool:
    """Return whether the text of a file contains the name of a package in the index."""
    names = "|".join(map(re.escape, index().packages))
    return (
        re.search(rf"(?im)(?:^|[\s\"'])(?:{names})(?:$|[\s\"'=<>~!@\[])", path.read_text(errors="replace")) is not None
    )


def not_compared(old: Lock, new: Lock, uses: Sequence[Use] = ()) -> list[NotChecked]:
    """Return each package and each included file that cannot be compared between two lock files, with the reason.

    Packages that the training does not use are left out. So are those with the same unchangeable content in both files,
    such as one commit of git.
    """
    names = [name for name in dict.fromkeys([*old.unread, *new.unread]) if not _is_fixed(name, old, new)]
    sides = (("OLD", old), ("NEW", new))
    open_checks = [NotChecked(name, _why_unread(name, old, new), True) for name in names]
    removed = [name for name in old.pins if name not in {*new.pins, *new.unread}]
    open_checks += [NotChecked(name, f"{name} {old.pins[name]} is in OLD but not in NEW", True) for name in removed]
    for name in dict.fromkeys([*old.elsewhere, *new.elsewhere]):
        texts = [f"{side} pins {name} {lock.elsewhere[name]}" for side, lock in sides if name in lock.elsewhere]
        reason = f"{'; '.join(texts)}, but not for Linux on x86_64"
        is_unchanged = old.elsewhere.get(name) == new.elsewhere.get(name)
        open_checks.append(NotChecked(name, reason, not is_unchanged and name not in {*old.pins, *new.pins}))
    return [check for check in open_checks if not why_not_package(uses, check.what)]


def _why_unread(name: str, old: Lock, new: Lock) -> str:
    """Return what one or both files have in place of a release of a package."""
    if old.unread.get(name) == new.unread.get(name):
        return f"OLD and NEW have {old.unread[name]}"
    return "; ".join(
        f"{side} has {lock.unread[name]}" for side, lock in (("OLD", old), ("NEW", new)) if name in lock.unread
    )


def _is_fixed(name: str, old: Lock, new: Lock) -> bool:
    """Return whether both files pin a package to the same unchangeable content that is not a release."""
    return name in old.fixed and old.fixed.get(name) == new.fixed.get(name)


class Comparison(NamedTuple):
    """The changes of an upgrade that may affect a training, and those that cannot affect it."""

    changes: list[Change]  # all known changes
    left_out: dict[str, list[Change]]  # by reason, those that cannot concern the training
    shown: list[Change]  # the changes that can concern the training
    verdict: Verdict
    uses: Sequence[Use] = ()  # what the files of the trainings show; empty: nothing is known


def compare_locks(old: Lock, new: Lock, uses: Sequence[Use] = ()) -> Comparison:
    """Return the changes of a training between two lock files.

    If OLD names no release of a package, its faults may also be in OLD, so they are not listed as changes.
    """
    changes = [
        replace(change, how="there", alarms=False)
        if _may_be_in(old, change.package) and change.kind in ("fault", "crash", "change")
        else change
        for change in compare(old.pins, new.pins)
    ]
    excluded: dict[str, list[Change]] = {}
    shown: list[Change] = []
    for change in changes:
        reason = why_not(uses, change) if change.kind not in ("pair", "unknown") else None
        reason = reason or why_not_package(uses, change.package)
        if change.kind == "gone" and any(use.names is not None for use in uses):
            change = replace(change, alarms=change.summary.endswith("missing"))  # a file sets it
        (excluded.setdefault(reason, []) if reason else shown).append(change)
    return Comparison(changes, excluded, shown, _verdict(shown, old, new, uses), uses)


def _may_be_in(lock: Lock, package: str) -> bool:
    """Return whether a file may have a package at a release that could not be read, or in an unread included file."""
    return package not in lock.pins and (package in lock.unread or any(name.startswith("-") for name in lock.unread))


def _verdict(shown: Sequence[Change], old: Lock, new: Lock, uses: Sequence[Use]) -> Verdict:
    """Return the verdict: the changes of the training, what was compared, and what could not be."""
    unknown = [
        NotChecked(f"{change.package} {change.id}", change.summary, True)
        for change in shown
        if change.kind == "unknown"
    ]
    shared = [name for name in new.pins if name in old.pins and not why_not_package(uses, name)]
    number = sum(fault.package in shared for fault in known_faults()) + sum(map(_number_of_defaults, shared))
    return Verdict.of(
        sum(change.changes_training for change in shown),
        [
            Checked(len(shared), "package", "that both files pin"),
            Checked(
                number, "known fault, change and default", "of these packages", "known faults, changes and defaults"
            ),
        ],
        [*not_compared(old, new, uses), *unknown],
    )


def _number_of_defaults(package: str) -> int:
    """Return the number of keys whose defaults are known for releases of a package."""
    return sum(map(len, index().packages[package].defaults.values()))


def compare(old: Mapping[str, str], new: Mapping[str, str]) -> list[Change]:
    """Return the changes of a training if packages are upgraded from the releases `old` to `new`.

    Those that may affect training come first.
    """
    changes = [*_changed_faults(old, new)]
    for package in (package for package in new if old.get(package) != new[package]):
        for version in filter(None, (old.get(package), new[package])):
            if reason := why_unknown(package, version):
                changes.append(Change(package, "unknown", version, reason, version, alarms=True))
        if package in old:
            changes += _changed_defaults(package, old, new)
    return sorted([*changes, *_new_conflicts(old, new)], key=lambda change: change.rank)


def _changed_faults(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    """Yield the faults that begin or end with the upgrade, and crashes that stay although a release changes.

    A change of behavior may affect training in both directions. What becomes of the faults of a package that has no
    release in NEW is unknown.
    """
    for fault in (fault for fault in known_faults() if fault.package in new):
        was_there, is_there = fault.is_among(old), fault.is_among(new)
        if was_there != is_there:
            alarms = fault.kind == "change" or (is_there and not fault.with_feature)
            change = replace(fault, how="comes" if is_there else "goes", alarms=alarms)
            if is_there or not _is_unexamined(fault.package, new[fault.package]):
                yield change
        elif is_there and fault.kind == "crash" and any(old.get(name) != new[name] for name in fault.set_of_packages()):
            yield replace(fault, how="stays")


def _is_unexamined(package: str, version: str) -> bool:
    """Return whether a version was not examined. Whether a fault ends in it is then not known."""
    return examined_release(package, version) is None


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
    by_change: dict[tuple[_DefaultChange, tuple[str, ...]], list[str]] = {}
    for name in sorted({*before} & {*after}):
        for key in sorted({*before[name], *after[name]}):
            change = _DefaultChange(key, before[name].get(key), after[name].get(key))
            words = None if _is_same(change, entry) else _words_with_effect(package, name, change)
            if words is not None:
                by_change.setdefault((change, words), []).append(name)
    for (change, words), classes in by_change.items():
        yield replace(_as_change(package, change, classes, _nearest_examined(package, new[package])), uses=words)


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
        newest_release = list(index().packages["transformers"].releases)[-1]
        return _training_arguments(newest_release).get(change.key) in (before, after)
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


def _words_with_effect(package: str, name: str, change: _DefaultChange) -> tuple[str, ...] | None:
    """Return the words with which a change of a key of a class has an effect; empty: it always has. None: never."""
    for entry in _without_effect():
        if (
            entry["package"] == package
            and {*entry["keys"]} & {change.key, f"{name}.{change.key}"}
            and {change.before, change.after} <= {*entry["values"]}
        ):
            return tuple(entry["except"]) if "except" in entry else None
    return ()


def _as_change(package: str, change: _DefaultChange, classes: Sequence[str], version: str) -> Change:
    """Return the change of a default as a `Change`, with its summary."""
    key, before, after = change
    other_classes = f" (also of {', '.join(classes[1:])})" if classes[1:] else ""
    line = f"{classes[0]}.{key}{other_classes}: {before or 'missing'} -> {after or 'missing'}"
    is_removed = after in (None, DEPRECATED)
    change_of_default = Change(
        package,
        "default",
        f"{classes[0]}-{key}",
        line,
        version,
        alarms=not HARMLESS.match(key),
        classes=classes,
        key=key.lstrip("-"),
    )
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
                line = f"{package} {version} requires {required}{specifier}, but NEW pins {required} {new[required]}"
                yield Change(package, "pair", f"{version}-{required}", line, version, alarms=True)


def content(found: Comparison) -> dict[str, Any]:
    """Return plain data for JSON: the changes in the OSV format, the excluded changes by reason, and the verdict."""
    return {
        "vulns": [change.as_osv() for change in found.shown],
        "left_out": {
            reason: [change.as_osv()["id"] for change in changes] for reason, changes in found.left_out.items()
        },
        **found.verdict.content(),
    }


# ---------------------------------------------------------------- what to do


def remedy(*changes: Change) -> str:
    """Return what to write because of changes of one kind: lines, releases without a fault, or that nothing is known.

    Empty if nothing needs to be written, because the new releases are right.
    """
    keys = [change.key for change in changes if change.kind == "default"]
    if keys:
        return f"Set {terminal.listed(keys)} to keep the old value{'s' * (len(keys) > 1)}."
    return " ".join(dict.fromkeys(filter(None, map(_remedy, changes))))


def _remedy(change: Change) -> str:
    if change.kind == "gone":
        return f"Remove {change.key}, or write what replaces it."
    if change.how == "goes" or change.kind in ("unknown", "new"):
        return ""
    if change.kind == "pair":
        return f"Pin {change.summary.partition(' requires ')[2].partition(', but')[0]}."
    bounds = [f">={change.fixed}"] if change.fixed else []
    bounds += [f"<{change.introduced}"] if change.introduced else []
    pins = f"Releases without it: {change.package}{' or '.join(bounds)}." if bounds else ""
    return " ".join(filter(None, [change.remedy, pins])) or "No setting and no release without it is known."


def summary(change: Change, uses: Sequence[Use] = ()) -> str:
    """Return what changes, in words. For a default, only classes that the files of trainings use are named."""
    if not change.classes:
        return change.summary
    classes = classes_in_use(uses, change.classes) or change.classes
    _, _, values = change.summary.partition(": ")
    return f"{classes[0]}.{change.key}{_also_of(classes)}: {values}"


# ---------------------------------------------------------------- in words


def text(found: Comparison, old: Lock, new: Lock, width: int | None = None) -> str:
    """Return the changes as text for a terminal: the summary first, then the changes of each package.

    `width` is the maximum length of lines in characters; None means the width of the terminal.
    """
    columns = width or terminal.width()
    lines = [terminal.wrap(line, columns=columns) for line in _summary(found, old, new)]
    if missing := [check.why or check.what for check in not_compared(old, new, found.uses)]:
        lines += ["", "Could not be compared:"]
        lines += [terminal.wrap(line, "  - ", "    ", columns) for line in missing]
    for package in (package for package in index().packages if package in {*old.pins, *new.pins}):
        lines += _lines_of_package(package, found, old, new, columns)
    if found.left_out:
        lines += ["", *_lines_of_left_out(found, columns)]
    if names := sorted(name for name in {**old.others, **new.others} if old.others.get(name) != new.others.get(name)):
        line = (
            f"The releases of these packages differ too, but nothing is known about them: {terminal.names(names, 12)}."
        )
        lines += ["", terminal.wrap(line, columns=columns)]
    return "\n".join(lines)


def _summary(comparison: Comparison, old: Lock, new: Lock) -> list[str]:
    """Return lines with the number of changes, the number of unexamined releases, and what was compared."""
    examined = [change for change in comparison.shown if change.kind != "unknown"]
    changing = [change for change in examined if change.changes_training]
    training = "this training" if comparison.uses else "training"
    number = f"{len(changing)} of {len(examined)} known change{'s' * (len(examined) != 1)}"
    lines = [f"{number} between these files may affect {training}{_kinds(changing)}."]
    unexamined = sum(change.kind == "unknown" for change in comparison.shown)
    if unexamined:
        lines.append(
            "1 release was not examined, so it may have other changes."
            if unexamined == 1
            else f"{unexamined} releases were not examined, so they may have other changes."
        )
    compared = [package for package in new.pins if package in old.pins]
    lines.append(f"Compared packages: {', '.join(compared) or 'none'} ({comparison.verdict.coverage()}).")
    if by_platform := {**old.by_platform, **new.by_platform}:
        lines.append(
            f"These packages have different pins for different platforms, and those for Linux on x86_64 were "
            f"compared: {', '.join(by_platform)}."
        )
    return lines


def _kinds(changing: Sequence[Change]) -> str:
    """Return how many faults end and begin, and how many other changes there are, after a colon."""
    counts = {
        "fault{} end{}": [change for change in changing if change.kind == "fault" and change.how == "goes"],
        "fault{} begin{}": [change for change in changing if change.kind == "fault" and change.how != "goes"],
        "crash{} begin{}": [change for change in changing if change.kind == "crash"],
        "other change{}": [change for change in changing if change.kind not in ("fault", "crash")],
    }
    parts = []
    for words, changes in counts.items():
        ending = ("", "s") if len(changes) == 1 else ("es" if words.startswith("crash") else "s", "")
        parts += [f"{len(changes)} {words.format(*ending)}"] if changes else []
    return f": {', '.join(parts)}" if parts else ""


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


def _item(change: Change) -> str:
    """Return the text of a change that is not a default."""
    is_new = change.with_feature and change.how == "comes"
    label = f"{change.kind.capitalize()} of a new feature" if is_new else _LABELS[change.kind, change.how]
    factor = f". {change.factor}" if change.factor else ""
    evidence = " (from its public thread, not measured by this project)" if change.evidence == "read" else ""
    sentence = f"{label}: {change.summary}{evidence}{factor}"
    return f"{sentence.rstrip('.')}. {what_to_do}" if (what_to_do := remedy(change)) else sentence


def _lines_of_package(package: str, comparison: Comparison, old: Lock, new: Lock, columns: int) -> list[str]:
    """Return a heading with both releases, then the changes: those that may affect training, then the others."""
    before, after = (lock.pins.get(package, "(not pinned)") for lock in (old, new))
    changes = [change for change in comparison.shown if change.package == package]
    if before == after or why_not_package(comparison.uses, package):
        return []
    lines = ["", f"{package} {before} -> {after}"]
    for is_changing in (True, False):
        part = [
            change
            for change in changes
            if (change.changes_training or change.kind == "unknown") == is_changing
            and change.kind not in ("gone", "new")
        ]
        items = [_item(change) for change in part if change.kind != "default"] + _defaults_in_words(
            part, comparison.uses
        )
        if not is_changing:
            items += _counted_keys(changes, comparison.uses)
        if items:
            lines.append("  May affect training:" if is_changing else "  Other changes:")
        lines += [terminal.wrap(item, "  - ", "    ", columns) for item in items]
    return lines if len(lines) > len(("", "heading")) or (package in old.pins and package in new.pins) else []


def _defaults_in_words(changes: Sequence[Change], uses: Sequence[Use]) -> list[str]:
    """Return a text for each group of classes whose defaults change in the same way. Long lists are shortened."""
    by_classes: dict[tuple[str, ...], list[str]] = {}
    for change in changes:
        if change.kind == "default":
            _, _, values = change.summary.partition(": ")
            classes = tuple(_first_in_use(uses, change.classes))
            by_classes.setdefault(classes, []).append(f"{change.key}: {values}")
    items = []
    for classes, lines in by_classes.items():
        if len(lines) == 1:
            items.append(f"Changed default: {classes[0]}.{lines[0]}{_also_of(classes)}")
        else:
            items.append(f"Changed defaults of {classes[0]}{_also_of(classes)}: {'; '.join(lines)}")
    return items


def _first_in_use(uses: Sequence[Use], classes: Sequence[str]) -> list[str]:
    """Sort classes so that those that the files of trainings name come first."""
    in_use = classes_in_use(uses, classes)
    return sorted(classes, key=lambda name: name not in in_use)


def _also_of(classes: Sequence[str]) -> str:
    """Return the classes after the first one, in parentheses; if there are many, only their number."""
    further = classes[1:]
    if len(further) > 2:
        return f" (also of {further[0]} and {len(further) - 1} more classes)"
    return f" (also of {' and '.join(further)})" if further else ""


def _counted_keys(changes: Sequence[Change], uses: Sequence[Use]) -> Iterator[str]:
    """Yield a line on the removed keys of a package and one on the new keys, with their number and the first names."""
    for kind, word in (("gone", "Removed"), ("new", "New")):
        of_kind = [change for change in changes if change.kind == kind]
        keys = []
        for change in of_kind:
            classes = _first_in_use(uses, change.classes)
            keys.append(f"{classes[0]}.{change.key}{_also_of(classes)}")
        if keys:
            yield f"{word} keys ({len(keys)}): {terminal.names(keys, 6)}"


def _lines_of_left_out(comparison: Comparison, columns: int) -> Iterator[str]:
    """Yield how many changes were left out, by reason."""
    number = sum(map(len, comparison.left_out.values()))
    yield terminal.wrap(f"{number} known changes cannot concern this training and are left out:", columns=columns)
    for reason, changes in sorted(comparison.left_out.items(), key=lambda item: -len(item[1])):
        changing = sum(change.changes_training for change in changes)
        line = f"{len(changes)} ({changing} of them may affect other trainings): {reason}"
        yield terminal.wrap(line, "  - ", "    ", columns)
