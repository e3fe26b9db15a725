"""What installed releases and optimizers train wrongly, from the committed results of conformance."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from wording import first_and_last, tabulate

from zero_study import files
from zero_study.conformance import results
from zero_study.conformance.cells import (
    LOSS_SCALE_VARIATIONS,
    OPTIMIZERS,
    OPTIMIZERS_UNDER,
    PACKAGES,
    PLAIN,
    of_optimizers,
    of_release,
)
from zero_study.conformance.results import FAILED
from zero_study.files import ROOT
from zero_study.upgrade import faults


def lower_bound(package: str) -> str:
    """Return the oldest version that pyproject.toml accepts."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (bound,) = (entry.removeprefix(f"{package}>=") for entry in extras["train"] if entry.startswith(f"{package}>="))
    return bound


def supported() -> str:
    """Count the wrong and crashed cells of each package's releases, the newest first; equal neighbors share a row."""
    rows = []
    for package in PACKAGES:
        cell_names = {cell.name for cell in of_release([package])}
        findings: list[tuple[str, str, str]] = []
        for version, matrix in results.read(package).items():
            verdicts = Counter(matrix["cells"][name]["verdict"] for name in cell_names & set(matrix["cells"]))
            bad = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in FAILED if verdicts[verdict])
            is_new = faults.base_release(version) >= faults.base_release(lower_bound(package))
            findings.append((f"{bad or 'none'} of {verdicts.total()}", "yes" if is_new else "no", version))
        groups = [
            (finding, [version for *_, version in group]) for finding, group in groupby(findings, lambda row: row[:2])
        ]
        rows += [[f"`{package}`", first_and_last(versions), *finding] for finding, versions in reversed(groups)]
    return tabulate(["package", "releases (how many)", "wrong or crashed test cases", "supported"], rows)


def optimizers_by_release() -> str:
    """Count the wrong and crashed cells of each optimizer under ZeRO 0 to 3, by release of DeepSpeed."""
    rows = []
    for optimizer in OPTIMIZERS:
        findings = [
            ((_optimizer_result(matrix["cells"], optimizer),), version)
            for version, matrix in results.read("deepspeed", results.OPTIMIZERS).items()
        ]
        rows += [[f"`{optimizer}`", *row] for row in _by_release(findings)]
    return tabulate(["optimizer", "DeepSpeed", "test cases at stages 0 to 3"], rows)


def _optimizer_result(
    cells: Mapping[str, Any], optimizer: str, engines: Sequence[str] = OPTIMIZERS_UNDER["deepspeed"]
) -> str:
    """Say how many of an optimizer's cells under some engines are wrong, and how."""
    names = [cell.name for cell in of_optimizers([optimizer], engines)]
    names = [name for name in names if name in cells] or names
    return _result_of(cells, names) if names else ""


def _result_of(cells: Mapping[str, Any], names: Collection[str]) -> str:
    """Say how many of these cells are wrong, and how."""
    if not set(names) <= set(cells):
        return "not tested"
    verdicts = Counter(cells[name]["verdict"] for name in names)
    if verdicts["refused"] == len(names):
        return "refused"
    of_norm = sum(cells[name].get("beyond") == ["norm"] for name in names)
    of_states = sum(cells[name].get("beyond") == [] and "wrong_states" in cells[name] for name in names)
    num_wrong = verdicts["wrong"] - of_norm - of_states
    words = [f"{num_wrong} wrong"] if num_wrong else []
    words += [f"{of_norm} with a wrong norm only"] if of_norm else []
    words += [f"{of_states} with states of a wrong type only"] if of_states else []
    words += [f"{verdicts['crashed']} crashed"] if verdicts["crashed"] else []
    words += [f"{verdicts['refused']} refused"] if verdicts["refused"] else []
    return f"{', '.join(words)} (of {len(names)})" if words else f"all {len(names)} right"


def installed_optimizers() -> str:
    """Count the verdicts of each optimizer's cells with the newest installation, by group of engines."""
    cells = results.newest(results.OPTIMIZERS)["cells"]
    groups = {
        "DDP": ("ddp",),
        "FSDP2": ("fsdp2",),
        "stage 0": ("zero0",),
        "stages 1 to 3": ("zero1", "zero2", "zero3", "accelerate_zero1", "accelerate_zero2", "accelerate_zero3"),
        "with CPU offload": ("zero1_cpu_offload", "zero2_cpu_offload", "zero3_cpu_offload"),
    }
    rows = [
        [f"`{optimizer}`: {what}", *(_optimizer_result(cells, optimizer, engines) for engines in groups.values())]
        for optimizer, what in OPTIMIZERS.items()
    ]
    return tabulate(["optimizer", *groups], rows)


