"""Examine a configuration file and write a corrected file: `zero-study doctor FILE`."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from packaging.version import Version

from ...errors import Refusal
from ...files import ROOT, load, read_whole, read_yaml, reading, write_whole
from .. import known_bad, upgrade
from ..keys.patterns import ABSENT, matches
from ..strategy_names import OffloadDevice, StrategyName
from . import config_files
from .findings import KEEP, REMOVE, Finding, Instead, Settings

CONFIGS = ROOT / "accelerate_configs"  # the strategies that the project ships
# A JSON that has one of these keys is an accelerate file and not DeepSpeed's.
OF_ACCELERATE = {"distributed_type", "compute_environment", "num_processes", "num_machines"}
# A JSON that accompanies the accelerate file of DDP may have these keys and values. They have the same names as in
# DistributedDataParallelKwargs and in theory's Engine.
OF_DDP: dict[str, tuple[Any, ...]] = {"gradient_as_bucket_view": (False, True)}
# Keys that the shipped files leave open, because zero-study fills them in (training/accelerators.py).
FILLED_IN = ("gradient_clipping", "nvme_path", "offload_param.buffer_size")


class _Section(dict[str, Any]):
    """A section of a JSON as accelerate reads it: the last value of a repeated key counts.

    `overridden` has the other values.
    """

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        last = {key: position for position, (key, _) in enumerate(pairs)}
        self.overridden = [pair for position, pair in enumerate(pairs) if last[pair[0]] != position]


@dataclass(frozen=True)
class Examined:
    """A file with its content, and the findings in it and in the DeepSpeed JSON that it names."""

    path: Path
    content: dict[str, Any]
    findings: list[Finding]

    @property
    def matters(self) -> bool:
        """Whether a key of the file has an effect that its reader does not expect."""
        return any(finding.matters for finding in self.findings)

    def as_json(self) -> str:
        """Return the findings as the JSON text that --json prints."""
        return json.dumps([finding.as_json() for finding in self.findings], indent=1, default=str)


def examine(path: Path, release: str | None = None) -> Examined:
    """Examine an accelerate file or a DeepSpeed JSON, and return it with its findings.

    If `release` is given, for example "deepspeed==0.18.1", the findings include the known faults of that release that
    affect the training of this file. Raises Refusal if the file is of neither kind, or if the release is not one of
    DeepSpeed.
    """
    examined = examine_content(path, _read_json(path) if _is_json(path) else read_yaml(path, CONFIGS))
    of_release = [] if release is None else _of_release(path, examined.content, release)
    return replace(examined, findings=of_release + examined.findings)


def _of_release(path: Path, content: dict[str, Any], release: str) -> list[Finding]:
    """Return findings on the known faults of a DeepSpeed release that affect the training of a file.

    The stage, offload and precision of the file decide which faults do. Raises Refusal if `release` is not one of
    DeepSpeed.
    """
    package, _, version = release.partition("==")
    if package != "deepspeed" or not _is_version(version):
        raise Refusal(
            f"--for {release}: only releases of DeepSpeed are known here. Write deepspeed==VERSION, or compare "
            "releases of other packages with `zero-study upgrade`."
        )
    stage, device, classes = _training_of(content)
    engine = "not DeepSpeed" if stage is None else str(StrategyName.of_zero(stage, device))
    finding = Finding(
        file=str(path), key="stage", value=stage, effect="means something else", matters=True, is_about_release=True
    )
    if reason := upgrade.why_unknown(package, version):
        return [replace(finding, effect="not examined", message=reason)]
    found_by_tests = [
        replace(finding, message=upgrade.fault_summary(fault, [engine]))
        for fault in known_bad.faults_of(version, engine, classes)
    ]
    return found_by_tests + [
        replace(finding, key=next(iter(fault.file)), value=None, message=fault.summary)
        for fault in upgrade.known_faults()
        if fault.package == package and fault.is_in(version) and _is_affected(content, fault.file)
    ]


def _is_affected(content: dict[str, Any], affected: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether a DeepSpeed JSON, or the one that an accelerate file names, has an affected value at each key.

    `affected` has patterns (see `patterns`). A key that the JSON does not have counts as None. The result is false if
    there is no key, or no JSON.
    """
    if "distributed_type" in content:
        named = config_files.AccelerateFile(content).json_named
        if named is None or not Path(named).is_file():
            return False
        content = _read_json(Path(named))
    json_file = config_files.DeepSpeedFile(content)
    values = {key: json_file.get(key, None) for key in affected}
    return bool(affected) and all(matches(affected[key], _as_listed(values[key])) for key in affected)


