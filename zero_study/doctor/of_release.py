"""Judge a configuration file by given releases: their known faults, the keys that they have, and their defaults.

The tables of fields and defaults by release are those of `zero-study upgrade`. For what they do not have, the rules of
the table of keys apply, which are those of one release of accelerate and of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import yaml
from packaging.version import Version

from .. import terminal
from ..engines.keys import known_keys
from ..engines.keys.patterns import ABSENT, matches
from ..engines.strategy_names import OffloadDevice, StrategyName
from ..errors import Refusal
from ..upgrade import changes, faults
from ..verdict import NotChecked
from . import config_files
from .findings import KEEP, NOT_STATED, Effect, Finding, Settings
from .kinds import Kind

DEEPSPEED = "deepspeed"
PACKAGES = ("accelerate", DEEPSPEED, "torch", "transformers", "trl")
# The class of the tables that has the keys of a section of a DeepSpeed JSON. Keys of any other section are those of the
# constants, under their whole name.
_CLASSES = {
    "zero_optimization": "DeepSpeedZeroConfig",
    "zero_optimization.offload_optimizer": "DeepSpeedZeroOffloadOptimizerConfig",
    "zero_optimization.offload_param": "DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.leaf_module": "DeepSpeedZeroLeafModuleConfig",
    "zero_optimization.zenflow": "ZenFlowConfig",
    "tensor_parallel": "TPTrainingConfig",
    "fp16": "DeepSpeedFP16Config",
    "bf16": "DeepSpeedBF16Config",
    "compile": "CompileConfig",
}


class History(NamedTuple):
    """The releases of a package in which a key exists, and its defaults."""

    package: str
    since: str  # the first release in the tables that has the class of the key
    values: Sequence[tuple[str, str | None]]  # from a release on; None: the key no longer exists

    def at(self, version: str) -> str | None:
        """Return the default in a release as source text. None if the release does not have the key."""
        values = [value for since, value in self.values if Version(since) <= Version(version)]
        return values[-1] if values else None

    def covers(self, version: str) -> bool:
        """Return whether a missing key means that the release does not know it.

        A class that is younger than the release may have taken the keys of another one.
        """
        return Version(self.since) <= Version(version)

    def change(self, version: str) -> str:
        """Return which release brought the key or removed it. The given release does not have it."""
        later = next((since for since, value in self.values if value and Version(since) > Version(version)), None)
        if later is not None:
            return f"came with {later}"
        return f"was removed in {next(since for since, value in reversed(self.values) if value is None)}"


def _history(package: str, class_name: str, *names: str) -> History | None:
    """Return the history of the first of these keys that a class has. None if it has none of them."""
    keys = changes.index().packages[package].defaults.get(class_name, {})
    values = next((keys[name] for name in names if name in keys), None)
    if values is None:
        return None
    return History(package, min((history[0][0] for history in keys.values()), key=Version), values)


def _of_json(key: str) -> History | None:
    section, _, name = key.rpartition(".")
    if section in _CLASSES:
        return _history(DEEPSPEED, _CLASSES[section], name, name.removeprefix("stage3_"))
    return _history(DEEPSPEED, "constants", key.replace(".", "_"))


def _of_accelerate(key: str) -> History | None:
    """Return the history of a key of an accelerate file: the launcher's flag, or the first flag of a section."""
    if keys := known_keys.accelerate_sections().get(key):
        histories = [history for name in keys if (history := _history("accelerate", "launch", f"--{name}"))]
        return min(histories, key=lambda history: Version(history.values[0][0]), default=None)
    return _history("accelerate", "launch", f"--{key.rpartition('.')[2]}")


