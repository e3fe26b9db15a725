"""The benchmark of silent errors: what each tool says, and what the watch of `prove` costs."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import yaml
from wording import tabulate

from zero_study.files import ROOT
from zero_study.prove import every_step
from zero_study.theory import gpus

FOLDER = ROOT / "reports" / "silent_errors"
MEANS = {"debug_detail": "TORCH_DISTRIBUTED_DEBUG=DETAIL", "detect_anomaly": "anomaly mode"}


@cache
def entries() -> list[dict[str, Any]]:
    """Return the errors, each with its results by tool."""
    listed = yaml.safe_load((FOLDER / "programs.yaml").read_text(encoding="utf-8"))
    results = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))["entries"]
    return [entry | {"results": results.get(entry["id"], {})} for entry in listed]


def of_prove(entry: dict[str, Any]) -> str:
    sides = entry["results"].get("prove")
    if sides is None:
        return "not run"
    new = [each for each in sides["wrong"]["errors"] if each["id"] not in {e["id"] for e in sides["right"]["errors"]}]
    ids = dict.fromkeys(each["id"].partition("/")[2] for each in new)  # not as code, which phones break anywhere
    if ids:
        return ", ".join(ids)
    return "note" if sides["wrong"]["notes"] else "no"


def of_traincheck(entry: dict[str, Any]) -> str:
    result = entry["results"].get("traincheck")
    if result is None:
        return "not run"
    if "error" in result:
        return "failed"
    new = len(result["wrong"]["violations"])
    return f"{new} new" if new else "no"


def of_torch(entry: dict[str, Any]) -> str:
    result = entry["results"].get("torch")
    if result is None:
        return "not run"
    found = [
        words
        for means, words in MEANS.items()
        if result[means]["wrong"]["message"] and result[means]["wrong"] != result[means]["right"]
    ]
    return ", ".join(found) or "no"


def of_losses(entry: dict[str, Any]) -> str:
    result = entry["results"].get("losses")
    if result is None:
        return "not run"
    kinds = [result[kind] for kind in ("losses", "evaluations") if kind in result]
    return "yes" if any(each["shows"] for each in kinds) else "no"


COLUMNS = {"`prove`": of_prove, "TrainCheck": of_traincheck, "PyTorch": of_torch, "loss curve": of_losses}


def table() -> str:
    """List every error with what each tool says."""
    rows = [
        [f"{entry['id']}: {entry['wrong'].rstrip('.')}", entry["step"], *(of(entry) for of in COLUMNS.values())]
        for entry in entries()
    ]
    return tabulate(["error", "from step", *COLUMNS], rows)


def counts() -> str:
    """Count the errors that each tool finds, and the right twins that it accuses."""
    rows = []
    for words, of in COLUMNS.items():
        said = {entry["id"]: of(entry) for entry in entries()}
        run = [entry for entry in entries() if said[entry["id"]] not in ("not run", "failed")]
        found = [entry for entry in run if said[entry["id"]] not in ("no", "note")]
        visible = [entry for entry in found if entry["visible"]]
        notes = sum(said[entry["id"]] == "note" for entry in run)
        num_visible = sum(entry["visible"] for entry in run)
        accused = "" if of is of_losses else sum(_accuses(words, entry) for entry in run)  # the twin is its measure
        rows.append([words, len(run), len(found), f"{len(visible)} of {num_visible}", notes, accused])
    header = ["tool", "errors that were run", "found", "found of those that are visible", "only in a note"]
    return tabulate([*header, "right twins with an alarm"], rows)


def _accuses(words: str, entry: dict[str, Any]) -> bool:
    results = entry["results"]
    if words == "`prove`":
        return bool(results["prove"]["right"]["errors"])
    if words == "TrainCheck":
        return results["traincheck"]["right"]["violated"] > 0
    return any(results["torch"][means]["right"]["exit_status"] for means in MEANS)


def not_found() -> str:
    """List the errors on which `prove` says nothing, with the reason if they are not visible in the process."""
    rows = [
        [entry["id"], entry.get("why_not_visible", "It is visible in the process, but none of our checks finds it.")]
        for entry in entries()
        if of_prove(entry) == "no"
    ]
    return tabulate(["error", "why"], rows)


def cost() -> str:
    """Say what the watch costs per step, as measured on two CPU ranks."""
    results = json.loads((FOLDER / "overhead.json").read_text(encoding="utf-8"))
    large, tiny = results["124m"], results["tiny"]
    low, high = (100 * (value - 1) for value in large["interval_of_ratio"])
    return (
        f"The watch makes a step of a GPT with 124 million parameters {100 * (large['ratio'] - 1):.1f} % longer "
        f"(95 % interval {low:.1f} to {high:.1f} %; {large['pairs']} pairs of steps with and without it, in turns, DDP "
        f"on two CPU ranks, {large['median_seconds_without']:.1f} s per step), and its peak of memory "
        f"{100 * (large['ratio_of_peak_memory'] - 1):.1f} % larger. For a GPT with 1.6 million parameters, "
        f"it adds {1000 * tiny['median_difference_seconds']:.1f} ms to a step of "
        f"{1000 * tiny['median_seconds_without']:.0f} ms. At its end, `prove` prints which share of the time the "
        "checks took in your training. For 8 billion parameters in fp32 under FSDP on eight H100, we predict "
        f"{1000 * 8e9 * 8 / 8 / every_step.TURNS / gpus.GPUS['h100-sxm'].memory_bandwidth:.1f} ms per step for reading "
        "weights and gradients, by the memory bandwidth of the GPU; the launches of its kernels come on top."
    )


TABLES = {
    ("reports/silent-errors.md", "errors"): table,
    ("reports/silent-errors.md", "counts"): counts,
    ("reports/silent-errors.md", "not_found"): not_found,
    ("docs/prove.md", "watch_cost"): cost,
}
