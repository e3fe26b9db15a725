"""Examine a configuration file and write a corrected file: `zero-study doctor FILE`."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..engines.keys.patterns import ABSENT
from ..errors import Refusal
from ..files import CONFIGS
from ..verdict import Checked, NotChecked, Verdict
from . import job_files, job_rules, of_release
from .findings import KEEP, REMOVE, Finding, Instead, Settings
from .job_files import Launch
from .kinds import ALL_TITLES, OF_DDP, TITLES, Kind, kind_of
from .named_files import find, is_json, read, with_keys
from .of_release import NO_RELEASES, Releases
from .parts import examine_parts, overridden
from .shipped_files import is_shipped

__all__ = ["CONFIGS", "OF_DDP", "Examined", "examine", "examine_content", "mended", "with_keys", "write_mended"]

# Keys that the shipped files leave open, because zero-study fills them in (training/accelerators.py).
FILLED_IN = ("gradient_clipping", "nvme_path", "offload_param.buffer_size")
UNKNOWN_KIND = "a file of an unknown kind, so nothing was checked"
KNOWN_KINDS = f"Doctor recognizes files of {ALL_TITLES}."


@dataclass(frozen=True)
class Examined:
    """A configuration file with its content, and the findings in it and in the files that it names."""

    path: Path
    content: dict[str, Any]
    findings: list[Finding]
    kind: Kind | None = None  # None if doctor does not know this kind of file
    not_checked: tuple[NotChecked, ...] = ()
    deepspeed: dict[str, Any] | None = None  # the content of the DeepSpeed file that the file is, contains or names
    releases: Releases = NO_RELEASES  # by which the file was judged

    @property
    def matters(self) -> bool:
        """Whether any key of the file has an effect that a reader of the file would not expect."""
        return any(finding.matters for finding in self.findings)

    @property
    def title(self) -> str | None:
        """The name of the tool that the file is for. None if doctor does not know this kind of file."""
        return None if self.kind is None else TITLES[self.kind]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the file: what was found, how many keys were checked, and what could not be checked."""
        of_keys = [f for f in self.findings if not f.is_about_release]
        num_keys = sum(f.value is not ABSENT and f.effect != "not examined" for f in of_keys)
        open_keys = [f for f in of_keys if f.effect == "not examined" and self.kind is not None]
        open_releases = [f for f in self.findings if f.is_about_release and f.effect == "not examined"]
        of_file = self.not_checked if self.kind is not None else [NotChecked(str(self.path), UNKNOWN_KIND, True)]
        return Verdict.of(
            sum(f.matters for f in self.findings),
            [Checked(num_keys, "key", "compared with what accelerate, DeepSpeed and FSDP do")],
            [
                *of_file,
                *(NotChecked(f"{f.key} in {f.file}", f.message.rstrip(".")) for f in open_keys),
                *(NotChecked(f.release, f.message, True) for f in open_releases),
            ],
        )

    def as_content(self) -> dict[str, Any]:
        """Return the file as an entry of the list `files` in the output of --json."""
        findings = json.loads(json.dumps([finding.as_json() for finding in self.findings], default=str))
        return {"file": str(self.path), "kind": self.kind, "findings": findings, **self.verdict.content()}


def examine(path: Path, *releases: str) -> Examined:
    """Read and examine a configuration file, and return it with its findings.

    With `releases`, for example "deepspeed==0.18.1", the file is judged as these releases read it, and the findings
    include their known faults that affect the training of this file. Raises Refusal if the file cannot be read, or for
    another package. A file of an unknown kind has no findings that matter.
    """
    chosen = Releases.of(releases)
    if launches := job_files.launches(path):
        return _examine_job(path, launches, *releases)
    if path.suffix in job_files.ENDINGS:
        raise Refusal(f"{path}: this script has no line with accelerate launch, torchrun or deepspeed to examine.")
    return examine_content(path, read(path), releases=chosen)


