"""Pair each run with a comparable run of the baseline.

For each pair, the result names the quantities that cannot be compared. For each run without a pair, it gives the
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from study.compare.parity import other_masks
from zero_study.terminal import count

# The facts that must be equal in two runs, and the text that reports a difference. The first difference is reported.
_HELD: dict[str, str] = {
    "box": "different machines: {} and {}",
    "device": "{} and {}",
    "workload": "{} and {}",
    "size": "sizes {} and {}",
    "precision": "precisions {} and {}",
    "data_digest": "different data",
    "init": "init {} and {}",
    "sequence_length": "sequence lengths {} and {}",
    "gradient_clipping": "clipping at {} and {}",
    "config_digest": "",  # the setting that differs is reported
    "libraries": "",  # the library that differs is reported
    "global_batch_size": "global batches of {} and {}",
    "num_steps": "{} and {} steps",
}
_UNKNOWN = {"data_digest": "data", "config_digest": "settings", "initial_sha256": "initial weights"}

# Times are compared only between runs that began within this period. A study alternates its strategies, which protects
# against slow changes of a machine during the study, but not against changes between two days.
SAME_SESSION_HOURS = 12

CELL = tuple(_HELD)
LIMITS = ("losses", "speed", "memory", "states")
SHOWN = ("box", "workload", "size", "precision", "sequence_length", "config_digest", "global_batch_size", "num_steps")


class Pairs(NamedTuple):
    """The pairs of comparable runs, and the runs without a pair."""

    compared: pd.DataFrame  # one row per pair of runs; `run` and `control_run` are labels of the table's index
    refused: pd.DataFrame  # one row per run that is in no pair, with the reason


def comparable(run: Mapping[str, Any], partner: Mapping[str, Any]) -> str | None:
    """Return the reason why two runs cannot be compared. None if they can.

    Strategy, number of processes and seed may differ. `pair` chooses runs by these, and `limits` names the quantities
    of a pair that nevertheless cannot be compared.
    """
    for facts in (run, partner):
        if facts["status"] != "ok":
            return f"{facts['strategy']}: {facts['status']}"
        if facts.get("is_unproven"):
            return f"{facts['strategy']}: its proof does not say what was sharded. Run it again"
        if isinstance(facts.get("mixed_code"), str):
            return f"{facts['strategy']}: {facts['mixed_code']}"
    for name, phrase in _HELD.items():
        mine, theirs = run[name], partner[name]
        if pd.isna(mine) or pd.isna(theirs):
            return f"{_UNKNOWN.get(name, name.replace('_', ' '))} unknown"
        if mine != theirs:
            return phrase.format(_plain(mine), _plain(theirs)) if phrase else _DETAILS[name](run, partner)
    if run["seed"] == partner["seed"]:
        mine, theirs = run["initial_sha256"], partner["initial_sha256"]
        if pd.isna(mine) or pd.isna(theirs):
            return "initial weights unknown"
        if mine != theirs:
            return "different initial weights"
    return None


def limits(run: Mapping[str, Any], partner: Mapping[str, Any]) -> dict[str, str | None]:
    """Return why two runs cannot be compared, for each of losses, speed, memory and states. None if they can.

    `states` are the quantities that depend on the number of processes: model states and traffic.
    """
    world_difference = _against(run, partner, "world_size", "processes")
    # A comparison with `single`, or of a strategy with itself, is meant to compare numbers of processes.
    by_design = run["strategy"] == partner["strategy"] or "single" in (run["strategy"], partner["strategy"])
    confounded = None if by_design else world_difference
    micro_batch = _against(run, partner, "micro_batch_size", "micro batch")
    # If the number of processes differs, the micro batch has to differ too. Otherwise the micro batch is a setting.
    unequal = confounded or (None if world_difference else micro_batch)
    threads = _against(run, partner, "threads_per_process", "threads per process") if run["device"] == "cpu" else None
    too_late = _hours_apart(run, partner)
    crowded = next((why_crowded(run_of_pair) for run_of_pair in (run, partner) if why_crowded(run_of_pair)), None)
    speed = crowded or unequal or threads or too_late
    return {"losses": other_masks(run, partner), "speed": speed, "memory": unequal, "states": confounded}


def _hours_apart(run: Mapping[str, Any], partner: Mapping[str, Any]) -> str | None:
    """Return a text that says how many hours apart two runs began. None if it is at most `SAME_SESSION_HOURS`."""
    began = [run.get("started_at"), partner.get("started_at")]
    if any(pd.isna(moment) for moment in began):
        return None
    hours = abs((pd.Timestamp(began[0]) - pd.Timestamp(began[1])).total_seconds()) / 3600
    return f"started {hours:.0f} hours apart" if hours > SAME_SESSION_HOURS else None


def why_crowded(run: Mapping[str, Any]) -> str | None:
    """Return why a run's times do not measure its strategy: its processes share cores or GPUs. None if they do not."""
    if not run["oversubscribed"]:
        return None
    shared = "one device" if run["share_device"] else "too few cores" if run["device"] == "cpu" else "fewer GPUs"
    return f"{run['world_size']} processes on {shared}"