# The groups of test cases with a loss scale or clipping under autocast, by precision and whether the scale grows.
LOSS_SCALES = {
    "`fp16`": ("fp16", False),
    "`fp16`, loss scale doubles": ("fp16", True),
    "`torch_autocast`, float16": ("autocast_fp16", False),
    "`torch_autocast`, bfloat16": ("autocast", False),
}


def loss_scales_by_release() -> str:
    """Count the wrong and crashed cells of fp16 and DeepSpeed's autocast by stage, by release of DeepSpeed."""
    engines = ("zero0", "zero1", "zero2", "zero3")
    rows = []
    for words, (precision, grows) in LOSS_SCALES.items():
        members = [
            cell
            for cell in of_release(["deepspeed"], (PLAIN, *LOSS_SCALE_VARIATIONS))
            if (cell.precision, cell.does("scale_grows")) == (precision, grows)
        ]
        findings = []
        for version, matrix in results.read().items():
            by_stage = [[cell.name for cell in members if cell.engine == engine] for engine in engines]
            findings.append((tuple(_result_of(matrix["cells"], names) for names in by_stage), version))
        rows += [[words, *row] for row in _by_release(findings)]
    return tabulate(["precision", "DeepSpeed", "stage 0", "stage 1", "stage 2", "stage 3"], rows)


def loss_scales_lacking() -> str:
    """Name the releases whose files lack cells with a loss scale."""
    names = {cell.name for cell in of_release(["deepspeed"], (PLAIN, *LOSS_SCALE_VARIATIONS))}
    lacking = [version for version, matrix in results.read().items() if not names <= set(matrix["cells"])]
    return ", ".join(lacking) or "none"


MUON_CASES = {
    "stage 0": "zero0/fp32/2-ranks/accumulation-1/muon",
    "stage 2": "zero2/fp32/2-ranks/accumulation-1/muon",
    "stage 2, no key for clipping": "zero2/fp32/2-ranks/accumulation-1/clipping_absent/muon",
    "stage 3, 4 micro batches": "zero3/fp32/2-ranks/accumulation-4/muon",
    "stage 3, no key for clipping": "zero3/fp32/2-ranks/accumulation-1/clipping_absent/muon",
    "stage 3, zero.Init": "zero3/fp32/2-ranks/accumulation-1/zero_init/muon",
}


def muon_by_release() -> str:
    """Say how far Muon moved the weights, relative to the reference, by release of DeepSpeed."""
    findings = []
    for version, matrix in results.read("deepspeed", results.OPTIMIZERS).items():
        row = tuple(_distance_moved(matrix["cells"].get(name)) for name in MUON_CASES.values())
        findings.append((row, version))
    return tabulate(["DeepSpeed", *MUON_CASES], _by_release(findings))


