"""Form pairs of comparable runs, with what limits a pair, and a reason for each run that is in no pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from study.compare.parity import other_masks
from study.formatting import processes

# What must be equal between two runs, in the order in which a difference is told, and how it is told.
_HELD: dict[str, str] = {
    "box": "another box: {} against {}",
    "device": "{} against {}",
    "workload": "{} against {}",
    "size": "size {} against {}",
    "precision": "precision {} against {}",
    "data_digest": "other data",
    "init": "init {} against {}",
    "sequence_length": "sequence length {} against {}",
    "gradient_clipping": "clipping at {} against {}",
    "config_digest": "",  # told by the setting that differs
    "libraries": "",  # told by the library that differs
    "global_batch_size": "global batch {} against {}",
    "num_steps": "{} steps against {}",
}
_UNKNOWN = {"data_digest": "data", "config_digest": "settings", "initial_sha256": "initial weights"}

# Rotation guards times against a box that drifts within a study, not against what else it did on another day.
SAME_SESSION_HOURS = 12

CELL = tuple(_HELD)
LIMITS = ("losses", "speed", "memory", "states")
SHOWN = ("box", "workload", "size", "precision", "sequence_length", "config_digest", "global_batch_size", "num_steps")


class Pairs(NamedTuple):
    """What was paired with what, and what was not."""

    compared: pd.DataFrame  # one row per pair of runs; `run` and `control_run` are labels of the table's index
    refused: pd.DataFrame  # one row per run that is in no pair, with the reason


def comparable(run: Mapping[str, Any], partner: Mapping[str, Any]) -> str | None:
    """Say why two rows of the table may not be compared; None where they may.

    Neither strategy nor number of processes nor seed must be equal: `pair` takes care of these, and `limits` says which
    quantities of a pair may not be compared all the same.
    """
    for facts in (run, partner):
        if facts["status"] != "ok":
            return f"{facts['strategy']}: {facts['status']}"
        if facts.get("is_unproven"):
            return f"{facts['strategy']}: its proof does not say what was sharded; run it again"
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
            return "other initial weights"
    return None


def limits(run: Mapping[str, Any], partner: Mapping[str, Any]) -> dict[str, str | None]:
    """Say why two comparable rows may all the same not be compared in some quantities; None: they may.

    `states` are those that follow from the number of processes: model states, and what is sent.
    """
    world_difference = _against(run, partner, "world_size", "processes")
    # Beside `single`, and for a strategy with itself, the number of processes is the comparison's point.
    by_design = run["strategy"] == partner["strategy"] or "single" in (run["strategy"], partner["strategy"])
    confounded = None if by_design else world_difference
    micro_batch = _against(run, partner, "micro_batch_size", "micro batch")
    # Where the processes differ, so does what each does. Elsewhere it is a setting.
    unequal = confounded or (None if world_difference else micro_batch)
    threads = _against(run, partner, "threads_per_process", "threads per process") if run["device"] == "cpu" else None
    too_late = _hours_apart(run, partner)
    crowded = next((crowding(run_of_pair) for run_of_pair in (run, partner) if crowding(run_of_pair)), None)
    speed = crowded or unequal or threads or too_late
    return {"losses": other_masks(run, partner), "speed": speed, "memory": unequal, "states": confounded}


def _hours_apart(run: Mapping[str, Any], partner: Mapping[str, Any]) -> str | None:
    """Say how long after one another two runs began, where that is too long for the box to be taken as the same."""
    began = [run.get("started_at"), partner.get("started_at")]
    if any(pd.isna(moment) for moment in began):
        return None
    hours = abs((pd.Timestamp(began[0]) - pd.Timestamp(began[1])).total_seconds()) / 3600
    return f"begun {hours:.0f} hours apart" if hours > SAME_SESSION_HOURS else None


def crowding(run: Mapping[str, Any]) -> str | None:
    """Say why a run's times say nothing of its strategy; None where they do."""
    if not run["oversubscribed"]:
        return None
    shared = "one device" if run["share_device"] else "too few cores" if run["device"] == "cpu" else "fewer GPUs"
    return f"{run['world_size']} processes on {shared}"


def pair(table: pd.DataFrame, control: str = "ddp") -> Pairs:
    """Pair each run with the control's of equal cell and seed: of as many processes, or else of the fewest.

    The nth repeat is paired with the control's nth, or else with its first. So one process under `single` has a partner
    too. Columns of `compared`: run, control_run, and what `limits` says.
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
                f"a further repeat of {control}: for the margin" if further else _reason(run, cells, control)
            )
    columns_shown = ["run_id", "box", "workload", "size", "strategy", "world_size", "seed", "status", "message"]
    refused = table.loc[[label for label in table.index if label in reasons], columns_shown]
    return Pairs(compared, refused.assign(reason=[reasons[label] for label in refused.index]))


def scaling(table: pd.DataFrame) -> pd.DataFrame:
    """Strong scaling: the share of one process's throughput that is left to each of N, at a fixed global batch.

    `scaling_efficiency` is the median `tokens_per_second_per_gpu` over that of the base: `single` on one process, or
    else the strategy's own runs on the fewest; `base` says which. NaN where times cannot be compared; `why` says why.
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
    """For each run the control's run that is nearest to it, by their labels in the table."""
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
    """Equal for repeats of one run."""
    return tuple(run[name] for name in (*CELL, "strategy", "world_size", "micro_batch_size", "seed"))


def _reason(run: Mapping[str, Any], controls: Sequence[Mapping[str, Any]], control: str) -> str:
    """Why a run is in no pair: what differs from the control's run that is most like it."""
    if run["status"] != "ok":
        return f"{run['strategy']}: {run['status']}"
    if run["strategy"] == control:
        return f"no run of another strategy is like this one of {control}"
    if not controls:
        return f"no run of {control} is ok"
    nearest = max(controls, key=lambda partner: sum(run[name] == partner[name] for name in CELL))
    return comparable({**run, "seed": None}, nearest) or f"no run of {control} with seed {run['seed']}"


def _efficiency(runs: pd.DataFrame, base: pd.DataFrame) -> dict[str, Any]:
    rate, base_rate = (rows["tokens_per_second_per_gpu"].median() for rows in (runs, base))
    run, base_run = runs.iloc[0], base.iloc[0]
    reason = limits(run, base_run)["speed"]
    return {
        "scaling_efficiency": None if reason else rate / base_rate,
        "tokens_per_second_per_gpu": rate,
        "num_runs": len(runs),
        "base": f"{base_run['strategy']} on {processes(base_run['world_size'])}",
        "base_world_size": base_run["world_size"],
        "base_num_runs": len(base),
        "why": reason,
    }
