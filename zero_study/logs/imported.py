"""Turn the runs in logs into runs that can be compared, with names, sources, and settings that the user states."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zero_study.errors import Refusal, refusing
from zero_study.files import LONGEST_NAME, check_name, relative_to_cwd, sha256
from zero_study.logs import formats
from zero_study.logs.draft import Draft
from zero_study.public_runs.schema import PublicRun, Setting, Source
from zero_study.terminal import printable
from zero_study.version import __version__

# Programs give all their logs these names, so the folder's name says which run it is.
_NAMES_OF_PROGRAMS = re.compile(r"trainer_state|metrics|events\.out\.tfevents\..*")
_SUFFIXES = {".txt", ".log", ".json", ".jsonl", ".csv", ".out"}


class Imported(NamedTuple):
    """A run that was read from a log, with a list of what could not be read."""

    run: PublicRun
    not_read: list[str]


def stated(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings that a user states as FIELD=VALUE on the command line. Raises Refusal for invalid ones."""
    values: dict[str, Any] = {}
    fields = [name for name, field in Setting.model_fields.items() if "dict" not in str(field.annotation)]
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not value.strip():
            raise Refusal(f"--set {word}: write FIELD=VALUE, such as --set num_gpus=8.")
        if name not in fields:
            raise Refusal(f"--set {word}: the field {name!r} is unknown. The fields are: {', '.join(fields)}.")
        if name in values:
            raise Refusal(f"--set {word}: the field {name} is stated twice.")
        with refusing(f"--set {printable(word)}"):
            values[name] = getattr(Setting.model_validate({name: printable(value.strip())}), name)
    return values


def read(paths: Sequence[Path], name: str | None = None, setting: Mapping[str, Any] | None = None) -> list[Imported]:
    """Return the runs in several logs, as runs that can be compared.

    `name` names the run of a single log, and `setting` is what the user states about all runs. Raises Refusal if a log
    cannot be read, or if it states another value than the user does.
    """
    if name is not None and len(paths) > 1:
        raise Refusal(f"--name {name}: there are {len(paths)} logs. Import each of them with its own --name.")
    names = [check_name(name, "--name")] if name is not None else _names(paths)
    runs = []
    for path, own_name in zip(paths, names, strict=True):
        form, drafts = formats.read(path)
        digest = sha256(path)
        for each, draft in zip(_names_of_runs(own_name, drafts), drafts, strict=True):
            _add_stated(draft, setting or {}, path)
            lines = (draft.first_line, draft.last_line) if len(drafts) > 1 else (None, None)
            source = Source(
                path=printable(relative_to_cwd(path)),
                sha256=digest,
                lines=None if None in lines else [line for line in lines if line is not None],
            )
            runs.append(Imported(_public(each, form.name, draft, source), draft.not_read.texts()))
    if repeated := [each for each, count in Counter(run.name for run, _ in runs).items() if count > 1]:
        raise Refusal(f"several of these runs would have the name {repeated[0]}. Import them one by one with --name.")
    return runs


def _public(name: str, log_format: str, draft: Draft, source: Source) -> PublicRun:
    return PublicRun(
        made_by=f"zero-study {__version__}",
        name=name,
        log_format=log_format,
        source=source,
        setting=Setting(**draft.setting, versions=draft.versions, other=draft.other),
        ending=draft.ending,
        marks=[*draft.not_read.texts(), *draft.marks.texts()],
        training=draft.training.series(),
        evaluation=draft.evaluation.series(),
        totals=draft.totals,
    )


def _add_stated(draft: Draft, setting: Mapping[str, Any], path: Path) -> None:
    """Add the settings that the user states to a run. Raises Refusal if the log states another value."""
    new = {name: value for name, value in setting.items() if draft.setting.get(name) != value}
    for name, value in new.items():
        if name in draft.setting:
            raise Refusal(
                f"{path}: the log states that {name} is {draft.setting[name]}, and --set states {value}. Leave this"
                " --set out."
            )
    draft.setting.update(new)
    if new:
        draft.marks.add(f"stated by the user, not by the log: {', '.join(sorted(new))}")


# ---------------------------------------------------------------- names


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a unique name for each log: its file name, preceded by as many folder names as are needed."""
    absolute = [path.absolute() for path in paths]
    num_folders = [int(_NAMES_OF_PROGRAMS.fullmatch(_stem(path)) is not None) for path in absolute]
    while True:
        names = [_name(path, number) for path, number in zip(absolute, num_folders, strict=True)]
        counts = Counter(names)
        longer = [
            min(number + (counts[name] > 1), len(path.parts) - 2)
            for path, name, number in zip(absolute, names, num_folders, strict=True)
        ]
        if longer == num_folders:
            return names
        num_folders = longer


def _stem(path: Path) -> str:
    return path.stem if path.suffix in _SUFFIXES else path.name


def _name(path: Path, num_folders: int) -> str:
    """Return a name made of the names of a file and of its folders.

    A name that programs give to all their logs is left out.
    """
    stem = _stem(path)
    folders = path.parts[-1 - num_folders : -1] if num_folders else ()
    parts = folders if folders and _NAMES_OF_PROGRAMS.fullmatch(stem) else (*folders, stem)
    return _as_name("-".join(parts))


def _as_name(text: str) -> str:
    """Return a text changed into a valid name of a run: only letters, digits, periods and hyphens."""
    name = re.sub("[^A-Za-z0-9_.]+", "-", text).strip("-.")[:LONGEST_NAME].strip("-.") or "run"
    try:
        return check_name(name, "the name")
    except Refusal:  # it is reserved for another file
        return f"run-{name}"


def _names_of_runs(name: str, drafts: Sequence[Draft]) -> list[str]:
    """Return the names of the runs in one log: with their labels in the log, or with numbers."""
    if len(drafts) == 1:
        return [name]
    labels = [_as_name(draft.label) if draft.label else "" for draft in drafts]
    if len(set(labels)) < len(labels) or "" in labels:
        labels = [str(number) for number in range(1, len(drafts) + 1)]
    return [_as_name(f"{name}-{label}") for label in labels]
