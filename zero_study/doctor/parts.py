"""Find and examine the parts of a configuration file that accelerate, DeepSpeed or FSDP read.

A part can also be another file, which the configuration file names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import Refusal
from ..files import CONFIGS
from ..verdict import NotChecked
from . import config_files, fsdp_sections, torchtitan_files, trainer_files
from .findings import KEEP, Finding, Settings
from .kinds import Kind, kind_of
from .named_files import Named, Section, find, parse_inline, read_json
from .of_release import NO_RELEASES, Judge, Releases
from .shipped_files import is_shipped
from .trainer_files import Arguments

ENGINES: tuple[Kind, ...] = ("accelerate", "deepspeed", "ddp")
_TEMPLATE = re.compile(r"\$\{|\{\{")
DEEPSPEED_FILE = "deepspeed_config.deepspeed_config_file"


@dataclass
class Parts:
    """The findings in the parts of a file that engines read, and what could not be examined."""

    findings: list[Finding] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)
    deepspeed: dict[str, Any] | None = None  # the content of the DeepSpeed file that the file is, contains or names
    deepspeed_file: str = ""  # the name of that file in findings
    releases: Releases = NO_RELEASES  # by which the file is judged

    def add_accelerate(self, file: str, content: Mapping[str, Any]) -> None:
        """Add the findings about an accelerate file."""
        findings, not_checked = Judge(self.releases, "accelerate").findings(file, content, config_files.of_accelerate)
        self.findings += findings
        self.not_checked += not_checked

    def of_json(self, file: str, content: dict[str, Any]) -> list[Finding]:
        """Return the findings about the DeepSpeed file that the examined file is, contains or names."""
        self.deepspeed, self.deepspeed_file = content, file
        findings, not_checked = Judge(self.releases, "deepspeed").findings(file, content, config_files.of_json)
        self.not_checked += not_checked
        return findings


def examine_parts(path: Path, content: Mapping[str, Any], kind: Kind | None, releases: Releases = NO_RELEASES) -> Parts:
    """Examine the parts of a file that engines read. A file of an unknown kind has none."""
    parts = Parts(releases=releases)
    if kind is not None:
        if kind not in ENGINES:  # a template, such as ${DEEPSPEED} or {{ output }}, fills in some values
            content = {k: v for k, v in content.items() if not (isinstance(v, str) and _TEMPLATE.search(v))}
        _EXAMINERS[kind](parts, path, content)
    return parts


def _of_accelerate(parts: Parts, path: Path, content: Mapping[str, Any]) -> None:
    parts.add_accelerate(str(path), content)
    name = config_files.AccelerateFile(content).json_named
    if name is None:
        return
    referenced = find(name, path) or find(Path(name).name, path)
    if referenced is None and is_shipped(content) and (CONFIGS.parent / name).is_file():
        referenced = Named(CONFIGS.parent / name, False)
    remaining = [finding for finding in parts.findings if finding.key != DEEPSPEED_FILE]
    if referenced is None:
        parts.findings[:] = [*remaining, _missing(path, name)]
        return
    if not referenced.is_seen and not any(f.matters for f in parts.findings if f.key == DEEPSPEED_FILE):
        parts.findings[:] = [*remaining, _elsewhere(path, DEEPSPEED_FILE, name)]
    inner = read_json(referenced.path)
    label = name if referenced.is_seen else str(referenced.path)
    findings = [_with_product(finding, inner, content) for finding in parts.of_json(label, inner)]
    parts.findings += _overridden(label, inner) + findings


def _with_product(finding: Finding, inner: Mapping[str, Any], launch: Mapping[str, Any]) -> Finding:
    """Return the finding for train_batch_size, judged by the product that it must be if both files have its factors.

    Model and sequence parallelism have other products, so they are left out.
    """
    others = ("parallelism_config", "tensor_parallel", "sequence_parallel_size", "elasticity")
    steps = inner.get("gradient_accumulation_steps", 1)  # accelerate adds the 1
    factors = [launch.get("num_processes"), inner.get("train_micro_batch_size_per_gpu"), steps]
    if finding.key != "train_batch_size" or finding.error != "train_batch_size is not equal":
        return finding
    if any(type(factor) is not int for factor in factors) or not {*inner, *launch}.isdisjoint(others):
        return finding
    product = math.prod(factors)
    text = "{} processes x micro batch size {} x {} accumulation steps is {}".format(*factors, product)
    if finding.value == product:
        message = f"{text}, as DeepSpeed requires. With another number of processes, DeepSpeed stops."
        return replace(finding, effect="honoured", message=message, remedy="", matters=False, error="")
    message = f"DeepSpeed stops, because {text} and not {finding.value}."
    return replace(finding, effect="crashes", message=message, remedy=f'Write {product} or "auto".')


def _of_json(parts: Parts, path: Path, content: Mapping[str, Any]) -> None:
    findings = parts.of_json(str(path), dict(content))
    # What reads the file is unknown.
    parts.findings += [
        replace(finding, matters=False, is_note=True) if finding.reader else finding for finding in findings
    ]


def _of_ddp(parts: Parts, path: Path, content: Mapping[str, Any]) -> None:
    message = "zero-study passes this option to DDP."
    parts.findings += [
        Finding(file=str(path), key=key, value=value, effect="honoured", message=message)
        for key, value in content.items()
    ]


def _of_fsdp_config(parts: Parts, path: Path, content: Mapping[str, Any]) -> None:
    parts.findings += fsdp_sections.of_section(str(path), content)


def _of_torchtitan(parts: Parts, path: Path, content: Mapping[str, Any]) -> None:
    parts.findings += torchtitan_files.of_toml(str(path), content)
    _count_others(parts, content)


def _of_trainer(kind: Kind) -> Callable[[Parts, Path, Mapping[str, Any]], None]:
    def examine(parts: Parts, path: Path, content: Mapping[str, Any]) -> None:
        arguments = Arguments(str(path), kind, content)
        parts.findings += trainer_files.of_arguments(arguments)
        stopped = {finding.key for finding in parts.findings if finding.matters}
        if arguments.uses_deepspeed:
            _deepspeed_of_trainer(parts, path, arguments)
        if arguments.uses_fsdp and kind == "ms_swift":
            _fsdp_of_ms_swift(parts, path, arguments)
        elif "fsdp_config" in content and ("fsdp_config" not in stopped or arguments.uses_fsdp):
            _fsdp_config_of(parts, path, content)
        if isinstance(inner := content.get("dist_config"), dict) and isinstance(inner.get("config_file"), str):
            nested = Arguments(str(path), kind, {"deepspeed": inner["config_file"]})
            parts.findings.append(_plain(path, "dist_config.config_file", inner["config_file"]))
            _deepspeed_of_trainer(parts, path, nested, "dist_config.config_file")
        _count_others(parts, content)

    return examine


def _deepspeed_of_trainer(parts: Parts, path: Path, arguments: Arguments, key: str = "deepspeed") -> None:
    """Examine the DeepSpeed configuration that a Trainer's argument `deepspeed` contains or names."""
    value = arguments.content["deepspeed"]
    if arguments.kind == "ms_swift" and value in trainer_files.NAMES_OF_MS_SWIFT:
        return
    if isinstance(value, dict):
        above, source = f"{key}.", (str(path), value)
    elif (inline := parse_inline(str(value))) is not None:
        above, source = "", (f"{path} ({key})", inline)
    else:
        above, source = "", _read_named(parts, path, key, str(value), "deepspeed") or ("", {})
    label, inner = source
    if not label:
        return
    differing = list(trainer_files.mismatches(label, Settings(inner), arguments))
    findings = _overridden(label, inner) + parts.of_json(label, inner)
    replaced = {finding.key for finding in differing}
    findings = [finding for finding in findings if finding.key not in replaced]
    findings = trainer_files.under_trainer(findings, arguments.content) + differing
    if above:  # the file is a section of another file, and such findings are not mended
        findings = [replace(finding, key=f"{above}{finding.key}", mend=KEEP) for finding in findings]
    parts.findings += findings