def _examine_job(path: Path, launches: Sequence[Launch], *releases: str) -> Examined:
    """Examine the lines of a job file that start a training, with the accelerate files that they name."""
    chosen, findings, not_checked = Releases.of(releases), list[Finding](), []
    for launch in launches:
        content: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"}
        in_file: dict[tuple[str, str], str] = {}
        if name := launch.flags.get("config_file"):
            named = find(name, path)
            of_file = None if named is None else examine(named.path, *releases)
            if of_file is None or of_file.kind != "accelerate":
                not_checked.append(NotChecked(f"{name} in {path}", "there is no such accelerate file"))
                continue
            content, in_file = of_file.content, {(each.key, each.message): each.file for each in of_file.findings}
        content, unknown = job_files.with_flags(content, launch.flags)
        own = [Finding(file=str(path), key=launch.program, value=launch.line, effect="honoured")]
        own += job_rules.findings(str(path), launch, content)
        if launch.program == "accelerate" and launch.is_complete:
            unknown |= set() if "num_processes" in content else {"num_processes", "train_batch_size"}
            if not name and content["distributed_type"] == "NO":  # accelerate then trains on all GPUs that it finds
                content["distributed_type"] = "MULTI_GPU"
            of_keys = examine_content(path, content, "accelerate", chosen).findings
            own += [
                each for each in of_keys
                if each.key.rpartition(".")[2] not in unknown
                and (each.key in job_rules.OF_NODES or (each.key, each.message) in in_file)
            ]  # fmt: skip
        findings += [
            replace(each, line=launch.line) if (each.key, each.message) not in in_file
            else replace(each, file=in_file[each.key, each.message]) for each in own
        ]  # fmt: skip
    return Examined(path, {}, findings, "job", tuple(not_checked), releases=chosen)


def examine_content(
    path: Path, content: dict[str, Any], kind: Kind | None = None, releases: Releases = NO_RELEASES
) -> Examined:
    """Examine a configuration file as if it had this content, and return it with its findings.

    `kind` is the kind of the file. If it is None, the content decides.
    """
    kind = kind or kind_of(content, is_toml=path.suffix == ".toml")
    if kind is None:
        message = f"This is {UNKNOWN_KIND}. {KNOWN_KINDS}"
        unknown = Finding(file=str(path), key="", value=ABSENT, effect="not examined", message=message)
        return Examined(path, content, [unknown])
    parts = examine_parts(path, content, kind, releases)
    removed = list(of_release.of_arguments(str(path), content, kind, releases))
    remaining = [
        finding for finding in parts.findings if (finding.file, finding.key) not in {(f.file, f.key) for f in removed}
    ]
    findings = (overridden(path, content) if kind != "torchtitan" else []) + removed + remaining
    contents = {str(path): content} | ({} if parts.deepspeed is None else {"": parts.deepspeed})
    findings = [_as_shipped(finding, contents) for finding in _join_typos(findings)]
    place = parts.deepspeed_file or str(path)
    of_releases = of_release.findings_of(releases, place, content, kind, parts.deepspeed)
    return Examined(path, content, of_releases + findings, kind, tuple(parts.not_checked), parts.deepspeed, releases)


def _join_typos(findings: Sequence[Finding]) -> list[Finding]:
    """Merge the finding for a misspelled key with the finding for the missing key.

    Without this, a misspelled key has two findings: the wrong name is unknown, and the right name is missing.
    """
    missing = {(finding.file, finding.key): finding for finding in findings if finding.value is ABSENT}
    joined: list[Finding] = []
    explained: set[tuple[str, str]] = set()  # missing keys
    for finding in findings:
        right_key = (finding.file, finding.mend.key) if isinstance(finding.mend, Instead) else None
        if right_key is not None and right_key in missing:
            explained.add(right_key)
            effect = missing[right_key].message.replace("Without this key,", f"Without {right_key[1]},")
            finding = replace(finding, message=f"{finding.message} {effect}")
        joined.append(finding)
    return [
        finding for finding in joined if finding.value is not ABSENT or (finding.file, finding.key) not in explained
    ]


def _as_shipped(finding: Finding, contents: Mapping[str, dict[str, Any]]) -> Finding:
    """Return a finding, marked as harmless if it is about a key that zero-study itself fills in in its strategy files.

    `contents` has the content of the examined file by its name, and of the DeepSpeed file that it names under "".
    """
    is_listed = finding.matters or finding.is_note
    if not (is_listed and finding.key.endswith(FILLED_IN) and finding.effect != "overridden"):
        return finding
    if not is_shipped(contents.get(finding.file, contents.get("", {}))):
        return finding
    message = f"zero-study sets this itself. In other programs: {finding.message}"
    return replace(finding, matters=False, is_note=False, message=message)