def pair(table: pd.DataFrame, control: str = "ddp") -> Pairs:
    """Pair each run with a run of the baseline that has the same seed and training options.

    The setting is the values in the columns `CELL`. The partner is a run on the same number of processes or, if there
    is none, on the fewest processes. Therefore `single`, which always has one process, has a partner too. The nth
    repeat is paired with the control's nth repeat or, if there is none, with its first. The columns of `compared` are
    run, control_run, and the quantities in `LIMITS`.
    """
    ok = table[table["status"] == "ok"]
    strategies, controls = ok[ok["strategy"] != control], ok[ok["strategy"] == control]
    runs = dict(zip(table.index, table.to_dict("records"), strict=True))
    pairs_made, reasons = [], {}
    for label, partner in _partners(strategies, controls).items():
        reason = comparable(runs[label], runs[partner])
        if reason is None:
            pairs_made.append({"run": label, "control_run": partner, **limits(runs[label], runs[partner])})
        else:
            reasons[label] = reason
    compared = pd.DataFrame(pairs_made, columns=["run", "control_run", *LIMITS])
    paired = {*compared["run"], *compared["control_run"]}
    repeated = {_repeated(runs[label]) for label in compared["control_run"]}
    cells = [runs[label] for label in controls.drop_duplicates(list(CELL)).index]
    for label, run in runs.items():
        if label not in paired and label not in reasons:
            further = run["status"] == "ok" and _repeated(run) in repeated
            reasons[label] = (
                f"a further repeat of {control}, which is used for the margin"
                if further
                else _reason(run, cells, control)
            )
    columns_shown = ["run_id", "box", "workload", "size", "strategy", "world_size", "seed", "status", "message"]
    refused = table.loc[[label for label in table.index if label in reasons], columns_shown]
    return Pairs(compared, refused.assign(reason=[reasons[label] for label in refused.index]))


def scaling(table: pd.DataFrame) -> pd.DataFrame:
    """Return the efficiency of strong scaling (at a fixed global batch) for each strategy and number of processes.

    `scaling_efficiency` is the median of `tokens_per_second_per_gpu`, divided by that of the base. The base is `single`
    on one process or, if there is none, the strategy's own runs on the fewest processes. The column `base` names it.
    The efficiency is NaN if times cannot be compared, and `why` gives the reason.
    """
    ok = table[table["status"] == "ok"]
    rows = []
    for key, cell in ok.groupby(list(CELL), sort=False):
        single = cell[cell["strategy"] == "single"]
        for strategy, runs in cell.groupby("strategy", sort=False):
            fewest = runs[runs["world_size"] == runs["world_size"].min()]
            base = fewest if single.empty else single
            for world_size, members in runs.groupby("world_size"):
                of = {**dict(zip(CELL, key, strict=True)), "strategy": strategy, "world_size": world_size}
                rows.append({**of, **_efficiency(members, base)})
    return pd.DataFrame(rows, columns=[*SHOWN, "strategy", "world_size", *_EFFICIENCY])


