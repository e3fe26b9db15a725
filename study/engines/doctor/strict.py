"""The study's strict reader of a strategy's file: doctor, where every key that the study does not take is refused.

Accelerate and DeepSpeed ignore what they do not know (a nested typo, an NVMe path in the YAML) and then silently run
something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..keys import known_keys
from ..keys.patterns import ABSENT, fits, in_words, shown
from .config_files import NOT_COERCED
from .findings import Finding, Settings, cut, misspelt

HPZ = "zero_optimization.zero_hpz_partition_size"  # of stage 3 only


def refusals(place: known_keys.Place, content: Mapping[str, Any], findings: Sequence[Finding]) -> list[str]:
    """Say why the study refuses a file, the keys that are not known first; nothing where it takes it.

    `findings`: what doctor says of the file, which explains what is refused.
    """
    settings, taken = Settings(content), known_keys.taken(place)
    about = {finding.key: finding for finding in findings}
    removed = {*known_keys.listed("removed"), *known_keys.listed("removed_zero")}
    unknown, wrong = [], []
    for key, value in _written(content, _sections(place)):
        pattern = taken.get(key)
        if pattern is not None:
            finding = about.get(key)
            if not fits(pattern, value, known_keys.listed, exactly=True):
                wrong.append(
                    _not_taken(place, key, value, finding) or f"{key}={cut(value)!r}: should be {in_words(pattern)}"
                )
            elif finding is not None and _is_lost(key, finding):
                wrong.append(f"{key}: {finding.message}; {finding.remedy or 'remove it'}")
        elif key in _sections(place):
            wrong.append(f"{key}={cut(value)!r}: should be a section")
        else:
            is_removed = key.rpartition(".")[2] in removed
            finding = about.get(key) if is_removed else None
            unknown.append(_not_taken(place, key, value, finding) or _unknown(place, key, value))
    needed = known_keys.read()["study"][place]["needed"]
    missing = [f"{key} is missing" for key in needed if settings.get(key) is ABSENT and _could_be(settings, key)]
    return [*unknown, *wrong, *missing]


def _sections(place: known_keys.Place) -> set[str]:
    """The sections in which the study takes keys."""
    parents = (key.split(".")[:-1] for key in known_keys.taken(place))
    return {".".join(names[: depth + 1]) for names in parents for depth in range(len(names))}


def _written(content: Mapping[str, Any], sections: set[str], above: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a file, of a section that the study knows those in it."""
    for name, value in content.items():
        key = f"{above}{name}"
        if key in sections and isinstance(value, dict):
            yield from _written(value, sections, f"{key}.")
        else:
            yield key, value


def _not_taken(place: known_keys.Place, key: str, value: Any, finding: Finding | None) -> str | None:
    """Why the study does not take a key or its value: its own reason, else what becomes of it."""
    written = " ".join(cut(value).split()) if isinstance(value, str) else shown(value)
    why = known_keys.read()["study"][place]["why"].get(key)
    is_odd = isinstance(value, bool) and finding is not None and finding.effect == "crashes"  # an unquoted no
    if why and not is_odd:
        return f"{key}: {written} {why}" if key in known_keys.taken(place) else f"{key} {why}"
    if finding is None or not finding.matters or finding.error == NOT_COERCED:  # of which the study's pattern says more
        return None
    return f"{key}: {written}: {finding.message}; {finding.remedy}"


def _is_lost(key: str, finding: Finding) -> bool:
    """Whether a value that the study takes is lost where it stands: accelerate wants none beside a JSON."""
    beside = known_keys.installed("accelerate", "not_beside_a_json")
    stops = finding.effect == "crashes" and key.rpartition(".")[2] in beside
    return stops or (finding.effect == "ignored" and key == HPZ)


def _unknown(place: known_keys.Place, key: str, value: Any) -> str:
    section, _, _ = key.rpartition(".")
    beside = [name.rpartition(".")[2] for name in known_keys.taken(place) if name.rpartition(".")[0] == section]
    remedy = misspelt("", key, value, beside, effect="crashes", message="").remedy
    return f"unknown key {key!r}; {remedy}"


def _could_be(settings: Settings, key: str) -> bool:
    """Whether the section of a key that is missing is there."""
    section = key.rpartition(".")[0]
    return not section or isinstance(settings.get(section), dict)
