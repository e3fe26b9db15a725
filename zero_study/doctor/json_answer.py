"""Make what `zero-study doctor --json` prints for configuration files and for this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from ..answers import envelope
from ..answers.envelope import Answer, Severity
from ..engines.keys.patterns import ABSENT
from ..errors import Refusal
from ..files import read_whole
from ..verdict import Verdict
from . import checkup
from .checkup import Check
from .examine import Examined, KeyChange
from .findings import Effect, Finding, cut
from .named_files import MOST_KEYS
from .several import Several

IDS: dict[Effect, str] = {
    "crashes": "doctor/fails-at-start-up",
    "means something else": "doctor/acts-differently",
    "overridden": "doctor/overridden-key",
    "ignored": "doctor/ignored-key",
}
NOTE = "doctor/works-with-a-note"
MISSING, RELEASE = "doctor/missing-key", "doctor/release-fault"
# The beginning of the name of a check of this machine, and the id of its findings. Every other check is of one GPU.
CHECKS = {
    "packages": "doctor/missing-packages",
    checkup.KNOWN_FAULTS: "doctor/installed-release-fault",
    "DeepSpeed's": "doctor/deepspeed-extension",
    "torch's extensions": "doctor/extension-lock",
    "torch.compile": "doctor/torch-compile",
    "CUDA toolkit": "doctor/cuda-toolkit",
    "two": "doctor/two-ranks",
    "pinned memory": "doctor/pinned-memory",
    "host memory": "doctor/host-memory",
    "disk of": "doctor/disk",
    "port": "doctor/port",
    "environment": "doctor/environment",
}
OF_GPU = "doctor/gpu"


def of_files(results: Several, fixed: tuple[Path, Sequence[KeyChange]] | None = None) -> Answer:
    """Return the answer for several files. `fixed` is the file that --fix wrote, with its changes."""
    findings_of_all = [
        finding
        for result in results.results.values()
        if isinstance(result, Examined)
        for finding in findings(result)
    ]  # fmt: skip
    return envelope.answer(
        "doctor", results.verdict, findings_of_all, {"files": results.content(), "checks": [], "fixed": _fixed(fixed)}
    )


def of_file(examined: Examined, fixed: tuple[Path, Sequence[KeyChange]] | None = None) -> Answer:
    """Return the answer for one configuration file."""
    return of_files(Several({examined.path: examined}), fixed)


def of_machine(checks: Sequence[Check], verdict: Verdict) -> Answer:
    """Return the answer for the checks of this machine."""
    severities: Mapping[str, Severity] = {"bites": "error", "note": "note"}
    findings_of_all = [
        envelope.Finding(_id_of(check), severities[check.verdict], check.message, check.remedy, name=check.name)
        for check in checks
        if check.verdict in severities
    ]
    return envelope.answer(
        "doctor", verdict, findings_of_all, {"files": [], "checks": list(map(vars, checks)), "fixed": None}
    )


def findings(examined: Examined) -> Iterator[envelope.Finding]:
    """Yield the notes about a file, and the findings that need attention. Keys that work as written are left out."""
    lines: dict[str, dict[str, int]] = {}
    for finding in examined.findings:
        if not (finding.matters or finding.is_note) or finding.effect == "not examined":
            continue
        if finding.file not in lines:
            lines[finding.file] = key_lines(Path(finding.file))
        yield envelope.Finding(
            id_of(finding),
            _severity(finding),
            f"{finding.release}: {finding.message}" if finding.is_about_release else finding.message,
            finding.remedy,
            file=finding.file,
            line=finding.line or (None if finding.value is ABSENT else lines[finding.file].get(finding.key)),
            key=str(cut(finding.key)),
            name=finding.fault or None,
        )


def id_of(finding: Finding) -> str:
    """Return the stable id of a finding in a configuration file."""
    if finding.is_about_release:
        return RELEASE
    if finding.value is ABSENT:
        return MISSING
    return IDS.get(finding.effect, NOTE)


def _severity(finding: Finding) -> Severity:
    if not finding.matters:
        return "note"
    return "error" if finding.effect == "crashes" or finding.is_about_release else "warning"


def _id_of(check: Check) -> str:
    return next((name for begin, name in CHECKS.items() if check.name.startswith(begin)), OF_GPU)


def _fixed(fixed: tuple[Path, Sequence[KeyChange]] | None) -> dict[str, Any] | None:
    if fixed is None:
        return None
    path, changes = fixed
    without = [{name: None if v is ABSENT else v for name, v in change._asdict().items()} for change in changes]
    return {"file": str(path), "changes": without}


def key_lines(path: Path) -> dict[str, int]:
    """Return the line number of each dotted key of a YAML or JSON file, counted from 1. Empty if they are not known."""
    with suppress(yaml.YAMLError, OSError, Refusal, RecursionError, ValueError):
        text = read_whole(path).decode().replace("\t", " ")  # which JSON may have between keys, and YAML may not
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return dict(islice(_key_lines(root, ""), MOST_KEYS))
    return {}


def _key_lines(node: Any, above: str) -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            name = f"{above}{key.value}"
            yield name, key.start_mark.line + 1
            yield from _key_lines(value, f"{name}.")
