"""Lists that a guide shows as they are: models, folders, launcher flags and variables, claims."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import yaml
from wording import tabulate

from study.claims import sentences
from study.claims.verdicts import Conclusion
from zero_study.engines.keys import allowed
from zero_study.files import ROOT
from zero_study.theory.shapes.config_json import MODEL_TYPES


def models() -> str:
    """The classes of transformers for which the planner has formulas."""
    counted = [
        [f"`{name}`", ", ".join(f"`{class_name}`" for class_name in model_type.classes)]
        for name, model_type in MODEL_TYPES.items()
    ]
    return tabulate(["`model_type`", "classes in `architectures`"], counted)


def architectures() -> str:
    """The classes of the installed transformers that were counted in their default configuration, and the others."""
    content = json.loads((ROOT / "reports" / "architectures.json").read_text(encoding="utf-8"))
    rows = []
    for kind in dict.fromkeys(row["kind"] for row in content["models"]):
        members = [row for row in content["models"] if row["kind"] == kind]
        refused = [row for row in members if "refused" in row]
        not_built = [row["class"] for row in refused if "transformers cannot" in row["refused"]]
        not_traced = [row["class"] for row in refused if row["class"] not in not_built]
        names = (", ".join(f"`{name}`" for name in group) or "none" for group in (not_built, not_traced))
        rows.append((kind, f"{len(members) - len(refused)} of {len(members)}", *names))
    return tabulate(("classes for", "counted", "transformers cannot build", "cannot be traced"), rows)


def rooms(house: str) -> str:
    """Return the table of the folders and top-level modules of a package from docs/rooms.yaml."""
    content = yaml.safe_load((ROOT / "docs" / "rooms.yaml").read_text(encoding="utf-8"))
    return tabulate(
        ("folder or module", "purpose"), [(f"`{name}`", room["purpose"]) for name, room in content[house].items()]
    )


def decided(kind: str) -> str:
    """One row for each verdict and its reason, with all that have it."""
    groups: dict[allowed.Allowed, list[str]] = {}
    for name, rule in allowed.rules(kind).items():
        groups.setdefault(rule, []).append(f"`{'--' * (kind == 'flags')}{name}`")
    rows = [
        [("refused", "accepted")[rule.is_accepted], ", ".join(names), rule.reason[0].upper() + rule.reason[1:]]
        for rule, names in groups.items()
    ]
    explanation = (
        "where the record shows its effect (if accepted), or what it would do and what to do instead (if refused)"
    )
    return tabulate(["verdict", kind, explanation], sorted(rows, key=lambda r: r[0]))


def meanings_of_verdicts() -> str:
    """List what each verdict on a published sentence means."""
    return tabulate(["verdict", "meaning"], [[kind.word, kind.meaning] for kind in Conclusion])


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/planner-accuracy.md", "models"): models,
    ("reports/planner-accuracy.md", "architectures"): architectures,
    ("docs/claims.md", "verdicts"): meanings_of_verdicts,
    ("reports/claims.md", "claims"): lambda: "\n".join(sentences.tally(sentences.read())),
    ("docs/architecture.md", "tools"): partial(rooms, "zero_study"),
    ("docs/architecture.md", "study"): partial(rooms, "study"),
    ("reports/refusals.md", "flags"): lambda: decided("flags"),
    ("reports/refusals.md", "variables"): lambda: decided("variables"),
}