def _distance_moved(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "not tested"
    if "message" in cell:
        return str(cell["verdict"])
    if cell["verdict"] == "same":
        return "right"
    scale = cell["update_scale"][-1]
    moved = "not a number" if scale is None else f"{scale:.2f}"
    return f"{moved}, norm wrong" if cell["beyond"] == ["norm"] else f"**{moved}**"


def _by_release(findings: Sequence[tuple[tuple[str, ...], str]]) -> list[list[str]]:
    """Return one row for neighboring releases with equal findings, the newest first."""
    groups = [(row, [version for _, version in group]) for row, group in groupby(findings, lambda item: item[0])]
    return [[first_and_last(versions), *row] for row, versions in reversed(groups)]


# Faults that the cells with AdamW do not show. Our tests of Muon, or their threads, do.
OF_MUON = ("muon-micro-batches", "muon-stage-0", "muon-zero-init")
PRECISIONS_IN_WORDS = {
    ("fp32", "autocast", "bf16", "bf16_fp32_sum"): "",
    ("autocast",): ", with the key `torch_autocast` in bfloat16",
    ("bf16",): ", with the key `bf16`",
    ("bf16_fp32_sum",): ", with the keys `bf16` and `data_types.grad_accum_dtype` (fp32)",
    ("bf16", "bf16_fp32_sum"): ", with the key `bf16`, also with `data_types.grad_accum_dtype` (fp32)",
}


def older_faults() -> str:
    """List the faults of older releases of DeepSpeed from the list of faults: whom they affect, and what goes wrong."""
    versions = list(results.read("deepspeed"))
    listed = [fault for fault in faults.measured() if fault.last != versions[-1]]
    listed += [fault for fault in faults.read() if fault.package == "deepspeed" and fault.id in OF_MUON]
    rows = []
    for fault in listed:
        last = fault.last or max((each for each in versions if fault.is_in(each)), key=faults.base_release)
        first = fault.introduced or f"{versions[0]} (the oldest tested)"
        if fault.engines:
            who, what = _affected(fault), fault.what.partition("; in our test model")[0] + _effect_in_words(fault)
        else:
            who, _, what = re.sub(r" \(seen in [^)]*\)$", "", fault.summary).partition(": ")
        threads = ", ".join(map(_link_to_thread, fault.threads))
        sentence = f"{what[0].upper()}{what[1:]}{f' ({threads})' if threads else ''}."
        row = [f"{first} to {last}{_not_tested(fault)}", f"{who[0].upper()}{who[1:]}", sentence]
        rows.append((faults.base_release(last), row))
    ordered = sorted(rows, key=lambda row: row[0], reverse=True)
    return tabulate(["DeepSpeed", "who is affected", "what goes wrong"], [row for _, row in ordered])


def _effect_in_words(fault: faults.Fault) -> str:
    """Return how far the weights of the small model moved with a fault and the default AdamW, as the end of a text."""
    entry = files.load(EFFECTS, "a record of effects")["faults"].get(fault.id)
    if entry is None:
        return ""
    moved = _moved(entry["adamw"]["moved"])
    return f"; with the default AdamW, the weights moved {moved} times the right distance after 1, 5 and 20 steps"


def _not_tested(fault: faults.Fault) -> str:
    """Return, in parentheses, the releases within a range whose tests with a fault's engines all stop with an error."""
    gaps: dict[tuple[str, ...], list[str]] = {}
    for version, matrix in results.read("deepspeed").items():
        if fault.engines and faults.affects(fault, version):
            crashed = [engine for engine in fault.engines if _crashes(matrix["cells"], fault, engine)]
            gaps.setdefault(tuple(crashed), []).append(version)
    parts = []
    for engines, versions in gaps.items():
        which = "" if engines == tuple(fault.engines) else f"{stages_in_words(engines)}: " if engines else None
        if which is not None:
            names = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
            parts.append(f"{which}{names} stop with an error")
    return f" ({'; '.join(parts)})" if parts else ""


def _crashes(cells: Mapping[str, Any], fault: faults.Fault, engine: str) -> bool:
    names = [faults.cell(fault, engine, precision) for precision in fault.precisions]
    verdicts = {cells[name]["verdict"] for name in names if name in cells}
    return "crashed" in verdicts and verdicts <= {"crashed", "refused"}


def _link_to_thread(url: str) -> str:
    repository, _, number = url.split("/")[-3:]
    return f"[{'' if repository == 'DeepSpeed' else f'{repository} '}#{number}]({url})"


def stages_in_words(engines: Sequence[str]) -> str:
    """Name ZeRO stages, and whether they are affected with CPU offload, without it, or both."""
    stages = sorted({engine.removeprefix("zero")[0] for engine in engines})
    conjunction = "and" if len(stages) == 2 else "to"
    named = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]} {conjunction} {stages[-1]}"
    offloaded = [engine for engine in engines if engine.endswith("cpu_offload")]
    if offloaded:
        return f"{named} {'with CPU offload' if len(offloaded) == len(engines) else 'with and without CPU offload'}"
    return named if stages == ["0"] else f"{named} without CPU offload"


def _affected(fault: faults.Fault) -> str:
    accumulation = ", with `gradient_accumulation_steps` above 1" if fault.several_micro_batches else ""
    models = f", for {fault.models}" if fault.models else ""
    return f"{stages_in_words(fault.engines)}{PRECISIONS_IN_WORDS[tuple(fault.precisions)]}{accumulation}{models}"


def first_move(variation: str) -> str:
    """Return how far the first step moved the weights with the newest DeepSpeed in float16 under its autocast."""
    cell = results.newest()["cells"][f"zero2/autocast_fp16/2-ranks/accumulation-1/{variation}"]
    return f"{cell['update_scale'][0]:.4f}"


def minutes() -> float:
    """Return how long all cells of the newest installation took, including those that were added to its file."""
    newest = results.newest()
    parts = [newest, *(newest[key] for key in ("loss_scales",) if key in newest)]
    return sum(second for part in parts for second in part["seconds"].values()) / 60


EFFECTS = results.PLACE / "effects" / "effects.json"
HIDDEN_WITHIN = 0.1  # of the right distance, after every measured step


def is_nearly_hidden(scales: Sequence[float | None]) -> bool:
    """Return whether a fault hardly changes how far the weights move, relative to a right training (1.0)."""
    return bool(scales) and all(scale is not None and abs(scale - 1) <= HIDDEN_WITHIN for scale in scales)


