"""Make the answer of `zero-study upgrade --json`."""

from __future__ import annotations

from collections.abc import Iterator

from ..answers import envelope
from ..answers.envelope import Answer
from . import changes
from .changes import Change, Comparison
from .locks import Lock

# The ids of findings, by the kind of the change and its direction.
IDS = {
    ("fault", "comes"): "upgrade/fault-begins",
    ("fault", "goes"): "upgrade/fault-ends",
    ("fault", "there"): "upgrade/fault-in-new",
    ("crash", "comes"): "upgrade/crash-begins",
    ("crash", "goes"): "upgrade/crash-ends",
    ("crash", "stays"): "upgrade/crash-stays",
    ("crash", "there"): "upgrade/crash-in-new",
    ("change", "comes"): "upgrade/changed-behavior",
    ("change", "goes"): "upgrade/changed-behavior-undone",
    ("change", "there"): "upgrade/changed-behavior-in-new",
    ("default", "comes"): "upgrade/changed-default",
    ("new", "comes"): "upgrade/new-key",
    ("gone", "goes"): "upgrade/removed-key",
    ("pair", "comes"): "upgrade/conflicting-releases",
}


def of(comparison: Comparison, old: Lock, new: Lock) -> Answer:
    """Return the JSON answer on the upgrade from one lock file to another.

    The key "vulns" lists all changes that can affect the training, in the OSV format.
    """
    content = changes.content(comparison)
    packages = {
        name: {"old": old.pins.get(name), "new": new.pins.get(name)} for name in dict.fromkeys([*old.pins, *new.pins])
    }
    fields = {"vulns": content["vulns"], "left_out": content["left_out"], "packages": packages}
    return envelope.answer("upgrade", comparison.verdict, findings(comparison, old, new), fields)


def findings(comparison: Comparison, old: Lock, new: Lock) -> Iterator[envelope.Finding]:
    """Yield a finding per change that can affect the training, and one per release that is not known."""
    faulty = {change.package for change in comparison.shown if change.kind == "fault"}
    best = {package: changes.best_release(package, old, new, comparison.use) or "" for package in faulty}
    for change in comparison.shown:
        if change.kind == "unknown":
            continue
        remedy = best[change.package] if change.kind == "fault" else ""
        yield envelope.Finding(
            IDS[change.kind, change.how], _severity(change), change.summary, remedy, name=change.package
        )


def _severity(change: Change) -> envelope.Severity:
    if not change.changes_training:
        return "note"
    is_worse = change.kind in ("fault", "crash", "pair") and change.how != "goes"
    return "error" if is_worse else "warning"
