"""What the benchmarks in tools/measure measured: checkpoints, speed, faults, prove and diff."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from committed_runs import benchmark
from wording import number_of, span, tabulate

from study.records import schema
from zero_study.files import ROOT


def resumed() -> str:
    """Say how runs ended that were killed and resumed, by strategy."""
    cases = benchmark("resume")["cases"]
    rows = []
    for name in dict.fromkeys(case["strategy"] for case in cases):
        own_cases = [case for case in cases if case["strategy"] == name]
        if reason := own_cases[0]["skipped"]:
            rows.append([f"`{name}`", "", "", "", f"not run: {reason.partition(';')[0]}", ""])
            continue
        kills = [kill for case in own_cases for kill in case["kills"]]
        while_writing = sum(kill["left_an_unfinished_checkpoint"] for kill in kills)
        errors = dict.fromkeys((case["precision"] for case in own_cases), 0.0)
        for case in own_cases:
            error = abs(case["exported"]["loss"] - case["exported"]["own_loss"])
            errors[case["precision"]] = max(errors[case["precision"]], error)
        losses = ", ".join(f"{error:.0e} ({precision})" for precision, error in errors.items())
        identical = f"{sum(kill['identical'] for kill in kills)} of {len(kills)}"
        rows.append([f"`{name}`", " and ".join(errors), len(kills), while_writing, identical, losses])
    head = [
        "strategy", "precision", "kills", "kills while a checkpoint was written", "identical after resuming",
        "largest difference of the exported model's loss",
    ]  # fmt: skip
    return tabulate(head, rows)


def other_ranks() -> str:
    """Compare runs that resumed with other ranks or another strategy with runs that were never interrupted."""
    rows = []
    for case in benchmark("other_ranks")["cases"]:
        cells = ["refused", ""] if case["refused"] else [f"{case[name]:.1e}" for name in ("loss", "grad_norm")]
        sides = (f"`{name}` on {ranks}" for name, ranks in (case["from"], case["to"]))
        rows.append([*sides, *cells])
    return tabulate(["from", "to", "largest difference of the loss", "largest difference of the gradient norm"], rows)


def saving() -> str:
    """Give the size of a checkpoint and the median seconds to save, load and export it, by strategy."""
    names = "checkpoint_bytes", "save_seconds", "load_seconds_on_2", "load_seconds_on_1", "export_seconds"
    rows = []
    for strategy, tries in benchmark("saving")["strategies"].items():
        num_bytes, *seconds = ([attempt[name] for attempt in tries] for name in names)
        durations = ["refused" if None in attempt else f"{statistics.median(attempt):.1f}" for attempt in seconds]
        rows.append([f"`{strategy}`", f"{num_bytes[0] / 1e9:.2f}", *durations])
    head = [
        "strategy", "size (GB)", "save (s)", "load on two processes (s)", "load on one process (s)", "export (s)",
    ]  # fmt: skip
    return tabulate(head, rows)


def over_pairs(ratios: dict[str, float]) -> str:
    """Return the median of a ratio over pairs of runs, with the lowest and the highest."""
    return f"{ratios['median']:.3f} ({ratios['minimum']:.3f} to {ratios['maximum']:.3f}, n={ratios['count']})"


def throughput() -> str:
    """The trainer's samples per second, divided by those of another program at the same work."""
    rows = [[f"`{name}`", baseline, over_pairs(result["wall_ratio"]), over_pairs(result["step_ratio"])]
            for baseline, file in (("Trainer", "throughput"), ("DeepSpeed without accelerate", "throughput_deepspeed"))
            for name, result in benchmark(file)["strategies"].items()]  # fmt: skip
    return tabulate(["strategy", "compared with", "by wall clock", "by the median step"], rows)


def faults() -> str:
    """Outcomes of injected faults, with the names that statuses have today, and the files that were left."""
    rows = []
    for fault in benchmark("faults")["faults"]:
        names = [fault["fault"], f"`{fault['strategy']}`"]
        if fault["not_injected"]:
            rows.append([*names, f"not injected: {fault['not_injected']}", "", "", ""])
            continue
        record = f"`{_of_today(fault['record']['status'])}`" if fault["record"] else "none"
        leftovers = ", ".join(f"`{name}`" for name in fault["left"] if name not in LEFT_BY_EVERY_RUN) or "none"
        message = (fault["message"] or "").replace("|", " ")
        outcome = f"`{_of_today(fault['status'])}`: {message}" if fault["status"] else message
        rows.append([*names, outcome, f"{fault['seconds']:.1f}", record, leftovers])
    head = ["fault", "strategy", "outcome and message", "seconds until the run ended", "status in its record"]
    return tabulate([*head, "files left besides the usual ones"], rows)


def _of_today(status: str) -> str:
    """Return the name that a status has today; reading an older record does the same."""
    return schema.RENAMED.get(status, status)


def machines() -> str:
    """List what each machine printed after each fault between machines, and when its command ended."""
    rows = [
        [row["fault"], f"`{row['strategy']}`", row["machine"], row["said"] or "nothing: the machine was killed",
         "did not end" if row["seconds"] is None else f"{row['seconds']:.0f}"]
        for row in benchmark("machines")["rows"]
    ]  # fmt: skip
    return tabulate(["fault", "strategy", "machine", "last line that it printed", "ended after (s)"], rows)


