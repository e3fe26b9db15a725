"""What is said of a key, and how is it said? Findings, and the rules of which they are made."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

Effect = Literal["honoured", "ignored", "overridden", "crashes", "means something else", "not examined"]


class Mark:
    """A value that no file can hold."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


ABSENT = Mark("(absent)")  # the key is not in the file
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


Condition = Callable[[Any, Any], bool]  # of the key's value, and of the whole file


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a key does under a condition. The first rule of a key whose condition holds is the one that counts."""

    key: str  # dotted; a * stands for anything
    effect: Effect
    message: str = ""  # with {value} for what is written
    remedy: str = ""
    when: Condition = lambda value, settings: True
    of_absent: bool = False  # it is said where the key is missing
    matters: bool = True
    whole: bool = False  # it says all there is to say of a section
    mend: Any = KEEP
    engine_has: Any = UNSAID
    error: str = ""

    def finding(self, file: str, key: str, value: Any) -> Finding:
        """What the rule says of a key."""
        return Finding(
            file=file,
            key=key,
            value=value,
            effect=self.effect,
            message=self.message.replace("{value}", str(cut(value))),
            remedy=self.remedy.replace("{value}", str(cut(value))),
            matters=self.matters and self.effect not in ("honoured", "not examined"),
            mend=self.mend,
            engine_has=value if self.engine_has is UNSAID and self.effect == "honoured" else self.engine_has,
            error=self.error,
        )


Unknown = Callable[[str, Any], Finding | None]


def examine(file: str, settings: Any, rules: Sequence[Rule], unknown: Unknown) -> list[Finding]:
    """Say what each key of a file does: by its rule, as an unknown key, or else that it is honoured."""
    findings = []
    said_whole: tuple[str, ...] = ()
    for key, value, is_section in settings.nodes():
        if key.startswith(said_whole):
            continue
        rule = next((r for r in rules if not r.of_absent and _applies(r, key, value, settings)), None)
        found = rule.finding(file, key, value) if rule else unknown(key, value)
        if found and is_section and (rule is None or rule.whole):
            said_whole += (f"{key}.",)
        if found is None and not is_section:
            found = Finding(file=file, key=key, value=value, effect="honoured", engine_has=value)
        if found:
            findings.append(found)
    for rule in rules:
        if rule.of_absent and settings.get(rule.key) is ABSENT and rule.when(ABSENT, settings):
            findings.append(rule.finding(file, rule.key, ABSENT))
    return findings


def _applies(rule: Rule, key: str, value: Any, settings: Any) -> bool:
    return fnmatchcase(key, rule.key) and rule.when(value, settings)


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