@dataclass(frozen=True)
class Releases:
    """The releases by which configuration files are judged, by package."""

    pins: Mapping[str, str]

    @classmethod
    def of(cls, releases: Iterable[str]) -> Releases:
        """Return releases such as "deepspeed==0.18.2". Raises Refusal for other packages, or several of one."""
        pins: dict[str, str] = {}
        for release in releases:
            package, _, version = release.partition("==")
            if package not in PACKAGES or not faults.base_release(version) > Version("0"):
                raise Refusal(
                    f"--for {release}: this is no release of {', '.join(PACKAGES[:-1])} or {PACKAGES[-1]}. Write for "
                    "example deepspeed==0.19.8."
                )
            if pins.setdefault(package, version) != version:
                raise Refusal(f"--for {release}: {package}=={pins[package]} is given as well. Name one of them.")
        return cls(pins)

    @property
    def names(self) -> list[str]:
        return [f"{package}=={version}" for package, version in self.pins.items()]

    @cached_property
    def examined(self) -> dict[str, str]:
        """The releases that are in the tables, by package and under the name that they have there."""
        releases = {package: changes.examined_release(package, version) for package, version in self.pins.items()}
        return {package: version for package, version in releases.items() if version is not None}


NO_RELEASES = Releases({})


@dataclass(frozen=True)
class Judge:
    """The rules of one kind of file, for given releases."""

    releases: Releases
    kind: Literal["accelerate", "deepspeed"]

    @property
    def version(self) -> str | None:
        """The release of the package that is judged by the tables. None if there is none."""
        return self.releases.examined.get(self.kind)

    @property
    def own(self) -> str:
        """The release whose rules the table of keys has."""
        release: str = known_keys.engine_schema(self.kind, "release")
        return release

    def history(self, key: str) -> History | None:
        return (_of_json if self.kind == "deepspeed" else _of_accelerate)(key)

    def findings(
        self, file: str, content: Mapping[str, Any], examine: Callable[[str, Mapping[str, Any]], list[Finding]]
    ) -> tuple[list[Finding], list[NotChecked]]:
        """Return the findings about a file as the release reads it, and what the tables do not say about its keys.

        `examine` makes the findings by the table of keys. It gets the file without the keys that the release ignores
        or refuses.
        """
        if self.version is None or self.version == self.own:
            return examine(file, content), []
        unknown, num_open = self._unknown_keys(file, content)
        names = {finding.key for finding in unknown}
        findings = examine(file, _without(content, names, self.kind))
        findings = [
            self._adapted(finding) for finding in findings if not (finding.value is ABSENT and finding.key in names)
        ]
        reason = f"the tables of {self.kind} {self.version} do not have them, so the rules of {self.own} were used"
        keys = f"{terminal.count(num_open, 'key')} of {file}"
        return unknown + findings, [NotChecked(keys, reason)] if num_open else []

    def _unknown_keys(self, file: str, content: Mapping[str, Any]) -> tuple[list[Finding], int]:
        """Return findings about the keys that the release does not have, and the number of keys without a history."""
        version, num_open = str(self.version), 0
        unknown: list[Finding] = []
        settings = config_files.AccelerateFile(content) if self.kind == "accelerate" else Settings(content)
        for key, value, is_section in settings.nodes():
            if key.startswith(tuple(f"{finding.key}." for finding in unknown)):
                continue
            history = self.history(key)
            if history is None or (history.at(version) is None and not history.covers(version)):
                num_open += not is_section
            elif history.at(version) is None and (value is not None or self.kind == "deepspeed"):
                unknown.append(self._unknown_key(file, key, value, history))
        return unknown, num_open

    def _unknown_key(self, file: str, key: str, value: Any, history: History) -> Finding:
        section = key.rpartition(".")[0]
        is_refused = section in _CLASSES if self.kind == "deepspeed" else not section
        acts = "refuses it" if is_refused else "ignores it without a warning"
        change = history.change(str(self.version))
        return Finding(
            file=file, key=key, value=value, effect="crashes" if is_refused else "ignored", matters=True,
            message=f"{self.kind} {self.version} does not know this key, which {change}, and {acts}.",
            remedy=f"Remove the key, or use a release of {self.kind} that has it.",
        )  # fmt: skip

    def _adapted(self, finding: Finding) -> Finding:
        """Return a finding of the table of keys, or what is true of the release if that is something else."""
        version, history = str(self.version), self.history(finding.key)
        if finding.value is ABSENT:
            if history is None or finding.engine_has is NOT_STATED or history.at(version) == history.at(self.own):
                return finding
            default = history.at(version)
            message = f"Without this key, {self.kind} {version} uses {default}."
            return replace(
                finding, effect="honoured", matters=False, is_note=False, message=message, remedy="",
                engine_has=yaml.safe_load(str(default)),
            )  # fmt: skip
        removed = {*known_keys.engine_list("removed"), *known_keys.engine_list("removed_zero")}
        is_removed = self.kind == "deepspeed" and finding.key.rpartition(".")[2] in removed
        if not is_removed or Version(version) >= Version(self.own):
            return finding
        has_key = history is not None and history.at(version) is not None
        effect: Effect = "honoured" if has_key else "not examined"
        message = "" if has_key else f"It is unknown whether {self.kind} {version} still has this key."
        return replace(finding, effect=effect, matters=False, message=message, remedy="", error="", mend=KEEP)


