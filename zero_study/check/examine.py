"""Check a project: its configuration files, its named checkpoints, and changes of its lock files since a commit."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from zero_study import terminal
from zero_study.answers.envelope import Finding
from zero_study.check import project as projects
from zero_study.check import settings as reading
from zero_study.check import uses
from zero_study.check.project import Project
from zero_study.check.settings import Accepted, Settings
from zero_study.doctor import json_answer as of_doctor
from zero_study.doctor import several
from zero_study.doctor.examine import Examined
from zero_study.doctor.of_release import PACKAGES
from zero_study.errors import Refusal
from zero_study.upgrade import changes
from zero_study.upgrade import json_answer as of_upgrade
from zero_study.upgrade.locks import Lock, PinsNothing
from zero_study.upgrade.used import Use
from zero_study.verdict import Checked, Inputs, NotChecked, Verdict

OF_CHECKPOINTS = {".safetensors", ".bin", ".pt", ".distcp", ".pkl"}  # endings of files
LARGEST_SCRIPT = 1 << 20  # bytes; people write these files
NOTHING = "this folder has no configuration file of a known tool, no lock file that can be compared, and no checkpoint"


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
    releases: list[str] = field(default_factory=list)  # by which configuration files were judged
    inputs: Inputs = field(default_factory=Inputs)  # by path, as the user would write it
    not_checked: list[NotChecked] = field(default_factory=list)  # that is about no input
    is_whole: bool = True  # the whole project was checked
    unused_changes: int = 0  # known changes of releases that no file of the project uses
    changed_lines: dict[str, set[int]] = field(default_factory=dict)  # since that commit, by the path of the file

    @property
    def verdict(self) -> Verdict:
        """The verdict on the project. Notes and accepted findings do not count."""
        of_inputs = self.inputs.verdict()
        number = sum(finding.severity != "note" for finding in self.findings)
        return Verdict.of(number, of_inputs.checked, [*of_inputs.not_checked, *self.not_checked])

    @property
    def deepspeed_release(self) -> str | None:
        """The release of DeepSpeed by which files were judged. None if there is none, or several."""
        releases = [release for release in self.releases if release.startswith("deepspeed==")]
        return releases[0] if len(releases) == 1 else None

    @property
    def unused(self) -> list[Accepted]:
        """The entries of the settings whose accepted finding no longer occurs."""
        used = [entry for _, entry in self.accepted]
        return [entry for entry in self.settings.accepted if self.is_whole and entry not in used]

    def path_of(self, finding: Finding) -> str:
        """Return the path of a finding's file relative to the project, or "" if the finding is not about a file."""
        return "" if finding.file is None else self.project.name_of(Path(finding.file))

    def _identity(self, finding: Finding) -> tuple[object, ...]:
        """Return what two findings have in common that are the same."""
        return finding.id, self.path_of(finding), finding.key, finding.line, finding.text

    def end(self, path: Path, findings: Iterable[Finding], verdict: Verdict) -> None:
        """Add what was found and compared in an input, except findings that the project accepts."""
        known = set(map(self._identity, self.findings))
        for finding in findings:
            if finding.file and self._identity(finding) in known:
                continue  # of a file that several files name
            known.add(self._identity(finding))
            place = self.path_of(finding)
            entry = next((accepted for accepted in self.settings.accepted if accepted.covers(finding, place)), None)
            if entry is None:
                self.findings.append(finding)
            else:
                self.accepted.append((finding, entry))
        self.inputs.end(str(path), verdict)  # whose number of findings, with the accepted ones, is not used


