"""Examine several configuration files at once, with a result per file, a summary, and one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import terminal
from ..errors import Refusal
from ..verdict import Inputs, NotChecked, Verdict
from . import examine as examining
from . import text as formatting
from .examine import Examined
from .kinds import OF_TRAINERS
from .of_release import Releases


@dataclass(frozen=True)
class Several:
    """The results for several files, in the order in which they were named."""

    results: dict[Path, Examined | Refusal]  # a Refusal if the file cannot be read

    @property
    def verdicts(self) -> dict[Path, Verdict]:
        return {path: _verdict(path, result) for path, result in self.results.items()}

    @property
    def verdict(self) -> Verdict:
        """The verdict on all files together. It is "sound" only if every file was checked and nothing was found."""
        inputs = Inputs(*map(str, self.results))
        for path, each in self.verdicts.items():
            inputs.end(str(path), each)
        verdict = inputs.verdict()
        number = sum(entry.number for entry in verdict.checked)
        return replace(verdict, checked=tuple(entry._replace(number=number) for entry in verdict.checked[:1]))

    def text(self, everything: bool) -> str:
        """Return the results as text for a terminal: the summary, then each file."""
        blocks = [formatting.summary_of_several(self.verdicts, self.verdict)]
        for result in self.results.values():
            if isinstance(result, Refusal):
                blocks.append(terminal.wrap(terminal.printable(str(result))))
            else:
                blocks.append(formatting.text(result, everything))
        return "\n\n".join(blocks)

    def content(self) -> list[dict[str, Any]]:
        """Return the result of each file for JSON: its verdict and all findings, including those on keys that work."""
        return [_content(path, result) for path, result in self.results.items()]


def examine(paths: Sequence[Path], *releases: str) -> Several:
    """Examine several files, and return their results. The result for a file that cannot be read is a Refusal.

    Raises Refusal if one of `releases` is not one that doctor knows how to judge, because that concerns all files.
    """
    Releases.of(releases)
    results: dict[Path, Examined | Refusal] = {}
    for path in dict.fromkeys(paths):
        try:
            results[path] = examining.examine(path, *releases)
        except Refusal as refusal:
            results[path] = refusal
    examined = [result for result in results.values() if isinstance(result, Examined)]
    return Several({path: _as_used(result, examined) for path, result in results.items()})


def _as_used(result: Examined | Refusal, candidates: Sequence[Examined]) -> Examined | Refusal:
    """Return the result for a DeepSpeed file as the program reads it whose file names it, preferably a Trainer.

    `candidates` are the other examined files.
    """
    if isinstance(result, Refusal) or result.kind != "deepspeed":
        return result
    place = result.path.resolve()
    for candidate in sorted(candidates, key=lambda result: result.kind not in {*OF_TRAINERS, "axolotl"}):
        findings = [finding for finding in candidate.findings if Path(finding.file).resolve() == place]
        if candidate is not result and findings:
            own = [finding for finding in result.findings if finding.is_about_release]
            return replace(result, findings=own + [replace(finding, file=str(result.path)) for finding in findings])
    return result


def _verdict(path: Path, result: Examined | Refusal) -> Verdict:
    if isinstance(result, Refusal):
        return Verdict.of(0, not_checked=[NotChecked(str(path), str(result), True)])
    return result.verdict


def _content(path: Path, result: Examined | Refusal) -> dict[str, Any]:
    if isinstance(result, Refusal):
        return {
            "file": str(path),
            "kind": None,
            "findings": [],
            "error": str(result),
            **_verdict(path, result).content(),
        }
    return result.as_content()
