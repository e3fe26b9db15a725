"""Make the answer of `zero-study upgrade --json`."""

from __future__ import annotations

from collections.abc import Sequence

from ..answers import envelope
from ..answers.envelope import Answer
from . import changes
from .changes import Change, Comparison
from .locks import Lock
from .used import Use

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

MOST = 5  # changes that a finding names
VERBS = {  # of one and of several faults
    "comes": ("begins", "begin"),
    "goes": ("ends", "end"),
    "stays": ("stays", "stay"),
    "there": ("is in the new release", "are in the new release"),
}
PLURALS = {"fault": "faults", "crash": "crashes"}


def of(comparison: Comparison, old: Lock, new: Lock) -> Answer:
    """Return the JSON answer on the upgrade from one lock file to another.

    The key "vulns" lists all changes that can affect the training, in the OSV format.
    """
    content = changes.content(comparison)
    packages = {
        name: {"old": old.pins.get(name), "new": new.pins.get(name)} for name in dict.fromkeys([*old.pins, *new.pins])
    }
    fields = {"vulns": content["vulns"], "left_out": content["left_out"], "packages": packages}
    return envelope.answer("upgrade", comparison.verdict, findings(comparison), fields)


def findings(comparison: Comparison) -> list[envelope.Finding]:
    """Return a finding per change that breaks the training, and then one for all other changes of one kind.

    The name of a finding is the package with the id of the change, or the packages of several changes.
    """
    groups: dict[tuple[str, envelope.Severity, str], list[Change]] = {}
    for change in comparison.shown:
        if change.kind != "unknown":
            severity = _severity(change)
            name = f"{change.package}/{change.id}" if severity == "error" else ""
            groups.setdefault((IDS[change.kind, change.how], severity, name), []).append(change)
    ungrouped = [
        envelope.Finding(
            identity, severity, _text(together, comparison.uses), _remedy(together),
            name=name or ", ".join(dict.fromkeys(change.package for change in together)),
        )
        for (identity, severity, name), together in groups.items()
    ]  # fmt: skip
    return sorted(ungrouped, key=lambda finding: finding.severity != "error")


def _text(together: Sequence[Change], uses: Sequence[Use]) -> str:
    """Return the summaries of changes of one kind, with numbers and packages if there are several."""
    kind, direction = together[0].kind, together[0].how
    summaries = [changes.summary(change, uses).rstrip(".") for change in together[:MOST]]
    if len(together) > 1:
        named = enumerate(zip(together, summaries, strict=False), 1)
        summaries = [f"({number}) {change.package}: {summary}" for number, (change, summary) in named]
    if len(together) > MOST:
        summaries.append(f"and {len(together) - MOST} more, which zero-study upgrade lists")
    if kind not in ("fault", "crash"):
        return "; ".join(summaries)
    singular, several = VERBS[direction]
    noun = f"A {kind} {singular}" if len(together) == 1 else f"{len(together)} {PLURALS[kind]} {several}"
    return f"{noun}: {'; '.join(summaries)}"


def _remedy(together: Sequence[Change]) -> str:
    """Return what to write because of changes of one kind, with the number of each change if there are several."""
    remedies = list(map(changes.remedy, together[:MOST]))
    if len(together) == 1 or together[0].kind == "default":
        return changes.remedy(*together)
    return " ".join(f"({number}) {remedy}" for number, remedy in enumerate(remedies, 1) if remedy)


def _severity(change: Change) -> envelope.Severity:
    if not change.changes_training:
        return "note"
    is_worse = change.kind in ("fault", "crash", "pair") and change.how != "goes"
    is_worse |= change.kind == "gone" and change.package != "deepspeed"  # an unknown argument is an error
    return "error" if is_worse else "warning"
