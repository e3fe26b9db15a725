"""What is said of the keys of a file: findings, made of the table's rules."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import Any, Literal

from ..keys import known_keys
from ..keys.patterns import ABSENT, Mark, Pattern, holds

Effect = Literal["honoured", "ignored", "overridden", "crashes", "means something else", "not examined"]

REMOVE = Mark("remove")  # --fix takes the key out
KEEP = Mark("keep")  # --fix leaves it: what to write instead is for its owner to decide
UNSAID = Mark("unsaid")  # what the engine has then is not said

LONGEST = 200  # characters of a value that are printed


def cut(value: Any) -> Any:
    """A value of a file as it is printed: as it is, or of a long one the beginning and its length."""
    written = value if isinstance(value, str) else repr(value)
    return value if len(written) <= LONGEST else f"{written[:LONGEST]}... ({len(written):,} characters)"


@dataclass(frozen=True)
class Instead:
    """What --fix writes in the place of a key: another one, with this value or the old one."""

    key: str
    value: Any = KEEP


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one key of a file really does."""

    file: str
    key: str
    value: Any
    effect: Effect
    message: str = ""
    remedy: str = ""
    matters: bool = False  # whether the file does not do what its reader takes it to do
    mend: Any = field(default=KEEP, repr=False)
    engine_has: Any = UNSAID  # in the place of this key
    error: str = ""  # a piece of the error, where it crashes

    def as_json(self) -> dict[str, Any]:
        """The finding as --json prints it; a key that is absent has no value."""
        content = {name: getattr(self, name) for name in ("file", "effect", "message", "remedy", "matters")}
        said = {"key": self.key, "value": self.value, "engine_has": self.engine_has, "error": self.error or UNSAID}
        return content | {name: cut(value) for name, value in said.items() if not isinstance(value, Mark)}


class Settings:
    """What a file holds, by dotted keys."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    def get(self, key: str, default: Any = ABSENT) -> Any:
        """The value of a key, `default` where it or a section above it is missing."""
        here: Any = self.content
        for part in key.split("."):
            if not isinstance(here, dict) or part not in here:
                return default
            here = here[part]
        return here

    def nodes(self) -> Iterator[tuple[str, Any, bool]]:
        """Every key, a section before what is in it: its dotted name, its value, whether it is a section."""
        yield from _nodes(self.content, "")


def _nodes(content: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any, bool]]:
    for key, value in content.items():
        is_section = isinstance(value, dict) and bool(value)
        yield f"{above}{key}", value, is_section
        if is_section:
            yield from _nodes(value, f"{above}{key}.")


@dataclass(frozen=True)
class Rule:
    """What a key does under a condition. The first rule of a key whose condition holds is the one that counts."""

    key: str  # dotted; a * stands for anything
    effect: Effect
    of_absent: bool  # it is said where the key is missing
    when: Mapping[str, Pattern]
    whole: bool  # it says all there is to say of a section
    said: Mapping[str, Any]  # the rule as the table has it

    def finding(self, file: str, key: str, value: Any) -> Finding:
        """What the rule says of a key."""
        said = self.said
        mend = REMOVE if said.get("mend") == "remove" else said.get("mend", KEEP)
        if "instead" in said:
            other = said["instead"]
            mend = Instead(other) if isinstance(other, str) else Instead(*next(iter(other.items())))
        unsaid = value if self.effect == "honoured" else UNSAID
        return Finding(
            file=file,
            key=key,
            value=value,
            effect=self.effect,
            message=_filled_in(said.get("says", ""), key, value),
            remedy=_filled_in(said.get("remedy", ""), key, value),
            matters=not said.get("minor") and self.effect not in ("honoured", "not examined"),
            mend=mend,
            engine_has=said.get("has", unsaid),
            error=said.get("error", ""),
        )


def _filled_in(text: str, key: str, value: Any) -> str:
    text = text.replace("{value}", str(cut(value))).replace("{section}", key.partition(".")[0])
    for name in ("distributed_types", "schedulers"):
        text = text.replace(f"{{{name}}}", ", ".join(known_keys.listed(name)) if f"{{{name}}}" in text else "")
    return text


@cache
def rules(place: known_keys.Place) -> list[Rule]:
    """The rules of a place, in their order."""
    found = []
    for names, said in known_keys.read()["rules"][place].items():
        for name in _removed() if names == "<removed>" else names.split():
            for rule in said:
                of_absent = "absent" in rule
                effect = rule["absent" if of_absent else "does"]
                found.append(Rule(name, effect, of_absent, rule.get("when", {}), rule.get("whole", False), rule))
    return found


@lru_cache(maxsize=1024)
def _of_key(place: known_keys.Place, key: str) -> list[Rule]:
    """The rules of a key that is written."""
    return [rule for rule in rules(place) if not rule.of_absent and fnmatchcase(key, rule.key)]


def _removed() -> list[str]:
    in_zero = (f"zero_optimization.{name}" for name in known_keys.listed("removed_zero"))
    return [*known_keys.listed("removed"), *in_zero]


Unknown = Callable[[str, Any], Finding | None]


def examine(file: str, settings: Settings, place: known_keys.Place, unknown: Unknown) -> list[Finding]:
    """Say what each key of a file does: by its rule, as an unknown key, or else that it is honoured."""
    findings = []
    said_whole: tuple[str, ...] = ()
    for key, value, is_section in settings.nodes():
        if key.startswith(said_whole):
            continue
        of_key = (
            rule for rule in _of_key(place, key) if holds(rule.when, rule.key, value, settings, known_keys.listed)
        )
        rule = next(of_key, None)
        found = rule.finding(file, key, value) if rule else unknown(key, value)
        if found and is_section and (rule is None or rule.whole):
            said_whole += (f"{key}.",)
        if found is None and not is_section:
            found = Finding(file=file, key=key, value=value, effect="honoured", engine_has=value)
        if found:
            findings.append(found)
    for rule in rules(place):
        is_missing = rule.of_absent and settings.get(rule.key) is ABSENT
        if is_missing and holds(rule.when, rule.key, ABSENT, settings, known_keys.listed):
            findings.append(rule.finding(file, rule.key, ABSENT))
    return findings


def misspelt(
    file: str, key: str, value: Any, known: Iterable[str], effect: Effect, message: str, error: str = ""
) -> Finding:
    """What is said of a key that is none of those that are known: the one that is most like it, else to remove it."""
    section, _, inner = key.rpartition(".")
    near = difflib.get_close_matches(inner[:LONGEST], sorted(known), n=1, cutoff=0.8)
    return Finding(
        file=file, key=key, value=value, effect=effect, message=message, error=error, matters=True,
        mend=Instead(f"{section}.{near[0]}".lstrip(".")) if near else REMOVE,
        remedy=f"write {near[0]}" if near else "remove it",
    )  # fmt: skip