def _fsdp_config_of(parts: Parts, path: Path, content: Mapping[str, Any]) -> None:
    """Examine the argument `fsdp_config` of a Trainer: a section, JSON as text, or the path of a JSON."""
    value = content["fsdp_config"]
    if isinstance(value, dict):
        parts.findings += fsdp_sections.of_section(str(path), value, "fsdp_config.")
    elif isinstance(value, str) and (inner := parse_inline(value)) is not None:
        parts.findings += fsdp_sections.of_section(f"{path} (fsdp_config)", inner)
    elif isinstance(value, str) and value:
        source = _read_named(parts, path, "fsdp_config", value, "fsdp_config")
        if source is not None:
            parts.findings += fsdp_sections.of_section(*source)


def _fsdp_of_ms_swift(parts: Parts, path: Path, arguments: Arguments) -> None:
    """Examine the JSON file that the argument `fsdp` of ms-swift names. It has the keys fsdp and fsdp_config."""
    value = arguments.content["fsdp"]
    if value in trainer_files.NAMES_OF_MS_SWIFT:
        return
    if isinstance(value, dict):
        inner: dict[str, Any] = value
    elif isinstance(value, str):
        source = _read_named(parts, path, "fsdp", value, "training_arguments")
        if source is None:
            return
        path, inner = Path(source[0]), source[1]
    else:
        return
    if isinstance(section := inner.get("fsdp_config"), dict):
        parts.findings += fsdp_sections.of_section(str(path), section, "fsdp_config.")