def _as_listed(value: Any) -> Any:
    """Return a value as the list of faults writes it: text in lower case, and a number instead of its digits."""
    if not isinstance(value, str):
        return value
    return int(value) if value.isdecimal() else value.lower()


def _is_version(text: str) -> bool:
    return known_bad.base_release(text) > Version("0")


def _training_of(content: dict[str, Any]) -> tuple[int | None, OffloadDevice, set[str]]:
    """Return the ZeRO stage, the device of the optimizer states, and the precision classes of a file.

    The stage is None if the file is not for DeepSpeed. Precision classes are named as in the conformance matrices, and
    an empty set stands for any precision. If an accelerate file names a DeepSpeed JSON, the JSON takes precedence.
    """
    file = config_files.AccelerateFile(content)
    stage, offload = file.stage, file.get("deepspeed_config.offload_optimizer_device")
    classes: set[str] = {"bf16"} if file.get("mixed_precision") in ("bf16", "fp16") else set()
    if file.json_named is not None and Path(file.json_named).is_file():
        content = _read_json(Path(file.json_named))
    if "distributed_type" not in content:
        json_file = config_files.DeepSpeedFile(content)
        stage, offload = json_file.stage, json_file.get("zero_optimization.offload_optimizer.device")
        if json_file.precision:
            classes = {"bf16_fp32_sum" if json_file.get("data_types.grad_accum_dtype") == "fp32" else "bf16"}
    device: OffloadDevice = "cpu" if offload == "cpu" else "nvme" if offload == "nvme" else "none"
    return stage, device, classes


def _is_json(path: Path) -> bool:
    """Say whether a file is JSON, by its ending, or by its first character if it has another ending.

    DeepSpeed accepts any ending, and some projects name their files .conf.
    """
    if path.suffix in (".json", ".yaml", ".yml"):
        return path.suffix == ".json"
    with reading(path, "JSON or YAML"):
        return read_whole(path).lstrip()[:1] == b"{"


def _read_json(path: Path) -> dict[str, Any]:
    return with_keys(path, load(path, "JSON", _Section))


def with_keys(path: Path, content: Any) -> dict[str, Any]:
    """Return the content of a JSON file. Raises Refusal unless it is a mapping of keys."""
    if not isinstance(content, dict):
        raise Refusal(f"{path}: holds no keys. Start from a copy of one of the files in {CONFIGS.name}/.")
    return content


def examine_content(path: Path, content: dict[str, Any]) -> Examined:
    """Examine a file as if it had this content, and return it with its findings."""
    findings = _overridden(path, content) + _findings_of(path, content)
    return Examined(path, content, [_as_shipped(finding) for finding in _join_typos(findings)])


def _findings_of(path: Path, content: dict[str, Any]) -> list[Finding]:
    """Return the findings of a file according to its kind.

    The kinds are options of DDP, a DeepSpeed JSON, and an accelerate file. If an accelerate file names a DeepSpeed
    JSON, the findings of both are returned.
    """
    if content and content.keys() <= OF_DDP.keys():
        message = "zero-study passes this option to DDP."
        return [
            Finding(file=str(path), key=key, value=value, effect="honoured", message=message)
            for key, value in content.items()
        ]
    if _is_json(path) and not OF_ACCELERATE & set(content):
        return config_files.of_json(str(path), content)
    findings = config_files.of_accelerate(str(path), content)
    json_path = config_files.AccelerateFile(content).json_named
    if json_path is None:
        return findings
    if not Path(json_path).is_file():
        missing = _missing(path, json_path)
        return [*(finding for finding in findings if finding.key != missing.key), missing]
    inner = _read_json(Path(json_path))
    return findings + _overridden(Path(json_path), inner) + config_files.of_json(json_path, inner)