def effects_of_faults() -> str:
    """Say how far the weights moved with each fault, by optimizer, relative to a right training."""
    record = files.load(EFFECTS, "a record of effects")
    parameters = [f"{record['settings'][name]['parameters']:,}" for name in ("adamw", "adamw_large")]
    rows = []
    for entry in record["faults"].values():
        moved = {setting: entry[setting]["moved"] for setting in record["settings"]}
        of_adamw = [moved["adamw"], moved["adamw_large"]]
        scales = [scale for each in of_adamw if not isinstance(each, str) for scale in each.values()]
        words = [_moved(moved[name]) for name in ("adamw", "adamw_large", "sgd", "conformance")]
        verdict = "nearly hidden" if is_nearly_hidden(scales) else "visible"
        rows.append([entry["who"], entry["release"], *words, verdict])
    small, large = parameters
    head = ["training", "DeepSpeed", f"AdamW, {small} parameters", f"AdamW, {large} parameters"]
    return tabulate([*head, "SGD", "AdamW, eps = 0.1", "with default AdamW"], rows)


def _moved(scales: Mapping[str, float | None] | str) -> str:
    """Return how far weights moved after 1, 5 and 20 steps."""
    if isinstance(scales, str):
        return "stopped"
    return ", ".join("not a number" if scales[step] is None else _scale(scales[step]) for step in ("1", "5", "20"))


def _scale(number: float) -> str:
    return f"{number:.2f}" if abs(number) >= 0.1 or not number else f"{number:.2g}"


def effect(fault: str, setting: str, step: str) -> str:
    """Return how far the weights moved with a fault, relative to a right training."""
    return _scale(files.load(EFFECTS, "a record of effects")["faults"][fault][setting]["moved"][step])


def right_engines() -> str:
    """Return the smallest and the largest distance of the right engines in the record of effects."""
    record = files.load(EFFECTS, "a record of effects")
    scales = [
        scale
        for entry in record["faults"].values()
        for setting in record["settings"]
        for scale in (entry[setting]["right_engine"] or {}).values()
    ]
    return f"{min(scales):.3f} to {max(scales):.3f}"


def cells(engines: str = "", *outcomes: str) -> str:
    """Count the tests of the newest installation with engines whose names begin so, and with these verdicts."""
    of_engines = [
        cell for name, cell in results.newest()["cells"].items() if re.match(f"(accelerate_)?({engines})", name)
    ]
    return f"{sum(cell['verdict'] in (outcomes or results.VERDICTS) for cell in of_engines):,}"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/conformance/README.md", "supported"): supported,
    ("reports/conformance/README.md", "installed_optimizers"): installed_optimizers,
    ("docs/known-faults.md", "older_faults"): older_faults,
    ("reports/conformance/README.md", "optimizers"): optimizers_by_release,
    ("reports/conformance/README.md", "muon"): muon_by_release,
    ("reports/conformance/README.md", "loss_scales"): loss_scales_by_release,
    ("docs/known-faults.md", "effects"): effects_of_faults,
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/releases.md", "all"): cells,
    ("docs/releases.md", "minutes"): lambda: f"{minutes():.1f}",
    ("reports/conformance/README.md", "lacking"): loss_scales_lacking,
    ("reports/conformance/README.md", "moved_above"): partial(first_move, "clipping_above"),
    ("reports/conformance/README.md", "moved_absent"): partial(first_move, "clipping_absent"),
    ("docs/known-faults.md", "right_engines"): right_engines,
    ("docs/known-faults.md", "bf16_first"): partial(effect, "zero0-bf16-step", "adamw", "1"),
    ("docs/known-faults.md", "bf16_twenty"): partial(effect, "zero0-bf16-step", "adamw", "20"),
    ("docs/known-faults.md", "bf16_sensitive"): partial(effect, "zero0-bf16-step", "conformance", "1"),
    ("docs/known-faults.md", "fp16_small"): partial(effect, "fp16-stage-0", "adamw", "20"),
    ("docs/known-faults.md", "fp16_large"): partial(effect, "fp16-stage-0", "adamw_large", "20"),
    ("reports/conformance/README.md", "all"): cells,
    ("reports/conformance/README.md", "all_wrong"): partial(cells, "", "wrong"),
    ("reports/conformance/README.md", "deepspeed"): partial(cells, "zero"),
    ("reports/conformance/README.md", "wrong"): partial(cells, "zero", "wrong"),
    ("reports/conformance/README.md", "same"): partial(cells, "zero", "same"),
    ("reports/conformance/README.md", "stopped"): partial(cells, "zero", "refused", "crashed"),
}
