"""`zero-study doctor FILE`: the findings of a file, and the file mended."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from ...errors import Refusal
from ...files import ROOT, load, read_whole, read_yaml, reading, write_whole
from .. import known_bad, upgrade
from ..keys.patterns import ABSENT
from ..strategy_names import OffloadDevice, StrategyName
from . import config_files
from .findings import KEEP, REMOVE, Finding, Instead, Settings, cut

CONFIGS = ROOT / "accelerate_configs"  # the strategies that the project ships
ORDER = ("crashes", "means something else", "overridden", "ignored", "not examined", "honoured")
# Keys of which a JSON with one is an accelerate file, and none of DeepSpeed's.
OF_ACCELERATE = {"distributed_type", "compute_environment", "num_processes", "num_machines"}
# A JSON beside the accelerate file of a DDP: its keys, as DistributedDataParallelKwargs and theory's Engine name them,
# and their values.
OF_DDP: dict[str, tuple[Any, ...]] = {"gradient_as_bucket_view": (False, True)}
# What the shipped files leave open, because zero-study fills it in (training/accelerators.py).
FILLED_IN = ("gradient_clipping", "nvme_path", "offload_param.buffer_size")


class _Section(dict[str, Any]):
    """A section of a JSON as accelerate reads it: of a key that is written twice it has the last value."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        last = {key: place for place, (key, _) in enumerate(pairs)}
        self.overridden = [pair for place, pair in enumerate(pairs) if last[pair[0]] != place]


@dataclass(frozen=True)
class Examined:
    """A file, and what was found in it and in the DeepSpeed JSON that it names."""

    path: Path
    content: dict[str, Any]
    findings: list[Finding]

    @property
    def matters(self) -> bool:
        """Whether the file does something else than it says."""
        return any(finding.matters for finding in self.findings)

    def as_json(self) -> str:
        """What --json prints."""
        return json.dumps([finding.as_json() for finding in self.findings], indent=1, default=str)


def examine(path: Path, release: str | None = None) -> Examined:
    """Examine an accelerate file or a DeepSpeed JSON, by a release too. Raises Refusal where it is neither."""
    examined = _examine(path, _read_json(path) if _is_json(path) else read_yaml(path, CONFIGS))
    found = [] if release is None else _of_release(path, examined.content, release)
    return replace(examined, findings=found + examined.findings)


def _of_release(path: Path, content: dict[str, Any], release: str) -> list[Finding]:
    """Say what a release of DeepSpeed trains wrongly of the stage, offload and precision that a file asks for."""
    package, _, version = release.partition("==")
    if package != "deepspeed" or not _is_version(version):
        raise Refusal(f"--for {release}: write deepspeed==VERSION; of other packages `zero-study upgrade` says more")
    stage, device, classes = _training_of(content)
    engine = "not DeepSpeed" if stage is None else str(StrategyName.of_zero(stage, device))
    finding = Finding(file=str(path), key="stage", value=stage, effect="means something else", matters=True)
    if reason := upgrade.why_unknown(package, version):
        return [replace(finding, effect="not examined", message=reason)]
    return [
        replace(finding, message=f"{release} trains wrongly {upgrade.fault_summary(fault, [engine])}")
        for fault in known_bad.faults_of(version, engine, classes)
    ]


def _is_version(text: str) -> bool:
    return known_bad.base_release(text) > Version("0")