def examine(paths: Sequence[Path], since: str | None = None) -> Report:
    """Check files and folders of a project, by default the current folder, and return the report.

    A folder is searched for configuration and lock files. A checkpoint is checked if its folder is named, or if the
    settings list it and it is in a named folder. Lock files are compared with those in the commit `since`, by default
    the one of the settings. Raises Refusal if a path does not exist, git does not know the commit, or the settings
    cannot be read.
    """
    named = list({_place(path): path for path in paths}.values()) or [Path()]
    for path in named:
        if not path.is_file() and not path.is_dir():
            why = "this is neither a file nor a folder" if path.exists() else "this file or folder does not exist"
            raise Refusal(f"{path}: {why}. Name files or folders of the project.")
    first = named[0] if named[0].is_dir() else named[0].parent
    project, place = projects.find(first), reading.find(first.absolute())
    settings = Settings() if place is None else reading.read(place)
    report = Report(project, settings)
    report.inputs = Inputs(*(str(path) for path in named if path.is_file()))
    report.is_whole = any(_place(path) == _place(project.root) for path in named)
    files = list(_files(project, settings, named))
    locks = [path for path in files if projects.is_lock(path)]
    pins = _check_locks(report, locks, named, since)
    report.changed_lines = {} if report.since is None else project.changed_lines(report.since)
    _check_configs(report, [path for path in files if path not in locks], set(named), pins)
    listed = [] if place is None else [place.parent / folder for folder in settings.checkpoints]
    checkpoints = [_relative(folder) for folder in listed if any(_is_in(folder, path) for path in named)]
    checkpoints += [path for path in named if path.is_dir() and _is_checkpoint(path)]
    _check_checkpoints(report, dict.fromkeys(checkpoints))
    for folder in (path for path in named if path.is_dir()):
        _check_folder(report, folder, [*files, *checkpoints])
    return report


def _check_folder(report: Report, folder: Path, inside: Iterable[Path]) -> None:
    """Check a named folder as a checkpoint if it has no other input."""
    if report.inputs.ended(str(path) for path in inside if _is_in(path, folder)):
        return
    if any(path.suffix in OF_CHECKPOINTS for path in [*folder.glob("*"), *folder.glob("*/*")]):
        _check_checkpoints(report, [folder])
    elif report.settings.excludes(report.project.name_of(folder)):
        report.inputs.skip(str(folder), f"{reading.FILE} excludes this folder")
    else:
        report.inputs.skip(str(folder), NOTHING)


def _files(project: Project, settings: Settings, named: Sequence[Path]) -> Iterable[Path]:
    """Return the files to check: the named files, and all files in the named folders."""
    files = {_place(path): path for path in named if path.is_file()}
    for path in named:
        if path.is_dir() and not _is_checkpoint(path):
            candidates = (file for file in project.files(path) if projects.is_lock(file) or projects.is_config(file))
            for file in candidates:
                if not settings.excludes(project.name_of(file)):
                    files.setdefault(_place(file), _relative(file))
    return files.values()