def _join_typos(findings: Sequence[Finding]) -> list[Finding]:
    """Merge the finding for a misspelt key with the finding for the missing key.

    A misspelt key has two findings without this: the wrong name is unknown, and the right name is missing.
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


def _as_shipped(finding: Finding) -> Finding:
    """Return a finding, marked as harmless if zero-study itself fills in that key of a shipped file."""
    is_shipped = Path(finding.file).resolve().is_relative_to(CONFIGS)
    if not (is_shipped and finding.matters and finding.key.endswith(FILLED_IN)):
        return finding
    message = f"zero-study sets this itself. In other programs: {finding.message}"
    return replace(finding, matters=False, message=message)


def _overridden(path: Path, content: dict[str, Any]) -> list[Finding]:
    """Return findings for the values of a JSON that a later value of the same key overrides."""
    sections = [("", content), *((f"{key}.", value) for key, value, _ in Settings(content).nodes())]
    return [
        Finding(
            file=str(path), key=f"{above}{key}", value=value, effect="overridden", matters=True,
            remedy="Write the key once.",
            message="The key is written twice, and accelerate uses the last value. If a program passes such a file to "
            "deepspeed.initialize, DeepSpeed refuses it.", engine_has=section[key],
        )
        for above, section in sections if isinstance(section, _Section)
        for key, value in section.overridden
    ]  # fmt: skip


def _missing(path: Path, json_path: str) -> Finding:
    """Return the finding for a DeepSpeed JSON that is not where the launcher will look for it."""
    return Finding(
        file=str(path), key="deepspeed_config.deepspeed_config_file", value=json_path, effect="crashes", matters=True,
        error="Expected a string path to an existing deepspeed config",
        message=f"The launcher looks for this file in the current folder, {Path.cwd()}, and it is not there.",
        remedy="Start the training in the folder that the path is relative to, or write an absolute path.",
    )  # fmt: skip


def mended(examined: Examined) -> dict[str, Any]:
    """Return the file's content as --fix writes it.

    Every key that matters and has exactly one remedy is changed. The result is examined again until nothing is left to
    change, because a corrected key may require another one.
    """
    content = copy.deepcopy(examined.content)
    for _ in range(5):
        before = copy.deepcopy(content)
        findings = [
            f for f in examine_content(examined.path, before).findings if f.matters and f.file == str(examined.path)
        ]
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
    """A key that --fix changed, with its old and its new value. ABSENT if the file has no such key."""

    key: str
    old: Any
    new: Any


def changes_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[KeyChange]:
    """Return the keys that have different values in two contents of a file, in the order of the file."""
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


def write_mended(examined: Examined, out: Path) -> list[KeyChange]:
    """Write the corrected file, and return the changes.

    Raises Refusal if `out` exists already, has another ending than the examined file, or cannot be written.
    """
    if out.exists():
        raise Refusal(f"--fix {out}: this file exists, and is not overwritten. Name a new file.")
    if out.suffix != examined.path.suffix:
        raise Refusal(
            f"--fix {out}: the corrected file has the format of {examined.path}. Give it the ending "
            f"{examined.path.suffix}."
        )
    content = mended(examined)
    text = json.dumps(content, indent=2) if _is_json(examined.path) else yaml.safe_dump(content, sort_keys=False)
    try:
        write_whole(out, (text.rstrip("\n") + "\n").encode())
    except OSError as error:
        raise Refusal(f"--fix {out}: cannot be written ({error.strerror}).") from None
    return changes_between(examined.content, content)
