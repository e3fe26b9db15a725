"""Refuse every key of a strategy file that this project does not accept.

Accelerate and DeepSpeed ignore keys that they do not know, for example a misspelt key in a section, or an NVMe path in
the YAML. They then silently run something else. Doctor's findings are given as reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..engines.keys import known_keys
from ..engines.keys.known_keys import Pattern
from ..engines.keys.patterns import ABSENT, as_in_file, in_words, matches
from .config_files import NOT_COERCED
from .findings import Finding, Settings, cut, misspelt

HPZ = "zero_optimization.zero_hpz_partition_size"  # of stage 3 only


def validation_errors(place: known_keys.Place, content: Mapping[str, Any], findings: Sequence[Finding]) -> list[str]:
    """Return why this project refuses a strategy file, as one text per key. Empty if it accepts the file.

    The reasons are unknown keys, wrong values and missing keys. `findings` are doctor's findings in the file, which
    explain the refusals.
    """
    of_key = {finding.key: finding for finding in findings}
    accepted = known_keys.accepted_values(place)
    parents = (key.split(".")[:-1] for key in accepted)
    sections = {".".join(names[: depth + 1]) for names in parents for depth in range(len(names))}
    unknown_keys, wrong_values = [], []
    for key, value in _keys_in(content, sections):
        if key in accepted:
            wrong_values.append(_value_error(place, key, value, accepted[key], of_key.get(key)))
        elif key in sections:
            wrong_values.append(f"{key} is {as_in_file(cut(value))}, and should be a section.")
        else:
            unknown_keys.append(_unknown_key_error(place, key, value, of_key.get(key)))
    settings, missing_keys = Settings(content), []
    for key in known_keys.read()["study"][place]["needed"]:
        section = key.rpartition(".")[0]
        # A missing key is not reported if the file does not have its section either.
        if settings.get(key) is ABSENT and (not section or isinstance(settings.get(section), dict)):
            missing_keys.append(f"{key} is missing.")
    return [*unknown_keys, *filter(None, wrong_values), *missing_keys]


def _value_error(
    place: known_keys.Place, key: str, value: Any, pattern: Pattern, finding: Finding | None
) -> str | None:
    """Return why this project does not accept the value of a key. None if it accepts the value."""
    if not matches(pattern, value, exactly=True):
        return _reason(place, key, value, finding) or f"{key} is {as_in_file(cut(value))}. Write {in_words(pattern)}."
    if finding is not None and _is_lost(key, finding):
        return f"{key}: {finding.message} {finding.remedy or 'Remove the key.'}"
    return None


def _unknown_key_error(place: known_keys.Place, key: str, value: Any, finding: Finding | None) -> str:
    """Return a text about a key that this project does not accept, with the remedy."""
    section, _, name = key.rpartition(".")
    is_removed = name in {*known_keys.engine_list("removed"), *known_keys.engine_list("removed_zero")}
    if reason := _reason(place, key, value, finding if is_removed else None):
        return reason
    split_keys = (accepted_key.rpartition(".") for accepted_key in known_keys.accepted_values(place))
    siblings = [sibling for parent, _, sibling in split_keys if parent == section]
    remedy = misspelt("", key, value, siblings, effect="crashes", message="").remedy
    return f"Unknown key {key!r}. {remedy}"


def _keys_in(content: Mapping[str, Any], sections: set[str], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a file with their values.

    For a section in which this project accepts keys, the keys in it are yielded instead of the section.
    """
    for name, value in content.items():
        key = f"{above}{name}"
        if key in sections and isinstance(value, dict):
            yield from _keys_in(value, sections, f"{key}.")
        else:
            yield key, value


def _reason(place: known_keys.Place, key: str, value: Any, finding: Finding | None) -> str | None:
    """Return why this project does not accept a key or its value.

    The project's own reason takes precedence over doctor's finding. None if there is neither.
    """
    value_text = " ".join(cut(value).split()) if isinstance(value, str) else as_in_file(value)
    own_reason = known_keys.read()["study"][place]["why"].get(key)
    is_unquoted_no = isinstance(value, bool) and finding is not None and finding.effect == "crashes"
    if own_reason and not is_unquoted_no:
        has_accepted_values = key in known_keys.accepted_values(place)
        subject = f"{key} is {value_text}." if has_accepted_values else f"{key} is not accepted in this file."
        return f"{subject} {own_reason}"
    # The accepted values explain such an error better.
    if finding is None or not finding.matters or finding.error == NOT_COERCED:
        return None
    return f"{key} is {value_text}. {finding.message} {finding.remedy}".rstrip()


def _is_lost(key: str, finding: Finding) -> bool:
    """Return whether a value that this project accepts has no effect, or stops the run.

    Some keys are ignored. Others are refused because the file also names a DeepSpeed JSON.
    """
    refused_beside_json = known_keys.engine_schema("accelerate", "not_beside_a_json")
    stops = finding.effect == "crashes" and key.rpartition(".")[2] in refused_beside_json
    return stops or (finding.effect == "ignored" and key == HPZ)
