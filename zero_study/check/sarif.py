"""Write findings as SARIF 2.1.0, a format that code hosts and editors show next to the lines concerned."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

from zero_study.answers.envelope import Finding
from zero_study.answers.ids import IDS
from zero_study.check.examine import Report
from zero_study.version import __version__

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "%SRCROOT%"  # the name of the project's folder in addresses of files


def content(report: Report) -> dict[str, Any]:
    """Return the report without notes as a SARIF log with one run.

    Accepted findings are marked as suppressed, with the reason.
    """
    results = [_result(report, finding) for finding in report.findings if finding.severity != "note"]
    for finding, entry in report.accepted:
        suppression = {"kind": "external", "justification": entry.reason}
        results.append({**_result(report, finding), "suppressions": [suppression]})
    used = sorted({result["ruleId"] for result in results})
    rules = [{"id": name, "shortDescription": {"text": IDS[name]}} for name in used]
    notes = [{"level": "note", "message": {"text": f"Not checked: {check}"}} for check in report.verdict.not_checked]
    run = {
        "tool": {"driver": {"name": "zero-study", "version": __version__, "rules": rules}},
        "originalUriBaseIds": {ROOT: {"description": {"text": "The folder of the project."}}},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
        "results": results,
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(report: Report, finding: Finding) -> dict[str, Any]:
    text = f"{finding.text} {finding.remedy}".strip()
    path = report.path_of(finding)
    same = "\0".join([finding.id, path, finding.key or "", finding.name or "", finding.text])
    return {
        "ruleId": finding.id,
        "level": finding.severity,
        "message": {"text": text},
        "locations": [{"physicalLocation": _place(path, finding)}] if path else [],
        "partialFingerprints": {"zeroStudy/v1": hashlib.sha256(same.encode()).hexdigest()},
    }


def _place(path: str, finding: Finding) -> dict[str, Any]:
    """Return where a finding is. Without a line, it is about the whole file, which hosts show at the first line."""
    is_inside = not Path(path).is_absolute()
    address = {"uri": quote(path), "uriBaseId": ROOT} if is_inside else {"uri": Path(path).as_uri()}
    return {"artifactLocation": address, "region": {"startLine": finding.line or 1}}
