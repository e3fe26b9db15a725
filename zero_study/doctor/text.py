"""Format doctor's findings in a file, and the changes that --fix made, as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import terminal
from ..engines import cpu_launch, extensions
from ..engines.keys.patterns import ABSENT
from ..files import read_whole
from ..verdict import Verdict
from .examine import KNOWN_KINDS, UNKNOWN_KIND, Examined, KeyChange, can_mend, examine_content, mended
from .findings import Effect, Finding, cut
from .named_files import is_json

# The verdicts as they are printed, the worst first.
VERDICTS: dict[Effect, str] = {
    "crashes": "fails at start-up",
    "means something else": "acts differently",
    "overridden": "overridden",
    "ignored": "ignored",
    "not examined": "not checked",
    "honoured": "works as written",
}


def text(examined: Examined, everything: bool = False, names_fix: bool = True) -> str:
    """Return the findings in a configuration file as text for a terminal.

    It has the known faults of the releases, the summary, and the findings by verdict. Harmless findings are only
    counted, unless `everything` is True. With `names_fix`, the text ends with the command that writes a corrected copy,
    if doctor can correct anything.
    """
    if examined.kind is None:
        return _wrapped(f"{examined.path}: {UNKNOWN_KIND}. {KNOWN_KINDS}")
    visible = [f for f in examined.findings if everything or f.matters or f.is_note or f.effect == "not examined"]
    of_release = [finding for finding in visible if finding.is_about_release]
    lines = [line for release in examined.releases.names for line in _release_lines(release, of_release)]
    lines.append(_wrapped(_summary(examined)))
    for effect, verdict in VERDICTS.items():
        of_verdict = [f for f in visible if f.effect == effect and not f.is_about_release]
        if of_verdict:
            lines += ["", f"{verdict[0].upper()}{verdict[1:]}:"]
        for finding in sorted(of_verdict, key=lambda f: not f.matters):
            lines += _finding_lines(finding, examined.path)
    if hidden := [finding for finding in examined.findings if finding not in visible]:
        # There is nothing else to list, so the count replaces the summary.
        if len(hidden) + len(of_release) == len(examined.findings):
            lines[-1] = _wrapped(f"{_name(examined)}: {_hidden_summary(hidden)}")
        else:
            lines += ["", _wrapped(_hidden_summary(hidden))]
    lines += [_wrapped(line) for line in (*_unchecked_lines(examined), *_cpu_lines(examined))]
    return "\n".join([*lines, *(_fix_lines(examined) if names_fix else ())])


def summary_of_several(results: Mapping[Path, Verdict], verdict: Verdict) -> str:
    """Return a sentence with the number of files that need a change, and the number that could not be checked."""
    states = [result.result for result in results.values()]
    parts = [f"{states.count('found')} with findings", f"{states.count('sound')} without"]
    if "unknown" in states:
        parts.append(f"{states.count('unknown')} that could not be checked")
    number = terminal.count(len(results), "file")
    return _wrapped(f"{number}: {', '.join(parts)}. Together: {verdict.coverage()}.")


def _unchecked_lines(examined: Examined) -> list[str]:
    """Return sentences about what could not be checked in a file, and about the keys that only its own tool reads."""
    return [f"{check.what}: not checked, because {check.why.rstrip('.')}." for check in examined.not_checked]


def _cpu_lines(examined: Examined) -> list[str]:
    """Return what a script has to do to train with a DeepSpeed configuration on this machine, which has no GPU."""
    is_deepspeed = examined.kind == "accelerate" and examined.content.get("distributed_type") == "DEEPSPEED"
    return [cpu_launch.OF_FILE] if is_deepspeed and not extensions.sees_gpu() else []


def _summary(examined: Examined) -> str:
    """Return a sentence that says how many keys of a file need a change."""
    of_keys = [finding for finding in examined.findings if not finding.is_about_release]
    missing = sum(finding.value is ABSENT for finding in of_keys if finding.matters)
    wrong = sum(finding.matters for finding in of_keys) - missing
    num_keys = sum(finding.value is not ABSENT for finding in of_keys)
    keys = terminal.count(num_keys, "key")
    if not num_keys and not missing:
        return f"{_name(examined)}: it has no keys that accelerate, DeepSpeed or FSDP read, so nothing was checked."
    if wrong:
        summary = f"{wrong} of {keys} {'does' if wrong == 1 else 'do'} not work as written"
        summary += f", and {_missing_keys(missing)}" if missing else ""
    elif missing:
        summary = f"{_missing_keys(missing)}; the {keys} in the file need no change"
    else:
        summary = f"nothing to change in {keys}"
    return f"{_name(examined)}: {summary}."


def _name(examined: Examined) -> str:
    """Return the name of a file, with its kind unless that is accelerate or DeepSpeed."""
    is_plain = examined.kind in ("accelerate", "deepspeed", "ddp")
    return str(examined.path) if is_plain else f"{examined.path} ({examined.title})"


def _missing_keys(number: int) -> str:
    return "1 key is missing" if number == 1 else f"{number} keys are missing"


def _hidden_summary(hidden: Sequence[Finding]) -> str:
    """Return a sentence that counts the findings that are not listed."""
    num_unexpected = sum(finding.effect != "honoured" for finding in hidden)
    num_expected = len(hidden) - num_unexpected
    parts = [f"{num_expected} work{'s' * (num_expected == 1)} as written"] if num_expected else []
    if num_unexpected:
        parts.append(f"{num_unexpected} {'has' if num_unexpected == 1 else 'have'} another effect, which does no harm")
    number = "1 key needs" if len(hidden) == 1 else f"{len(hidden)} keys need"
    return f"{number} no change: {', and '.join(parts)}. Add --all to list them."


def _release_lines(release: str, findings: Sequence[Finding]) -> list[str]:
    """Return lines about the known faults of a release that affect a training with the file."""
    findings = [finding for finding in findings if finding.release == release]
    if not findings:
        is_deepspeed = release.startswith("deepspeed==")  # the known faults of other packages depend on the program
        return [_wrapped(f"{release}: no known fault affects this configuration.")] if is_deepspeed else []
    if findings[0].effect == "not examined":
        return [_wrapped(f"{release} was not checked: {findings[0].message}."), ""]
    lines = [_wrapped(f"{release} trains this configuration wrongly:")]
    return [*lines, *(_wrapped(finding.message, "  - ", "    ") for finding in findings), ""]


def _fix_lines(examined: Examined) -> list[str]:
    """Return the command that writes a corrected copy of a file. Empty if --fix can correct nothing."""
    if not any(finding.matters for finding in examined.findings) or not can_mend(examined):
        return []
    path, number = examined.path, 1
    while (out := path.with_stem(f"{path.stem}-fixed{number if number > 1 else ''}")).exists():
        number += 1
    options = [word for release in examined.releases.names for word in ("--for", release)]
    words = ["zero-study", "doctor", str(path), *options, "--fix", str(out)]
    return ["", "To write a corrected copy:", terminal.command(map(terminal.printable, words), "  ")]


def _finding_lines(finding: Finding, path: Path) -> list[str]:
    """Return the lines for a finding: the key with its value, then what happens and what to do."""
    is_of_other_file = finding.file != str(path)
    place = f" (in {finding.file})" if is_of_other_file else ""
    lines = [_wrapped(f"{cut(finding.key)}: {shown_value(finding.value)}{place}", "  ", "      ")]
    if message := f"{finding.message} {finding.remedy}".strip():
        lines.append(_wrapped(message, "    "))
    return lines


def shown_value(value: Any) -> str:
    """Return a value as JSON for printing. A section is shortened to "{...}", and a missing key is "(missing)"."""
    if value is ABSENT:
        return "(missing)"
    return "{...}" if isinstance(value, dict) and value else json.dumps(cut(value), default=str, ensure_ascii=False)


def changes_text(examined: Examined, out: Path, changes: Sequence[KeyChange]) -> str:
    """Return a text about the corrected file that --fix wrote, and about the findings that it could not correct."""
    number = {0: "no change", 1: "1 change"}.get(len(changes), f"{len(changes)} changes")
    lines = [_wrapped(f"--fix wrote {out} with {number}{':' if changes else '.'}")]
    for change in changes:
        if change.new is ABSENT:
            line = f"{change.key}: removed (it was {shown_value(change.old)})"
        else:
            was = "it was missing" if change.old is ABSENT else f"it was {shown_value(change.old)}"
            new = json.dumps(change.new, default=str) if isinstance(change.new, dict) else shown_value(change.new)
            line = f"{change.key}: {new} ({was})"
        lines.append(_wrapped(line, "  ", "      "))
    if changes and _has_comments(examined.path):
        lines.append(_wrapped(f"The comments of {examined.path} were not copied to {out}."))
    own = str(examined.path)
    fixed = examine_content(examined.path, mended(examined), examined.kind, examined.releases)
    remaining = [f for f in fixed.findings if f.matters and not f.is_about_release]
    if undecided := [f.key for f in remaining if f.file == own]:
        lines.append(_wrapped(f"You must decide what to write for: {', '.join(undecided)}."))
    if other_files := sorted({f.file for f in remaining if f.file != own}):
        lines.append(_wrapped(f"--fix did not change {', '.join(other_files)}. Check and fix each file separately."))
    return "\n".join(lines)


def _has_comments(path: Path) -> bool:
    """Return whether a YAML file has lines that are comments."""
    return not is_json(path) and any(line.lstrip().startswith(b"#") for line in read_whole(path).splitlines())


def _wrapped(text: str, indent: str = "", later_indent: str | None = None) -> str:
    """Return a text wrapped for a terminal, with control characters of a user's file escaped."""
    return terminal.wrap(terminal.printable(text), indent, later_indent)
