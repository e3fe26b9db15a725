"""Check a project: its configuration files, its named checkpoints, and changes of its lock files since a commit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from study.answers.envelope import Finding
from study.check import project as projects
from study.check import settings as reading
from study.check.project import Project
from study.check.settings import Accepted, Settings
from study.doctor import json_answer as of_doctor
from study.doctor import several
from study.doctor.examine import Examined
from study.errors import Refusal
from study.upgrade import changes
from study.upgrade import json_answer as of_upgrade
from study.upgrade.locks import Lock
from study.verdict import Checked, NotChecked, Verdict

DEEPSPEED = "deepspeed"
OF_CHECKPOINTS = {".safetensors", ".bin", ".pt", ".distcp"}  # endings of files
# The ends of the ids of findings, and how their texts then begin.
DIRECTIONS = {
    "fault-begins": "A fault begins: ", "fault-ends": "A fault ends: ", "fault-stays": "A fault stays: ",
    "crash-begins": "A crash begins: ", "crash-ends": "A crash ends: ", "crash-stays": "A crash stays: ",
}  # fmt: skip


@dataclass
class Report:
    """The files of a project that were checked, and the findings about them."""

    project: Project
    settings: Settings
    findings: list[Finding] = field(default_factory=list)
    accepted: list[tuple[Finding, Accepted]] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)  # the files that were checked, relative to the project
    locks: list[str] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    since: str | None = None  # the commit with which lock files were compared
    release: str | None = None  # the release of DeepSpeed whose known faults were looked up
    not_checked: list[NotChecked] = field(default_factory=list)
    _checked: list[Checked] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """The verdict on the project. Notes and accepted findings do not count."""
        return Verdict.of(sum(f.severity != "note" for f in self.findings), self._checked, self.not_checked)

    @property
    def unused(self) -> list[Accepted]:
        """The entries of the settings whose accepted finding no longer occurs."""
        used = [entry for _, entry in self.accepted]
        return [entry for entry in self.settings.accepted if entry not in used]

    def path_of(self, finding: Finding) -> str:
        """Return the path of a finding's file relative to the project, or "" if the finding is not about a file."""
        return "" if finding.file is None else self.project.name_of(Path(finding.file))

    def add(self, findings: Iterable[Finding], checked: Iterable[Checked], not_checked: Iterable[NotChecked]) -> None:
        """Add to the report what a check compared and what it found, except findings that the project accepts."""
        for finding in findings:
            path = self.path_of(finding)
            entry = next((accepted for accepted in self.settings.accepted if accepted.covers(finding, path)), None)
            if entry is None:
                self.findings.append(finding)
            else:
                self.accepted.append((finding, entry))
        self._checked.extend(checked)
        self.not_checked.extend(not_checked)


def examine(paths: Sequence[Path], since: str | None = None) -> Report:
    """Check files and folders of a project, by default the current folder, and return the report.

    A folder is searched for configuration and lock files. A checkpoint is checked if its folder is named, or, without
    paths, if the settings list it. Lock files are compared with those in the commit `since`, by default the one of the
    settings. Raises Refusal if a path does not exist, git does not know the commit, or the settings cannot be read.
    """
    named = list(paths) or [Path()]
    for path in named:
        if not path.is_file() and not path.is_dir():
            why = "this is neither a file nor a folder" if path.exists() else "this file or folder does not exist"
            raise Refusal(f"{path}: {why}. Name files or folders of the project.")
    first = named[0] if named[0].is_dir() else named[0].parent
    project, place = projects.find(first), reading.find(first.absolute())
    settings = Settings() if place is None else reading.read(place)
    report = Report(project, settings)
    files = list(_files(project, settings, named))
    locks = [path for path in files if projects.is_lock(path)]
    pins = _read_locks(report, locks, set(named))
    _check_locks(report, pins, since or settings.since, is_asked=since is not None)
    _check_configs(report, [path for path in files if path not in locks], set(named), pins)
    checkpoints = [path for path in named if path.is_dir() and _is_checkpoint(path)]
    if place is not None and not paths:
        checkpoints += [place.parent / folder for folder in settings.checkpoints]
    _check_checkpoints(report, checkpoints)
    return report


def _files(project: Project, settings: Settings, named: Sequence[Path]) -> Iterable[Path]:
    """Return the files to check: the named files, and all files in the named folders."""
    files: dict[Path, None] = {}
    for path in named:
        if path.is_file():
            files[path] = None
        elif not _is_checkpoint(path):
            candidates = (file for file in project.files(path) if projects.is_lock(file) or projects.is_config(file))
            files |= {_relative(file): None for file in candidates if not settings.excludes(project.name_of(file))}
    return files


