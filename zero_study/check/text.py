"""Format the report of `zero-study check` for a terminal, for Markdown and for --json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from zero_study import terminal
from zero_study.answers import envelope
from zero_study.answers.envelope import Answer, Finding
from zero_study.check import settings
from zero_study.check.examine import Report

_FOREIGN_KEYS = re.compile(r"(\d+) other keys?")
MOST_ROWS = 10  # of a comment on a pull request
_NOTHING = (
    "Nothing was checked. There is no configuration file of a known tool and no lock file that pins a known "
    "package, and you named no checkpoint."
)


def text(report: Report, everything: bool = False) -> str:
    """Return the report as text: the summary, the findings by file, and what could not be checked.

    Notes are only counted, unless `everything` is True.
    """
    blocks = [terminal.wrap(_summary(report))]
    by_path: dict[str, list[Finding]] = {}
    for finding in report.findings:
        if everything or finding.severity != "note":
            by_path.setdefault(report.path_of(finding), []).append(finding)
    for path, findings in by_path.items():
        blocks.append("\n".join([terminal.printable(path), *_lines(findings)]))
    hidden = len(report.findings) - sum(map(len, by_path.values()))
    if hidden:
        blocks.append(f"{terminal.count(hidden, 'note')} not shown. Add --all to list them.")
    if report.unused_changes:
        blocks.append(terminal.wrap(f"{_left_out(report)} To list them: zero-study upgrade OLD NEW."))
    blocks += [terminal.wrap(terminal.printable(line)) for line in _not_checked(report, everything)]
    if report.unused:
        names = terminal.listed([str(entry) for entry in report.unused])
        rest = f"Accepted in {settings.FILE}, but not found, or only until a day that has passed: {names}."
        blocks.append(terminal.wrap(rest))
    return "\n\n".join(blocks)


def _left_out(report: Report) -> str:
    noun = "change of releases is" if report.unused_changes == 1 else "changes of releases are"
    return f"{report.unused_changes} known {noun} left out, because no file of the project uses what changes."


def _not_checked(report: Report, everything: bool = False) -> Iterator[str]:
    """Yield one line with what was not checked, and one for each reason if the check was requested."""
    entries = report.verdict.not_checked
    shown = [entry for entry in entries if entry.is_requested or everything]
    yield from (f"Not checked: {entry}" for entry in shown)
    optional = [entry.what for entry in entries if entry not in shown]
    counts = [int(match[1]) for name in optional if (match := _FOREIGN_KEYS.fullmatch(name))]
    names = [name for name in optional if not _FOREIGN_KEYS.fullmatch(name)]
    names += [
        terminal.count(sum(counts), "key that only another tool reads", "keys that only other tools read")
    ] * bool(counts)
    if names:
        yield f"Not checked: {terminal.listed(names)}."


def answer(report: Report) -> Answer:
    """Return the report in the form that `zero-study check --json` prints."""
    return envelope.answer("check", report.verdict, report.findings, _fields(report))


def _fields(report: Report) -> dict[str, Any]:
    return {
        "configuration_files": report.configs,
        "lock_files": report.locks,
        "checkpoints": report.checkpoints,
        "lock_files_compared_with": report.since,
        "deepspeed_release": report.deepspeed_release,
        "releases": report.releases,
        "unused_changes": report.unused_changes,
        "accepted_findings": [{**finding.content(), "reason": entry.reason} for finding, entry in report.accepted],
        "accepted_without_finding": [vars(entry) for entry in report.unused],
    }


def markdown(report: Report) -> str:
    """Return the report as Markdown, without notes, for a comment on a pull request or the summary of a job."""
    lines = ["### zero-study check", "", terminal.escape_markdown(_summary(report))]
    findings = [finding for finding in report.findings if finding.severity != "note"]
    if shown := sorted(findings, key=lambda finding: _order(report, finding))[:MOST_ROWS]:
        rows = []
        for finding in shown:
            path = f"{report.path_of(finding)}{f':{finding.line}' if finding.line else ''}"
            place = (path, finding.key or finding.name)
            text = (_ended(finding.text), finding.remedy, f"({finding.id})")
            rows.append([" ".join(filter(None, place)), finding.severity, " ".join(filter(None, text))])
        lines += ["", *terminal.markdown(["place", "severity", "finding"], rows, num_texts=3)]
    if len(findings) > len(shown):
        lines.append(f"\n{terminal.count(len(findings) - len(shown), 'more finding')}: run `zero-study check`.")
    if report.unused_changes:
        lines.append(f"\n{terminal.escape_markdown(_left_out(report))}")
    lines += [f"\n{terminal.escape_markdown(line)}" for line in _not_checked(report)]
    return "\n".join(lines) + "\n"


def _order(report: Report, finding: Finding) -> tuple[bool, bool]:
    """Return a sort key: first what a changed release or line causes, and errors before warnings."""
    is_touched = finding.line in report.changed_lines.get(report.path_of(finding), ())
    return not (is_touched or finding.id.startswith("upgrade/")), finding.severity != "error"


def baseline(report: Report) -> str:
    """Return the lines to add to pyproject.toml to accept all findings, with placeholders for the reasons."""
    findings = [(finding, report.path_of(finding)) for finding in report.findings if finding.severity != "note"]
    return "\n".join(settings.entries(findings))


def _summary(report: Report) -> str:
    if not (report.configs or report.locks or report.checkpoints):
        return "Nothing was checked." if report.not_checked else _NOTHING
    counts = [
        (report.configs, "configuration file"), (report.locks, "lock file"), (report.checkpoints, "checkpoint"),
    ]  # fmt: skip
    checked = terminal.listed([terminal.count(len(names), noun) for names, noun in counts if names])
    severities = [finding.severity for finding in report.findings]
    counted = [
        terminal.count(severities.count(severity), severity)
        for severity in ("error", "warning")
        if severity in severities
    ]
    sentences = [f"Checked {checked}: {terminal.listed(counted) if counted else 'nothing needs a change'}."]
    if report.since is not None:
        sentences.append(f"Lock files were compared with those of {report.since}.")
    if report.releases:
        sentences.append(f"The configuration files were judged by {terminal.listed(report.releases)}.")
    if report.accepted:
        sentences.append(f"{terminal.count(len(report.accepted), 'finding')} accepted in {settings.FILE}.")
    return " ".join(sentences)


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines of the findings in a file. A remedy that several findings share is printed only once."""
    last = {finding.remedy: number for number, finding in enumerate(findings)}
    for number, finding in enumerate(findings):
        place = ", ".join(filter(None, [f"line {finding.line}" if finding.line else "", finding.key or finding.name]))
        begin = f"{finding.severity}: {f'{place}: ' if place else ''}{finding.text}"
        is_own = sum(other.remedy == finding.remedy for other in findings) == 1
        remedy = f" {finding.remedy}" if finding.remedy and is_own else ""
        yield terminal.wrap(terminal.printable(f"{_ended(begin)}{remedy} [{finding.id}]"), "  ", "    ")
        if finding.remedy and not is_own and last[finding.remedy] == number:
            yield terminal.wrap(terminal.printable(finding.remedy), "  ")


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", ")", "?")) else f"{sentence}."