_EFFICIENCY = ("scaling_efficiency", "tokens_per_second_per_gpu", "num_runs", "base", "base_world_size",
               "base_num_runs", "why")  # fmt: skip


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _against(run: Mapping[str, Any], partner: Mapping[str, Any], name: str, words: str) -> str | None:
    if run[name] == partner[name]:
        return None
    return f"{words} {_plain(run[name])} against {_plain(partner[name])}"


def _other_setting(run: Mapping[str, Any], partner: Mapping[str, Any]) -> str:
    settings, partner_settings = run["settings"], partner["settings"]
    name = next(name for name in settings | partner_settings if settings.get(name) != partner_settings.get(name))
    return f"{name} {settings.get(name)} against {partner_settings.get(name)}"


def _other_library(run: Mapping[str, Any], partner: Mapping[str, Any]) -> str:
    libraries, partner_libraries = (set(facts["libraries"].split(", ")) for facts in (run, partner))
    return (
        f"{', '.join(sorted(libraries - partner_libraries))} against {', '.join(sorted(partner_libraries - libraries))}"
    )


_DETAILS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], str]] = {
    "config_digest": _other_setting,
    "libraries": _other_library,
}


def _partners(runs: pd.DataFrame, controls: pd.DataFrame) -> dict[Any, Any]:
    """Return, for each run, the nearest run of the control. Runs are given by their labels in the table's index."""
    nearness = ["world_size", "micro_batch_size", "repeat"]
    keys = [*CELL, "seed"]
    runs_left, right = (
        side.dropna(subset=list(CELL))[keys + nearness].rename_axis("label").reset_index() for side in (runs, controls)
    )
    near = runs_left.merge(right, on=keys, suffixes=("", "_control"))
    for name in nearness:
        near[f"other_{name}"] = near[name] != near[f"{name}_control"]
    order = ["other_world_size", "world_size_control", "other_micro_batch_size", "other_repeat", "repeat_control"]
    nearest = near.sort_values(order, kind="stable").drop_duplicates("label")
    return dict(zip(nearest["label"], nearest["label_control"], strict=True))


def _repeated(run: Mapping[str, Any]) -> tuple:
    """Return a key that is equal for repeats of one run."""
    return tuple(run[name] for name in (*CELL, "strategy", "world_size", "micro_batch_size", "seed"))


def _reason(run: Mapping[str, Any], controls: Sequence[Mapping[str, Any]], control: str) -> str:
    """Return why a run has no pair, usually the first difference from the most similar run of the control."""
    if run["status"] != "ok":
        return f"{run['strategy']}: {run['status']}"
    if run["strategy"] == control:
        return f"no other strategy was run with the same options as this run of {control}"
    if not controls:
        return f"there is no finished run of {control}"
    nearest = max(controls, key=lambda partner: sum(run[name] == partner[name] for name in CELL))
    return comparable({**run, "seed": None}, nearest) or f"there is no run of {control} with seed {run['seed']}"


def _efficiency(runs: pd.DataFrame, base: pd.DataFrame) -> dict[str, Any]:
    rate, base_rate = (rows["tokens_per_second_per_gpu"].median() for rows in (runs, base))
    run, base_run = runs.iloc[0], base.iloc[0]
    reason = limits(run, base_run)["speed"]
    return {
        "scaling_efficiency": None if reason else rate / base_rate,
        "tokens_per_second_per_gpu": rate,
        "num_runs": len(runs),
        "base": f"{base_run['strategy']} on {count(base_run['world_size'], 'process', 'processes')}",
        "base_world_size": base_run["world_size"],
        "base_num_runs": len(base),
        "why": reason,
    }