def _without(content: Mapping[str, Any], keys: Collection[str], kind: str) -> dict[str, Any]:
    """Return the content of a file without some dotted keys."""
    prefixes = config_files.PREFIXES if kind == "accelerate" else {}

    def kept(section: Mapping[str, Any], above: str) -> dict[str, Any]:
        prefix = prefixes.get(above.rstrip("."), "")
        names = {name: f"{above}{prefix}{str(name).removeprefix(prefix)}" for name in section}
        inner = {name: value for name, value in section.items() if names[name] not in keys}
        return {n: kept(value, f"{names[n]}.") if isinstance(value, dict) else value for n, value in inner.items()}

    return kept(content, "") if keys else dict(content)


def of_arguments(file: str, content: Mapping[str, Any], kind: Kind, releases: Releases) -> Iterator[Finding]:
    """Yield findings about arguments of a Trainer that its release does not have.

    Only a file of TrainingArguments or TRL is judged, because other tools add arguments of their own. A script can do
    so too, so that only a removed argument needs a change.
    """
    needed = {"training_arguments": ["transformers"], "trl": ["transformers", "trl"]}.get(kind, [])
    if not needed or not {*needed} <= releases.examined.keys():
        return
    classes = [(package, name) for package in needed for name in changes.index().packages[package].defaults]
    readers = [
        (package, name)
        for package, name in classes
        if name == "TrainingArguments" or (package == "trl" and "." not in name)
    ]
    for key, value in content.items():
        histories = [history for reader in readers if (history := _history(*reader, str(key)))]
        if not histories or any(history.at(releases.examined[history.package]) is not None for history in histories):
            continue
        package, version = histories[0].package, releases.examined[histories[0].package]
        change = histories[0].change(version)
        is_removed = change.startswith("was")
        yield Finding(
            file=file, key=str(key), value=value, effect="crashes", matters=is_removed, is_note=not is_removed,
            message=f"{package} {version} does not have this argument, which {change}. A script stops unless "
            "it defines this argument itself.", remedy=f"Remove it, or use a release of {package} that has it.",
        )  # fmt: skip


# ---------------------------------------------------------------- known faults


def findings_of(
    releases: Releases, file: str, content: Mapping[str, Any], kind: Kind, json_content: dict[str, Any] | None
) -> list[Finding]:
    """Return the known faults of releases that affect a training with this file, or why faults are unknown.

    `json_content` is the DeepSpeed file that the file is, contains or names, and `file` its name. The stage, offload
    and precision decide which faults of DeepSpeed there are.
    """
    findings: list[Finding] = []
    readers = _readers_of(content, kind, json_content)
    for package, version in releases.pins.items():
        finding = Finding(
            file=file, key="stage", value=None, effect="means something else", matters=True,
            release=f"{package}=={version}",
        )  # fmt: skip
        reason = changes.why_unknown(package, version)
        if reason and package in readers:
            message = f"{reason}; the rules of {_rules_of(package)} were used"
            findings.append(replace(finding, effect="not examined", message=message, matters=False))
        elif not reason:
            findings += _faults_of(package, version, finding, content, json_content)
    return findings