def _of_axolotl(parts: Parts, path: Path, content: Mapping[str, Any]) -> None:
    section, version = content.get("fsdp_config"), content.get("fsdp_version")
    values = {
        "per_device_train_batch_size": content.get("micro_batch_size"),
        "gradient_accumulation_steps": content.get("gradient_accumulation_steps"),
        "max_grad_norm": content.get("max_grad_norm"),
    }
    settings = {name: value for name, value in values.items() if value is not None}
    precision = {name: content[name] for name in ("bf16", "fp16") if content.get(name) is not None}
    accumulation = {key: value for key, value in settings.items() if key == "gradient_accumulation_steps"}
    parts.findings += trainer_files.of_arguments(Arguments(str(path), "axolotl", accumulation | precision))
    if isinstance(section, dict) and section:
        inner = section.get("version", section.get("fsdp_version"))
        parts.findings += fsdp_sections.of_section(str(path), section, "fsdp_config.", version or inner or 1)
        if version is not None:
            parts.findings.append(_axolotl_version(path, version))
    if content.get("deepspeed"):
        if content.get("fsdp"):
            parts.findings.append(
                Finding(
                    file=str(path),
                    key="deepspeed",
                    value=content["deepspeed"],
                    effect="crashes",
                    matters=True,
                    message="axolotl stops if both fsdp and deepspeed are set.",
                    remedy="Remove one of them.",
                )
            )
        else:
            parts.findings.append(_plain(path, "deepspeed", content["deepspeed"]))
        engine = {"deepspeed": content["deepspeed"]}
        _deepspeed_of_trainer(parts, path, Arguments(str(path), "axolotl", settings | precision | engine))
    _count_others(parts, content)


def _axolotl_version(path: Path, version: Any) -> Finding:
    if str(version) in ("1", "2"):
        return _plain(path, "fsdp_version", version)
    return Finding(
        file=str(path), key="fsdp_version", value=version, effect="crashes", matters=True, mend=2,
        message="Only the versions 1 and 2 of FSDP exist.", remedy="Write 2.",
    )  # fmt: skip