def _relative(path: Path) -> Path:
    """Return a path as a user would write it: from the current folder, if the file is in it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


# ---------------------------------------------------------------- lock files


def _read_locks(report: Report, paths: Sequence[Path], named: set[Path]) -> dict[Path, Lock]:
    """Return what each lock file pins. Lock files that pin no known package are left out.

    A named lock file has to be readable.
    """
    pins: dict[Path, Lock] = {}
    for path in paths:
        try:
            pins[path] = changes.read_lock(path)
        except Refusal as refusal:
            if path in named:
                report.not_checked.append(NotChecked(str(path), str(refusal), True))
    return pins


def _check_locks(report: Report, pins: dict[Path, Lock], since: str, is_asked: bool) -> None:
    """Compare lock files with those of a commit. Raises Refusal if git does not know the commit."""
    can_compare = bool(pins) and report.project.has_commit()
    if is_asked or can_compare:
        report.project.require_commit(since)
    if not can_compare:
        if pins:
            why = "the project has no commit with which to compare"
            report.not_checked.append(NotChecked("whether releases changed", why, is_asked))
        return
    report.since = since
    with tempfile.TemporaryDirectory(prefix="zero-study-") as folder:
        earlier = report.project.write_earlier(pins, since, Path(folder))
        for path, lock in pins.items():
            report.locks.append(report.project.name_of(path))
            if path not in earlier:
                report.not_checked.append(NotChecked(str(path), f"the commit {since} does not have this file"))
                continue
            try:
                before = changes.read_lock(earlier[path])
            except Refusal:
                why = f"the file in the commit {since} pins no known package"
                report.not_checked.append(NotChecked(str(path), why))
                continue
            compared = changes.compare_locks(before, lock)
            findings = [_of_file(finding, path, since) for finding in of_upgrade.findings(compared, before, lock)]
            report.add(findings, compared.verdict.checked, compared.verdict.not_checked)


def _of_file(finding: Finding, path: Path, since: str) -> Finding:
    """Return a finding of `zero-study upgrade`, reworded for one lock file and an earlier commit of it."""
    begin = next((words for end, words in DIRECTIONS.items() if finding.id.endswith(end)), "")
    remedy = finding.remedy.replace("OLD (", f"{since} (").replace("NEW (", "this file (")
    return replace(finding, file=str(path), text=f"{begin}{finding.text}", remedy=remedy)


def _release(report: Report, pins: dict[Path, Lock]) -> str | None:
    """Return the DeepSpeed release that the lock files pin. None if they pin none, or different releases."""
    versions = {str(path): lock.pins[DEEPSPEED] for path, lock in pins.items() if DEEPSPEED in lock.pins}
    if len(set(versions.values())) > 1:
        different = ", ".join(f"{version} in {path}" for path, version in versions.items())
        report.not_checked.append(
            NotChecked("the known faults of DeepSpeed", f"the lock files pin different releases: {different}")
        )
        return None
    return next(iter(versions.values()), None)


# ---------------------------------------------------------------- configuration files and checkpoints


def _check_configs(report: Report, paths: Sequence[Path], named: set[Path], pins: dict[Path, Lock]) -> None:
    """Check the configuration files of known training tools. All other files are checked only if they are named."""
    release = _release(report, pins)
    report.release = None if release is None else f"{DEEPSPEED}=={release}"
    checked = several.examine(paths, report.release)
    for path, result in checked.results.items():
        is_known = isinstance(result, Examined) and result.kind is not None
        if not is_known and path not in named and not (isinstance(result, Refusal) and projects.names_settings(path)):
            continue  # some other YAML or JSON of the project
        verdict = checked.verdicts[path]
        findings = of_doctor.findings(result) if isinstance(result, Examined) else ()
        if is_known:
            report.configs.append(report.project.name_of(path))
        report.add(findings, verdict.checked, verdict.not_checked)


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder contains a checkpoint or a saved model. Checking its files needs torch."""
    if not any(path.suffix in OF_CHECKPOINTS or path.name == "latest" for path in folder.iterdir()):
        return False
    from study.saved import folders

    return folders.is_checkpoint(folder)


def _check_checkpoints(report: Report, folders: Sequence[Path]) -> None:
    if not folders:
        return
    from study.saved import command, json_answer, text

    for folder in folders:
        saved, compared = command.examine(folder)
        verdict = text.verdict(saved, compared, is_strict=False)
        report.checkpoints.append(report.project.name_of(folder))
        report.add(json_answer.findings(folder, saved, compared), verdict.checked, verdict.not_checked)