def _relative(path: Path) -> Path:
    """Return a path as a user would write it: from the current folder, if the file is in it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _place(path: Path) -> Path:
    """Return the absolute path of a file or folder, which is the same however the user names it."""
    return path.parent.resolve() / path.name if path.name not in ("", "..") else path.resolve()


def _is_in(path: Path, folder: Path) -> bool:
    return _place(path).is_relative_to(_place(folder))


# ---------------------------------------------------------------- lock files


def _check_locks(report: Report, paths: Sequence[Path], named: Sequence[Path], since: str | None) -> dict[Path, Lock]:
    """Compare lock files with those of a commit, and return what each lock file pins.

    Lock files that pin no known package, now and in the commit, are those of other programs. They are left out unless
    they are named. Raises Refusal if git does not know the commit.
    """
    commit = since or report.settings.since
    has_commit = report.project.has_commit()
    if since is not None or (has_commit and paths):
        report.project.require_commit(commit)
    earlier: dict[Path, Lock | str] = {}
    if has_commit and (since is not None or paths):
        as_written = {_place(path): path for path in paths}
        found = _earlier_locks(report, commit, named)
        earlier = {as_written.get(_place(path), path): lock for path, lock in found.items()}
    pins: dict[Path, Lock] = {}
    in_use: list[Use] | None = None
    for path in dict.fromkeys([*paths, *earlier]):
        now, before = _read_lock(path), earlier.get(path)
        if isinstance(now, Lock):
            pins[path] = now
            why = f"the commit {commit} does not have this file, or pins no known package in it"
            why = why if has_commit else "the project has no commit with which to compare"
            if before is None and path in named:
                report.inputs.skip(str(path), why)
                continue
            report.locks.append(report.project.name_of(path))
            if before is None:
                report.not_checked.append(NotChecked(str(path), why, since is not None and not has_commit))
            elif isinstance(before, str):
                report.inputs.skip(str(path), f"the file in the commit {commit} cannot be read: {before}")
            else:
                report.since = commit
                if in_use is None and before.pins != now.pins:
                    in_use = _uses(report)
                compared = changes.compare_locks(before, now, in_use or [])
                report.unused_changes += sum(map(len, compared.left_out.values()))
                findings = [_of_file(finding, path) for finding in of_upgrade.findings(compared)]
                notes, verdict = _note_ranges(report, path, before, now, compared.verdict)
                report.end(path, findings + notes, verdict)
        elif before is not None and not path.is_file():
            report.inputs.skip(str(path), f"the commit {commit} has this file, and the project does not")
        elif now is not None or before is not None or path in named:
            why = now or "this file pins no known package"
            report.inputs.skip(str(path), why)
    return pins


def _note_ranges(
    report: Report, path: Path, before: Lock, now: Lock, verdict: Verdict
) -> tuple[list[Finding], Verdict]:
    """Replace what says that packages have no exact release, now or before, by one note that a project can accept."""
    names = [name for name, reason in now.unread.items() if before.unread.get(name) == reason]
    if not names:
        return [], verdict
    text = f"{terminal.listed(names)}: this file names no exact release, so it is unknown which release is installed"
    note = Finding("check/no-exact-release", "note", text, "Pin exact releases, or check a lock file.", str(path))
    remaining = [entry for entry in verdict.not_checked if entry.what not in names]
    if any(entry.covers(note, report.path_of(note)) for entry in report.settings.accepted):
        ranges = Checked(len(names), "range of releases", "that did not change", "ranges of releases")
        return [note], replace(verdict, checked=(*verdict.checked, ranges), not_checked=tuple(remaining))
    return [note], replace(verdict, not_checked=(*remaining, NotChecked(str(path), f"{text} [{note.id}]", True)))


def _earlier_locks(report: Report, commit: str, named: Sequence[Path]) -> dict[Path, Lock | str]:
    """Return what the lock files of a commit pin, or why they cannot be read, without those of other programs."""
    names = {path: report.project.name_of(path) for path in report.project.earlier_locks(commit)}
    places = {_place(path) for path in named}
    paths = [
        path
        for path, name in names.items()
        if any(_is_in(path, place) for place in places) and (not report.settings.excludes(name) or path in places)
    ]
    with tempfile.TemporaryDirectory(prefix="zero-study-") as folder:
        copies = report.project.write_earlier(names, commit, Path(folder))  # all, because they include each other
        locks = {_relative(path): _read_lock(copies[path]) for path in paths if path in copies}
    return {path: lock for path, lock in locks.items() if lock is not None}


def _read_lock(path: Path) -> Lock | str | None:
    """Return what a lock file pins, or why it cannot be read. None if it does not mention any known package."""
    try:
        return changes.read_lock(path)
    except PinsNothing:
        return None
    except Refusal as refusal:
        return str(refusal) if path.is_file() and changes.names_package(path) else None


def _uses(report: Report) -> list[Use]:
    """Return what the trainings of the whole project use, also if only some of its files are checked."""
    root, settings = report.project.root, report.settings
    files = [path for path in report.project.files(root) if not settings.excludes(report.project.name_of(path))]
    files = [path for path in files if path.stat().st_size <= LARGEST_SCRIPT]
    results = several.examine([path for path in files if projects.is_config(path)]).results
    examined = [result for result in results.values() if isinstance(result, Examined) and result.kind is not None]
    read = {result.path for result in examined}
    texts = [path for path in results if path not in read and projects.names_settings(path)]
    return uses.of_project(examined, files, texts)


def _of_file(finding: Finding, path: Path) -> Finding:
    """Return a finding of `zero-study upgrade` as one about a lock file, with the line that pins the package."""
    package = re.escape((finding.name or "").partition("/")[0]).replace("\\-", "[-_]")
    pinned = re.compile(rf"(?i)^\s*(?:- )?[\"']?(?:name\s*=\s*\")?{package}(?=[\"'\s=<>~!\[;@]|$)")
    lines = path.read_text(errors="replace").splitlines()
    line = next((number for number, text in enumerate(lines, 1) if pinned.match(text)), None)
    return replace(finding, file=str(path), line=line)


def _releases_of(path: Path, pins: Mapping[Path, Lock]) -> list[tuple[str, ...]]:
    """Return the releases by which a configuration file is judged, once for each lock file that differs.

    These are the lock files in the nearest folder above the file that has any, and otherwise all lock files.
    """
    folders = {_place(lock).parent for lock in pins}
    nearest = next((folder for folder in _place(path).parents if folder in folders), None)
    chosen = [lock for place, lock in pins.items() if nearest in (None, _place(place).parent)]
    pinned = (tuple(f"{name}=={lock.pins[name]}" for name in PACKAGES if name in lock.pins) for lock in chosen)
    return list(dict.fromkeys(filter(None, pinned))) or [()]


# ---------------------------------------------------------------- configuration files and checkpoints


def _check_configs(report: Report, paths: Sequence[Path], named: set[Path], pins: dict[Path, Lock]) -> None:
    """Check the configuration files of known training tools. All other files are checked only if they are named."""
    by_releases: dict[tuple[str, ...], list[Path]] = {}
    for path in paths:
        for releases in _releases_of(path, pins):
            by_releases.setdefault(releases, []).append(path)
    verdicts: dict[Path, list[Verdict]] = {}
    for releases, group in by_releases.items():
        checked = several.examine(group, *releases)
        for path, result in checked.results.items():
            is_known = isinstance(result, Examined) and result.kind is not None
            if (
                not is_known
                and path not in named
                and not (isinstance(result, Refusal) and projects.names_settings(path))
            ):
                continue  # some other YAML or JSON of the project
            findings = of_doctor.findings(result) if isinstance(result, Examined) else ()
            if is_known:
                report.configs += {report.project.name_of(path)} - {*report.configs}
                report.releases += [release for release in releases if release not in report.releases]
            verdicts.setdefault(path, []).append(checked.verdicts[path])
            report.end(path, findings, _together(verdicts[path]))


def _together(verdicts: Sequence[Verdict]) -> Verdict:
    """Return one verdict on a file that was judged by several sets of releases. Its keys are counted once."""
    return Verdict.of(0, verdicts[0].checked, [entry for verdict in verdicts for entry in verdict.not_checked])


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder itself seems to be a checkpoint or a saved model."""
    if not any(path.suffix in OF_CHECKPOINTS or path.name == "latest" for path in folder.iterdir()):
        return False
    try:
        from zero_study.saved import folders
    except ImportError:  # of torch
        return True
    return folders.is_checkpoint(folder)


def _check_checkpoints(report: Report, folders: Iterable[Path]) -> None:
    """Check checkpoints and saved models. This needs PyTorch."""
    for folder in folders:
        try:
            from zero_study.saved import command, json_answer, text

            saved, compared = command.examine(folder)
        except ImportError as error:
            report.inputs.skip(str(folder), f"reading a checkpoint needs the package {error.name}")
        except Refusal as refusal:
            report.inputs.skip(str(folder), str(refusal))
        else:
            report.checkpoints.append(report.project.name_of(folder))
            findings = json_answer.findings(folder, saved, compared)
            report.end(folder, findings, text.verdict(saved, compared, is_strict=False))
