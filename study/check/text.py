"""Format the report on a project as text for a terminal, and as the fields of its JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import terminal
from ..answers.envelope import Finding
from . import settings
from .examine import Report

_NOTHING = (
    "Nothing was checked: there is no configuration file of a tool that is known, no lock file that pins a known "
    "package, and no checkpoint was named."
)


def text(report: Report) -> str:
    """Return the report as text: the summary, the findings by file, and what could not be checked."""
    blocks = [terminal.wrap(_summary(report))]
    by_path: dict[str, list[Finding]] = {}
    for finding in report.findings:
        by_path.setdefault(report.path_of(finding), []).append(finding)
    for path, findings in by_path.items():
        blocks.append("\n".join([terminal.printable(path) or "(no file)", *map(_lines, findings)]))
    if report.not_checked:
        reasons = [f"Not checked: {terminal.printable(str(each))}" for each in dict.fromkeys(report.not_checked)]
        blocks.append("\n".join(terminal.wrap(reason) for reason in reasons))
    if report.unused:
        entries = ", ".join(map(str, report.unused))
        blocks.append(
            terminal.wrap(f"Accepted in {settings.FILE}, but not found any more: {entries}. Remove the entry.")
        )
    return "\n\n".join(blocks)


def content(report: Report) -> dict[str, Any]:
    """Return the report's own fields for JSON. The findings and the verdict are in the envelope."""
    return {
        "configuration_files": report.configs,
        "lock_files": report.locks,
        "checkpoints": report.checkpoints,
        "lock_files_compared_with": report.since,
        "deepspeed_release": report.release,
        "accepted_findings": [{**finding.content(), "reason": entry.reason} for finding, entry in report.accepted],
        "accepted_without_finding": [entry.model_dump() for entry in report.unused],
    }


def markdown(report: Report) -> str:
    """Return the report for a comment on a pull request or a summary of a job."""
    lines = ["### zero-study check", "", terminal.escape_markdown(_summary(report))]
    if report.findings:
        rows = [_row(report, finding) for finding in report.findings]
        lines += ["", *terminal.markdown(["place", "severity", "finding"], rows, num_texts=3)]
    lines += [f"\nNot checked: {terminal.escape_markdown(str(each))}" for each in dict.fromkeys(report.not_checked)]
    return "\n".join(lines) + "\n"


def _row(report: Report, finding: Finding) -> list[str]:
    line = f":{finding.line}" if finding.line else ""
    place = " ".join(filter(None, [f"{report.path_of(finding)}{line}", finding.key or finding.name]))
    return [place, finding.severity, f"{finding.text} {finding.remedy} ({finding.id})"]


def baseline(report: Report) -> str:
    """Return the lines of pyproject.toml that accept the findings, with placeholders for the reasons."""
    return "\n".join(settings.entries([(finding, report.path_of(finding)) for finding in report.findings]))


def _summary(report: Report) -> str:
    if not (report.configs or report.locks or report.checkpoints):
        return _NOTHING
    counts = [
        (report.configs, "configuration file"), (report.locks, "lock file"), (report.checkpoints, "checkpoint"),
    ]  # fmt: skip
    checked = terminal.names([terminal.count(len(names), noun) for names, noun in counts if names])
    severities = [finding.severity for finding in report.findings]
    found = [terminal.count(severities.count(each), each) for each in ("error", "warning") if each in severities]
    sentences = [f"{checked} checked: {terminal.names(found) if found else 'nothing found'}."]
    if report.since is not None:
        sentences.append(f"Lock files were compared with those of {report.since}.")
    if report.release is not None:
        sentences.append(f"The known faults of {report.release} were looked up, which a lock file pins.")
    if report.accepted:
        sentences.append(f"{terminal.count(len(report.accepted), 'finding')} accepted in {settings.FILE}.")
    return " ".join(sentences)


def _lines(finding: Finding) -> str:
    return "\n".join(_of_finding(finding))


def _of_finding(finding: Finding) -> Iterator[str]:
    """Yield the lines of a finding: its place and text, its remedy, and its id, by which it can be accepted."""
    place = ", ".join(filter(None, [finding.line and f"line {finding.line}", finding.key or finding.name]))
    begin = f"{finding.severity}: {f'{place}: ' if place else ''}{finding.text}"
    remedy = f" {finding.remedy}" if finding.remedy else ""
    yield terminal.wrap(terminal.printable(f"{begin}{remedy} [{finding.id}]"), "  ", "    ")