def _rules_of(package: str) -> str:
    """Return the release whose rules the table of keys has."""
    own = {
        "accelerate": known_keys.engine_schema("accelerate", "release"),
        DEEPSPEED: known_keys.engine_schema("deepspeed", "release"),
    }
    return f"{package} {own[package]}" if package in own else f"the newest releases of {package}"


def _readers_of(content: Mapping[str, Any], kind: Kind, json_content: dict[str, Any] | None) -> set[str]:
    """Return the packages that read a file, or the DeepSpeed file that it is, contains or names."""
    of_kind: dict[Kind, set[str]] = {
        "accelerate": {"accelerate"}, "deepspeed": set(), "ddp": set(), "torchtitan": {"torch"},
        "trl": {"transformers", "trl"},
    }  # fmt: skip
    is_deepspeed = json_content is not None or config_files.AccelerateFile(content).kind == "DEEPSPEED"
    return of_kind.get(kind, {"transformers"}) | ({DEEPSPEED} if is_deepspeed else set())


def _faults_of(
    package: str, version: str, finding: Finding, content: Mapping[str, Any], json_content: dict[str, Any] | None
) -> Iterator[Finding]:
    by_id = {fault.id: fault for fault in changes.known_faults() if fault.package == package}
    if package == DEEPSPEED:
        stage, device, classes = _training_of(content, json_content)
        engine = "not DeepSpeed" if stage is None else str(StrategyName.of_zero(stage, device))
        for measured in faults.faults_of(version, engine, classes):
            if not measured.needs or _is_affected(json_content, measured.needs):
                about_fault = replace(
                    finding, fault=f"{package}/{measured.id}", remedy=changes.remedy(by_id[measured.id])
                )
                yield replace(about_fault, value=stage, message=faults.summary_of(measured, [engine]))
    for fault in by_id.values():
        if fault.is_in(version) and _is_affected(json_content, fault.file):
            about_fault = replace(finding, fault=f"{package}/{fault.id}", remedy=changes.remedy(fault))
            yield replace(about_fault, key=next(iter(fault.file)), message=fault.summary)


def _is_affected(json_content: dict[str, Any] | None, affected: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether a DeepSpeed file has the values with which a known fault occurs.

    `affected` has patterns (see `patterns`). A key that the file does not have counts as None. The result is false if
    there is no key, or no DeepSpeed file.
    """
    if json_content is None:
        return False
    json_file = config_files.DeepSpeedFile(json_content)
    values = {key: json_file.get(key, None) for key in affected}
    return bool(affected) and all(matches(affected[key], _as_listed(values[key])) for key in affected)


def _as_listed(value: Any) -> Any:
    """Return a value in the form of the list of faults: text in lower case, and a number instead of its digits."""
    if not isinstance(value, str):
        return value
    return int(value) if value.isdecimal() else value.lower()


def _training_of(
    content: Mapping[str, Any], json_content: dict[str, Any] | None
) -> tuple[int | None, OffloadDevice, set[str]]:
    """Return the ZeRO stage, the device of the optimizer states, and the precision classes of a file.

    The stage is None if the file is not for DeepSpeed. Precision classes are named as in the conformance matrices, and
    an empty set stands for any precision. If an accelerate file names a DeepSpeed JSON, the JSON takes precedence.
    """
    file = config_files.AccelerateFile(content)
    stage, offload = file.stage, file.get("deepspeed_config.offload_optimizer_device")
    classes: set[str] = {"bf16"} if file.get("mixed_precision") in ("bf16", "fp16") else set()
    if json_content is not None:
        json_file = config_files.DeepSpeedFile(json_content)
        stage, offload = json_file.stage, json_file.get("zero_optimization.offload_optimizer.device")
        if json_file.get("torch_autocast.enabled") is True:
            classes = {"autocast"}
        elif json_file.precision:
            classes = {"bf16_fp32_sum" if json_file.get("data_types.grad_accum_dtype") == "fp32" else "bf16"}
    device: OffloadDevice = "cpu" if offload == "cpu" else "nvme" if offload == "nvme" else "none"
    return stage, device, classes