def _training_of(content: dict[str, Any]) -> tuple[int | None, OffloadDevice, set[str]]:
    """Return the ZeRO stage (None: not DeepSpeed), the device of its optimizer states, and its precision classes.

    Classes are named as in the matrices of conformance; an empty set stands for any. The DeepSpeed JSON that an
    accelerate file names takes precedence over the accelerate file.
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
    """Whether a file is JSON: by its name, or by its first character where the name says neither.

    DeepSpeed asks no name: some projects call its files .conf.
    """
    if path.suffix in (".json", ".yaml", ".yml"):
        return path.suffix == ".json"
    with reading(path, "JSON or YAML"):
        return read_whole(path).lstrip()[:1] == b"{"


def _read_json(path: Path) -> dict[str, Any]:
    return with_keys(path, load(path, "JSON", _Section))


def with_keys(path: Path, content: Any) -> dict[str, Any]:
    """What a JSON holds. Raises Refusal where that is no keys."""
    if not isinstance(content, dict):
        raise Refusal(f"{path}: holds no keys; copy one of {CONFIGS.name}/")
    return content


def _examine(path: Path, content: dict[str, Any]) -> Examined:
    found = _written_twice(path, content)
    if content and content.keys() <= OF_DDP.keys():
        found += [Finding(file=str(path), key=key, value=value, effect="honoured", message="zero-study hands it to DDP")
                  for key, value in content.items()]  # fmt: skip
    elif _is_json(path) and not OF_ACCELERATE & set(content):
        found += config_files.of_json(str(path), content)
    else:
        found += config_files.of_accelerate(str(path), content)
        named = config_files.AccelerateFile(content).json_named
        if named is not None and not Path(named).is_file():
            missing = _missing(path, named)
            found = [*(finding for finding in found if finding.key != missing.key), missing]
        elif named is not None:
            inner = _read_json(Path(named))
            found += _written_twice(Path(named), inner) + config_files.of_json(named, inner)
    return Examined(path, content, [_as_shipped(finding) for finding in _one_for_a_typo(found)])


def _one_for_a_typo(found: Sequence[Finding]) -> list[Finding]:
    """Join what is said of a misspelt key with what is said of the right one, which is missing for that reason."""
    missing = {(one.file, one.key): one for one in found if one.value is ABSENT}
    joined: list[Finding] = []
    dropped: set[tuple[str, str]] = set()
    for one in found:
        right = one.mend.key if isinstance(one.mend, Instead) else None
        absent = missing.get((one.file, right)) if right is not None else None
        if right is not None and absent is not None:
            dropped.add((one.file, right))
            one = replace(one, message=f"{one.message}; {absent.message}")
        joined.append(one)
    return [one for one in joined if (one.file, one.key) not in dropped or one.value is not ABSENT]


def _as_shipped(finding: Finding) -> Finding:
    """A finding, which is no fault of a shipped file in what zero-study itself fills in."""
    is_shipped = Path(finding.file).resolve().is_relative_to(CONFIGS)
    if not (is_shipped and finding.matters and finding.key.endswith(FILLED_IN)):
        return finding
    return replace(finding, matters=False, message=f"zero-study fills it in; else {finding.message}")


def _written_twice(path: Path, content: dict[str, Any]) -> list[Finding]:
    """What is said of the values of a JSON that stand before another one of the same key."""
    sections = [("", content), *((f"{key}.", value) for key, value, _ in Settings(content).nodes())]
    return [
        Finding(
            file=str(path), key=f"{above}{key}", value=value, effect="overridden", matters=True, remedy="write it once",
            message="it is written again, and accelerate takes the last value (DeepSpeed refuses such a file where a "
            "program names it to deepspeed.initialize)", engine_has=section[key],
        )
        for above, section in sections if isinstance(section, _Section)
        for key, value in section.overridden
    ]  # fmt: skip


def _missing(path: Path, named: str) -> Finding:
    """What is said of a JSON that is not where the launcher will look for it."""
    return Finding(
        file=str(path), key="deepspeed_config.deepspeed_config_file", value=named, effect="crashes", matters=True,
        error="Expected a string path to an existing deepspeed config",
        message=f"does not exist as seen from {Path.cwd()}, where the launcher would look for it",
        remedy="start in the folder that it is relative to, or write a whole path",
    )  # fmt: skip


def text(examined: Examined, everything: bool = False) -> str:
    """One line a finding, the worst first; of what does no harm only the number, unless everything is asked."""
    shown = [f for f in examined.findings if everything or f.matters or f.effect == "not examined"]
    lines = [_line(f, examined.path) for f in sorted(shown, key=lambda f: (not f.matters, ORDER.index(f.effect)))]
    matter = sum(f.matters for f in examined.findings)
    rest = len(examined.findings) - len(shown)
    others = f"; {rest} keys do no harm (--all lists them)" if rest else ""
    return "\n".join([*lines, f"{examined.path}: {matter} of {len(examined.findings)} keys to change{others}"])


def _line(finding: Finding, path: Path) -> str:
    where = "" if finding.file == str(path) else f"{finding.file}: "
    value = "{...}" if isinstance(finding.value, dict) else repr(cut(finding.value))
    is_verb = finding.effect in ("crashes", "means something else")
    line = f"{where}{cut(finding.key)}: {value} {'' if is_verb else 'is '}{finding.effect}"
    line += f": {finding.message}" if finding.message else ""
    return line + (f"; {finding.remedy}" if finding.remedy else "")


def mended(examined: Examined) -> dict[str, Any]:
    """The file's content as --fix writes it: what matters and has one remedy is changed, the rest is kept.

    It is examined again until nothing is left to mend, for a key that is written may want another one.
    """
    content = copy.deepcopy(examined.content)
    for _ in range(5):
        before = copy.deepcopy(content)
        found = [f for f in _examine(examined.path, before).findings if f.matters and f.file == str(examined.path)]
        # A key under its right name first, for where it is missing there is another finding.
        for finding in [f for f in found if isinstance(f.mend, Instead)] or [f for f in found if f.mend is not KEEP]:
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
    first, _, rest = key.partition(".")
    if rest and key not in content:  # a key may itself hold a dot
        if not isinstance(content.get(first), dict):
            if value is REMOVE:
                return
            content[first] = {}
        if first == "fsdp_config":  # the launcher adds the section's prefix where it is left out
            content[first].pop(rest.removeprefix("fsdp_"), None)
        _put(content[first], rest, value)
    elif value is REMOVE:
        content.pop(key, None)
    else:
        content[key] = copy.deepcopy(value)


def write_mended(examined: Examined, out: Path) -> None:
    """Write the mended file, never over another. Raises Refusal."""
    if out.exists():
        raise Refusal(f"--fix {out}: exists; name a new file")
    if out.suffix != examined.path.suffix:
        raise Refusal(f"--fix {out}: is written as {examined.path.suffix}, as {examined.path} is; name it so")
    content = mended(examined)
    is_json = _is_json(examined.path)
    written = json.dumps(content, indent=2) if is_json else yaml.safe_dump(content, sort_keys=False)
    try:
        write_whole(out, (written.rstrip("\n") + "\n").encode())
    except OSError as error:
        raise Refusal(f"--fix {out}: cannot be written ({error.strerror})") from None