def _read_named(parts: Parts, path: Path, key: str, name: str, kind: Kind) -> tuple[str, dict[str, Any]] | None:
    """Return the printed name and the content of a file that another file names. None if it cannot be read.

    A file that cannot be read is noted in `parts`.
    """
    referenced = find(name, path)
    if referenced is None:
        reason = f"it is neither in the current folder nor in the folder of {path.name} or above"
        parts.not_checked.append(NotChecked(f"{name}, which {key} names", reason, True))
        message = f"This file was not found: {reason}."
        parts.findings[:] = [finding for finding in parts.findings if finding.key != key or finding.matters]
        parts.findings.append(Finding(file=str(path), key=key, value=name, effect="not examined", message=message))
        return None
    label = name if referenced.is_seen else str(referenced.path)
    try:
        content = read_json(referenced.path)
    except Refusal as refusal:
        parts.not_checked.append(NotChecked(f"{name}, which {key} names", str(refusal), True))
        message = f"This file could not be read: {refusal}"
        parts.findings.append(Finding(file=str(path), key=key, value=name, effect="not examined", message=message))
        return None
    actual_kind = kind_of(content)
    if actual_kind != kind and not (kind == "training_arguments" and "fsdp_config" in content):
        expected = "a file of DeepSpeed" if kind == "deepspeed" else "a section for FSDP"
        parts.not_checked.append(NotChecked(f"{name}, which {key} names", f"it does not look like {expected}", True))
        message = f"This file was not checked, because it does not look like {expected}."
        parts.findings.append(Finding(file=str(path), key=key, value=name, effect="not examined", message=message))
        return None
    return label, content


def _count_others(parts: Parts, content: Mapping[str, Any]) -> None:
    """Note how many keys of a file only its own tool reads, and no engine. A section counts as one key."""
    examined = {finding.key.partition(".")[0] for finding in parts.findings}
    unexamined = [name for name in content if name not in examined]
    if unexamined:
        noun = "1 other key" if len(unexamined) == 1 else f"{len(unexamined)} other keys"
        parts.not_checked.append(NotChecked(noun, "accelerate, DeepSpeed and FSDP do not read them"))


def _plain(path: Path, key: str, value: Any) -> Finding:
    return Finding(file=str(path), key=key, value=value, effect="honoured")


def _overridden(file: str, content: Mapping[str, Any]) -> list[Finding]:
    """Return findings for the values of a JSON that a later value of the same key overrides."""
    sections = [("", content), *((f"{key}.", value) for key, value, _ in Settings(content).nodes())]
    return [
        Finding(
            file=file, key=f"{above}{key}", value=value, effect="overridden", matters=True,
            remedy="Write the key once.",
            message="The key is written twice, and accelerate uses the last value. deepspeed.initialize "
            "refuses a file that has a key twice.", engine_has=section[key],
        )
        for above, section in sections if isinstance(section, Section)
        for key, value in section.overridden
    ]  # fmt: skip


def overridden(path: Path, content: Mapping[str, Any]) -> list[Finding]:
    """Return findings for values that have no effect because their key is repeated later in the file."""
    return _overridden(str(path), content)


def _missing(path: Path, json_path: str) -> Finding:
    """Return the finding for a DeepSpeed JSON that is not where the launcher will look for it."""
    return Finding(
        file=str(path), key=DEEPSPEED_FILE, value=json_path, effect="crashes", matters=True,
        error="Expected a string path to an existing deepspeed config",
        message=f"The launcher does not find this file in the current folder, {Path.cwd()}.",
        remedy="Start the training in the folder that the path is relative to, or write an absolute path.",
    )  # fmt: skip


def _elsewhere(path: Path, key: str, name: str) -> Finding:
    """Return the finding for a file that was found in another folder than the current one."""
    return Finding(
        file=str(path), key=key, value=name, effect="honoured", is_note=True,
        message="This path is relative to the folder in which the training is started. The file was found in another "
        "folder, so the path does not work if you start the training in the current folder.",
    )  # fmt: skip


_EXAMINERS: dict[Kind, Callable[[Parts, Path, Mapping[str, Any]], None]] = {
    "accelerate": _of_accelerate,
    "deepspeed": _of_json,
    "ddp": _of_ddp,
    "fsdp_config": _of_fsdp_config,
    "torchtitan": _of_torchtitan,
    "axolotl": _of_axolotl,
    "training_arguments": _of_trainer("training_arguments"),
    "trl": _of_trainer("trl"),
    "llamafactory": _of_trainer("llamafactory"),
    "ms_swift": _of_trainer("ms_swift"),
}
