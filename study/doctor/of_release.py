"""Find the known faults of a DeepSpeed release that affect the training of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from ..engines.keys.patterns import matches
from ..engines.strategy_names import OffloadDevice, StrategyName
from ..errors import Refusal
from ..upgrade import changes, faults
from . import config_files
from .findings import Finding

PACKAGE = "deepspeed"


def version_of(release: str) -> str:
    """Return the version in a release such as "deepspeed==0.18.2". Raises Refusal for any other package."""
    package, _, version = release.partition("==")
    if package != PACKAGE or not faults.base_release(version) > Version("0"):
        raise Refusal(
            f"--for {release}: --for takes only releases of DeepSpeed. Write deepspeed==VERSION, or compare "
            "releases of other packages with `zero-study upgrade`."
        )
    return version


def findings_of(
    release: str, path: Path, content: Mapping[str, Any], json_content: dict[str, Any] | None
) -> list[Finding]:
    """Return findings about the known faults of a DeepSpeed release that affect a training with this file.

    `json_content` is the DeepSpeed file that the file is, contains or names. The stage, offload and precision decide
    which faults there are. Raises Refusal if `release` is not one of DeepSpeed.
    """
    version = version_of(release)
    stage, device, classes = _training_of(content, json_content)
    engine = "not DeepSpeed" if stage is None else str(StrategyName.of_zero(stage, device))
    finding = Finding(
        file=str(path), key="stage", value=stage, effect="means something else", matters=True, is_about_release=True
    )
    if reason := changes.why_unknown(PACKAGE, version):
        return [replace(finding, effect="not examined", message=reason, matters=False)]
    tested_faults = [
        replace(finding, message=faults.summary_of(fault, [engine]))
        for fault in faults.faults_of(version, engine, classes)
        if not fault.needs or _is_affected(json_content, fault.needs)
    ]
    return tested_faults + [
        replace(finding, key=next(iter(fault.file)), value=None, message=fault.summary)
        for fault in changes.known_faults()
        if fault.package == PACKAGE and fault.is_in(version) and _is_affected(json_content, fault.file)
    ]


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