def proofs() -> str:
    """List what prove reported about scripts of other projects, by strategy."""
    plain = [row for row in benchmark("prove_scripts")["rows"] if row["variant"] is None]
    cells = {(row["script"], row["strategy"]): proof_in_short(row) for row in plain}
    scripts, strategies = (list(dict.fromkeys(row[key] for row in plain)) for key in ("script", "strategy"))
    rows = [[f"`{script}.py`", *(cells.get((script, name), "") for name in strategies)] for script in scripts]
    return tabulate(["script", *(f"`{name}`" for name in strategies)], rows)


LEFT_BY_EVERY_RUN = {
    "config.json", "outcome.json", "record.json", "steps.jsonl", "stderr.log", "stdout.log", "warnings.log",
}  # fmt: skip


def proof_in_short(row: dict[str, Any]) -> str:
    """Return the engine that was built, the bytes of model states per parameter, and how the script ended."""
    built, step = row["built"], row["step"]
    if built is None:
        return f"**not examined**: exit status {row['status']}"
    name = f"stage {built['zero_stage']}" if built["engine"] == "DeepSpeed" else built["engine"]
    verdict = f"**{name}, not as requested**" if row["not_as_asked"] else name
    verdict = f"**WRONG**, {verdict}" if row.get("findings") else verdict
    bytes_text = f"; {sum(step['bytes_per_parameter'].values()):.3f} bytes" if step else "; no step examined"
    return f"{verdict}{bytes_text}" + ("" if row["status"] == 0 else f"; **exit status {row['status']}** later")


LIMITS = ROOT / "reports" / "diff" / "limits.json"


OF_A_GRADIENT = {
    "one element of it": "one element of a gradient",
    "one rank's shard of it": "one rank's shard of a gradient",
}


def limits() -> str:
    """List the smallest relative changes that `zero-study diff` detects."""
    smallest = json.loads(LIMITS.read_text())["smallest_seen"]
    rows = [[OF_A_GRADIENT.get(kind, kind), *(f"{sizes[name]:.0e}" for name in ("fp32", "bf16"))]
            for kind, sizes in smallest.items()]  # fmt: skip
    return tabulate(["a change of", "fp32", "bf16"], rows)


def diff_times() -> str:
    """List how much longer steps take that `zero-study diff` records."""
    times = json.loads(LIMITS.read_text())["times_of_a_step"]
    names = {"recorded": "recorded", "recorded_with_noise": "recorded with noise", "others": "after a recording"}
    return tabulate(["step", "time"], [[name, f"{times[key]}x"] for key, name in names.items()])


def largest_difference_on_other_ranks(value: str) -> str:
    """Return the largest difference between a run that resumed on other ranks and one that was never interrupted."""
    return f"{max(case[value] for case in benchmark('other_ranks')['cases'] if not case['refused']):.0e}"


def checkpoint_sizes() -> str:
    """Return the GB of a checkpoint of the GPT of 124 million parameters, over all strategies."""
    return span(tries[0]["checkpoint_bytes"] / 1e9 for tries in benchmark("saving")["strategies"].values())


def resumed_runs() -> str:
    """Count the runs that were killed and resumed, and those that are identical to a run without interruption."""
    kills = [kill["identical"] for case in benchmark("resume")["cases"] for kill in case["kills"]]
    return number_of(sum(kills), len(kills))


def throughputs() -> str:
    """Return the samples per second of this project's trainer, divided by those of other programs."""
    results = [benchmark(name)["strategies"].values() for name in ("throughput", "throughput_deepspeed")]
    return span((each["wall_ratio"]["median"] for group in results for each in group), 2)


def limit_of_diff(change: str) -> str:
    return f"{json.loads(LIMITS.read_text())['smallest_seen'][change]['fp32']:.0e}"


def time_of_diff(step: str) -> str:
    return f"{json.loads(LIMITS.read_text())['times_of_a_step'][step]:.1f}"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/machines.md", "resumed"): resumed,
    ("reports/machines.md", "other_ranks"): other_ranks,
    ("reports/machines.md", "saving"): saving,
    ("reports/memory-and-time.md", "throughput"): throughput,
    ("reports/machines.md", "faults"): faults,
    ("reports/machines.md", "machines"): machines,
    ("reports/prove.md", "proofs"): proofs,
    ("reports/diff.md", "limits"): limits,
    ("reports/diff.md", "diff_times"): diff_times,
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/CONTRIBUTING.md", "throughputs"): throughputs,
    ("docs/checkpoints.md", "pairs"): lambda: str(
        sum(not case["refused"] for case in benchmark("other_ranks")["cases"])
    ),
    ("docs/checkpoints.md", "loss"): partial(largest_difference_on_other_ranks, "loss"),
    ("docs/checkpoints.md", "grad_norm"): partial(largest_difference_on_other_ranks, "grad_norm"),
    ("docs/checkpoints.md", "sizes"): checkpoint_sizes,
    ("docs/checkpoints.md", "resumed"): resumed_runs,
    ("docs/diff.md", "output"): partial(limit_of_diff, "a module's output"),
    ("docs/diff.md", "gradient"): partial(limit_of_diff, "a parameter's gradient"),
    ("docs/diff.md", "recorded"): partial(time_of_diff, "recorded"),
    ("docs/diff.md", "with_noise"): partial(time_of_diff, "recorded_with_noise"),
    ("docs/machines.md", "faults"): lambda: str(len({row["fault"] for row in benchmark("machines")["rows"]})),
    ("docs/records.md", "faults"): lambda: str(len(benchmark("faults")["faults"])),
}