def mended(examined: Examined) -> dict[str, Any]:
    """Return the corrected content of a file, as --fix writes it.

    Every key that matters and has exactly one remedy is changed. The result is examined again until nothing is left to
    change, because a corrected key may require another one.
    """
    content = copy.deepcopy(examined.content)
    for _ in range(5):
        before = copy.deepcopy(content)
        findings = [
            finding
            for finding in examine_content(examined.path, before, examined.kind, examined.releases).findings
            if finding.matters and finding.file == str(examined.path)
        ]  # fmt: skip
        # Misspelt keys come first, because each of them also causes a finding that the right name is missing.
        misspelt = [finding for finding in findings if isinstance(finding.mend, Instead)]
        for finding in misspelt or [finding for finding in findings if finding.mend is not KEEP]:
            _mend(content, finding)
        if content == before:
            break
    return content


def _mend(content: dict[str, Any], finding: Finding) -> None:
    mend = finding.mend
    if isinstance(mend, Instead):
        _put(content, finding.key, REMOVE)
        if Settings(content).get(mend.key) is ABSENT:
            _put(content, mend.key, finding.value if mend.value is KEEP else mend.value)
    else:
        _put(content, finding.key, mend)


def _put(content: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a file to a value, or remove the key if the value is REMOVE.

    Sections above the key are created if they are missing.
    """
    section, _, inner = key.partition(".")
    if inner and key not in content:  # a key may itself contain a dot
        if not isinstance(content.get(section), dict):
            if value is REMOVE:
                return
            content[section] = {}
        if section == "fsdp_config":  # the launcher adds the section's prefix to a key that lacks it
            content[section].pop(inner.removeprefix("fsdp_"), None)
        _put(content[section], inner, value)
    elif value is REMOVE:
        content.pop(key, None)
    else:
        content[key] = copy.deepcopy(value)


class KeyChange(NamedTuple):
    """A key that --fix changed, with its old and its new value. ABSENT stands for a missing key."""

    key: str
    old: Any
    new: Any


def changes_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[KeyChange]:
    """Return the keys in which two contents of a file differ, with their values, in the order of the file."""
    before, after = ({key: value for key, value, _ in Settings(content).nodes()} for content in (old, new))
    differing = [
        KeyChange(key, before.get(key, ABSENT), after.get(key, ABSENT))
        for key in dict.fromkeys([*before, *after])
        if before.get(key, ABSENT) != after.get(key, ABSENT)
    ]
    # A section that both contents have is described by its keys; a new or removed section describes its keys.
    return [
        change
        for change in differing
        if not (_is_section(change.old) and _is_section(change.new))
        and not any(change.key.startswith(f"{above.key}.") for above in differing if ABSENT in (above.old, above.new))
    ]


def _is_section(value: Any) -> bool:
    return isinstance(value, dict)


def can_mend(examined: Examined) -> bool:
    """Return whether --fix would change anything in a file."""
    return examined.kind not in (None, "torchtitan", "job") and mended(examined) != examined.content


def write_mended(examined: Examined, out: Path) -> list[KeyChange]:
    """Write the corrected content to the new file `out`, and return the changes. No other file is changed.

    Raises Refusal if the kind of the file is unknown, or if `out` exists already, has another ending than the examined
    file, or cannot be written.
    """
    if examined.kind is None:
        raise Refusal(f"--fix {out}: {examined.path} is {UNKNOWN_KIND}. Nothing was written. {KNOWN_KINDS}")
    if examined.kind in ("torchtitan", "job"):
        raise Refusal(f"--fix {out}: a TOML file or a job file cannot be corrected. Change {examined.path} by hand.")
    if os.path.lexists(out):
        raise Refusal(f"--fix {out}: this file exists, and is not overwritten. Name a new file.")
    if out.suffix != examined.path.suffix:
        raise Refusal(
            f"--fix {out}: the corrected file is written in the format of {examined.path}. Use a name that "
            f"ends in {examined.path.suffix}."
        )
    content = mended(examined)
    text = json.dumps(content, indent=2) if is_json(examined.path) else yaml.safe_dump(content, sort_keys=False)
    try:
        _write_new(out, (text.rstrip("\n") + "\n").encode())
    except OSError as error:
        raise Refusal(f"--fix {out}: cannot be written ({error.strerror}).") from None
    return changes_between(examined.content, content)


def _write_new(path: Path, content: bytes) -> None:
    """Write a new file completely or not at all. Raises FileExistsError if a file of this name appears meanwhile."""
    descriptor, scratch = tempfile.mkstemp(prefix=".zero-study-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(scratch, 0o666 & ~mask)
        try:
            os.link(scratch, path)  # unlike a rename, this never replaces a file
        except (PermissionError, NotImplementedError):  # some file systems have no links
            with open(path, "xb") as file:
                file.write(content)
    finally:
        os.unlink(scratch)
