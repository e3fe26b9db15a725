"""Determine what each key of a configuration file really does, by the rules in the table of keys."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import Any, Literal

from ..engines.keys import known_keys
from ..engines.keys.known_keys import Pattern
from ..engines.keys.patterns import ABSENT, Mark, condition_holds

Effect = Literal["honoured", "ignored", "overridden", "crashes", "means something else", "not examined"]

REMOVE = Mark("remove")  # --fix takes the key out
KEEP = Mark("keep")  # --fix leaves it: only the owner of the file can decide what to write instead
NOT_STATED = Mark("not stated")  # the rule does not state which value the engine has

LONGEST = 200  # characters of a value that are printed


def cut(value: Any) -> Any:
    """Return a value for printing. A long value is replaced by its beginning and its length."""
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"


@dataclass(frozen=True)
class Instead:
    """A correction by --fix: a new key and its value. Without a value, the new key gets the old key's value."""

    key: str
    value: Any = KEEP


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one key of a configuration file really does, and what to do about it."""

    file: str
    key: str
    value: Any
    effect: Effect
    message: str = ""  # complete sentences: what happens
    remedy: str = ""  # complete sentences: what to do
    matters: bool = False  # whether the file does not do what its reader takes it to do
    mend: Any = field(default=KEEP, repr=False)
    engine_has: Any = NOT_STATED  # the value that the engine has for this key
    error: str = ""  # a piece of the error, if training fails at start-up
    release: str = ""  # the finding is about this release, and not about a key
    fault: str = ""  # the known fault of that release, with its package
    is_note: bool = False  # the finding is listed although it does not matter
    reader: str = ""  # the finding matters if this program reads the file
    line: int | None = None  # of a job file

    @property
    def is_about_release(self) -> bool:
        return bool(self.release)

    def as_json(self) -> dict[str, Any]:
        """Return the finding in the form that --json prints. The finding for a missing key has no value."""
        content = {name: getattr(self, name) for name in ("file", "effect", "message", "remedy", "matters")}
        optional = {
            "key": self.key, "value": self.value, "engine_has": self.engine_has, "error": self.error or NOT_STATED,
        }  # fmt: skip
        return content | {name: cut(value) for name, value in optional.items() if not isinstance(value, Mark)}


class Settings:
    """The content of a configuration file, to be read by dotted keys."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    def get(self, key: str, default: Any = ABSENT) -> Any:
        """Return the value of a dotted key, or `default` if the key or a section above it is missing."""
        value: Any = self.content
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    def nodes(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield the dotted name and the value of every key, and whether the key is a section.

        A section comes before the keys in it. An empty section does not count as one.
        """
        yield from _nodes(self.content, "")


def _nodes(content: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any, bool]]:
    for key, value in content.items():
        is_section = isinstance(value, dict) and bool(value)
        yield f"{above}{key}", value, is_section
        if is_section:
            yield from _nodes(value, f"{above}{key}.")


@dataclass(frozen=True)
class Rule:
    """A rule of the table of keys: what a key does if a condition holds.

    If a key has several rules, the first rule whose condition holds is used.
    """

    key: str  # dotted; a * stands for anything
    effect: Effect
    is_of_absent: bool  # the rule is for files in which the key is missing
    condition: Mapping[str, Pattern]
    covers_section: bool  # the finding covers the whole section, so the keys in it get none of their own
    entry: Mapping[str, Any]  # the rule as the table has it

    def holds(self, value: Any, settings: Settings) -> bool:
        """Return whether the rule's condition holds for this value of the key and the other settings of the file."""
        return condition_holds(self.condition, self.key, value, settings)

    def finding(self, file: str, key: str, value: Any) -> Finding:
        """Return the finding for a key to which this rule applies."""
        entry, is_note = self.entry, bool(self.entry.get("note"))
        mend = REMOVE if entry.get("mend") == "remove" else entry.get("mend", KEEP)
        if "instead" in entry:
            right = entry["instead"]
            mend = Instead(right) if isinstance(right, str) else Instead(*next(iter(right.items())))
        return Finding(
            file=file,
            key=key,
            value=value,
            effect=self.effect,
            message=_filled_in(entry.get("says", ""), key, value),
            remedy=_filled_in(entry.get("remedy", ""), key, value),
            matters=not (entry.get("minor") or is_note) and self.effect not in ("honoured", "not examined"),
            is_note=is_note,
            reader=entry.get("reader", ""),
            mend=mend,
            engine_has=entry.get("has", value if self.effect == "honoured" else NOT_STATED),
            error=entry.get("error", ""),
        )


def _filled_in(text: str, key: str, value: Any) -> str:
    text = text.replace("{value}", str(cut(value))).replace("{section}", key.partition(".")[0])
    for name in ("distributed_types", "schedulers"):
        text = text.replace(f"{{{name}}}", ", ".join(known_keys.engine_list(name)) if f"{{{name}}}" in text else "")
    return text


@cache
def rules(place: known_keys.Place) -> list[Rule]:
    """Return the rules for a kind of file, in their order in the table."""
    rules_of_place = []
    removed_from_zero = (f"zero_optimization.{name}" for name in known_keys.engine_list("removed_zero"))
    removed = [*known_keys.engine_list("removed"), *removed_from_zero]  # by this release of DeepSpeed
    for names, entries in known_keys.read()["rules"][place].items():
        for name in removed if names == "<removed>" else names.split():
            for entry in entries:
                is_of_absent = "absent" in entry
                effect = entry["absent" if is_of_absent else "does"]
                condition, covers_section = entry.get("when", {}), entry.get("whole", False)
                rules_of_place.append(Rule(name, effect, is_of_absent, condition, covers_section, entry))
    return rules_of_place


@lru_cache(maxsize=1024)
def _of_key(place: known_keys.Place, key: str) -> list[Rule]:
    """Return the rules for a key that a file contains."""
    return [rule for rule in rules(place) if not rule.is_of_absent and fnmatchcase(key, rule.key)]


OnUnknown = Callable[[str, Any], Finding | None]  # returns the finding of a key, with its value, that has no rule


def examine(file: str, settings: Settings, place: known_keys.Place, on_unknown: OnUnknown) -> list[Finding]:
    """Return the findings for all keys of a file, and for missing keys.

    The key's rule makes the finding. If it has no rule, `on_unknown` does. If that returns None, the key works as
    written.
    """
    findings = []
    covered: tuple[str, ...] = ()  # prefixes of the sections whose keys a finding has covered
    for key, value, is_section in settings.nodes():
        if key.startswith(covered):
            continue
        rule = next((rule for rule in _of_key(place, key) if rule.holds(value, settings)), None)
        finding = rule.finding(file, key, value) if rule else on_unknown(key, value)
        if finding and is_section and (rule is None or rule.covers_section):
            covered += (f"{key}.",)
        if finding is None and not is_section:
            finding = Finding(file=file, key=key, value=value, effect="honoured", engine_has=value)
        if finding:
            findings.append(finding)
    return findings + _of_absent_keys(file, settings, place)


def _of_absent_keys(file: str, settings: Settings, place: known_keys.Place) -> list[Finding]:
    """Return the findings for keys that are missing in a file."""
    return [
        rule.finding(file, rule.key, ABSENT)
        for rule in rules(place)
        if rule.is_of_absent and settings.get(rule.key) is ABSENT and rule.holds(ABSENT, settings)
    ]


def misspelt(
    file: str, key: str, value: Any, valid_names: Iterable[str], effect: Effect, message: str, error: str = ""
) -> Finding:
    """Return the finding for a key whose name is not valid.

    Its remedy is the most similar valid name. If there is no similar name, the remedy is to remove the key.
    """
    section, _, inner = key.rpartition(".")
    near = difflib.get_close_matches(inner[:LONGEST], sorted(valid_names), n=1, cutoff=0.8)
    return Finding(
        file=file, key=key, value=value, effect=effect, message=message, error=error, matters=True,
        mend=Instead(f"{section}.{near[0]}".lstrip(".")) if near else REMOVE,
        remedy=f"Write {near[0]}." if near else "Remove the key.",
    )  # fmt: skip
