"""Write the tables of the guides and reports from the records, between two comments such as <!-- claims -->.

python tools/docs_tables.py
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from study import planner, terminal
from study.claims import defects, sentences
from study.compare import bits, frontier, memory_views, predicted, verdict_text
from study.conformance import committed
from study.conformance.cells import OPTIMIZERS, OPTIMIZERS_UNDER, PACKAGES, of_optimizers, of_release
from study.conformance.committed import FAULTS
from study.engines.keys import allowed
from study.engines.strategy_names import in_order
from study.planner import public_errors, published_rows
from study.planner.choose import StrategyPrediction
from study.records import find as records
from study.records import schema
from study.records.schema import Record
from study.report import plots, tables
from study.terminal import significant
from study.theory import intervals, measured_by_others, prediction
from study.theory import peaks as peaks_of
from study.theory.measured_by_others import MeasuredCase, MeasuredRow
from study.theory.model_states import paper_bytes_per_parameter
from study.theory.shapes.config_json import MODEL_TYPES
from study.upgrade import known_bad

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import doctor_observed  # noqa: E402
import first_hour  # noqa: E402
import first_screen  # noqa: E402
import pairs  # noqa: E402

CPU = ROOT / "reports" / "cpu" / "records"
TRACES = ROOT / "reports" / "dry_run" / "published.json"
NEARLY_EXACT = 0.01  # of a peak: more than this is counted too much in runs whose threads were not waited for
EXACT = 1e-5  # relative; nearer a state is not predicted: Adam's step counters are left out


def rows_of(page: str) -> list[list[str]]:
    """Return the rows of a Markdown table, its head first, without the line under the head."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if set("".join(row)) - set(":-")]


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def tabulate(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [head, ["---"] * len(head), *rows])


def benchmark(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "reports" / "cpu" / "benchmarks" / f"{name}.json").read_text())


@cache
def runs() -> list[Record]:
    """Return every committed run that ended well."""
    return [file.record for file in records.find([CPU]) if file.record.status == "ok"]


# ---------------------------------------------------------------- how far theory is off


@cache
def against_theory() -> memory_views.Errors:
    return memory_views.errors([CPU])


def close(errors: list[float]) -> int:
    return sum(abs(error) <= memory_views.TARGET_ERROR for error in errors)


def close_peaks(errors: list[memory_views.Error]) -> str:
    worst = max(errors, key=lambda error: abs(error.error))
    return f"{close([error.error for error in errors])} within 5 %; the worst {percent(worst.error)}, `{worst.run}`"


THEORY = CPU.parent / "theory.md"


@cache
def whole_theory() -> str:
    return memory_views.THEORY.page([CPU])


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


def throughput() -> str:
    """The trainer's samples per second, divided by those of another program at the same work."""
    rows = [[f"`{name}`", baseline, pairs.show(result["wall_ratio"]), pairs.show(result["step_ratio"])]
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


LEFT_BY_EVERY_RUN = {
    "config.json", "outcome.json", "record.json", "steps.jsonl", "stderr.log", "stdout.log", "warnings.log",
}  # fmt: skip


def planner_accuracy() -> str:
    """Compare the planner's formulas with the committed runs."""
    sent = [cell for run in runs() if run.world_size > 1 and (cell := predicted.messages(run))]
    inexact = [error for error in against_theory().states if abs(error.error) > EXACT]
    states = [f"{len(runs()) - len(inexact)} within 0.001 %", *(f"{percent(e.error, 2)} `{e.run}`" for e in inexact)]
    exactly_sent = [cell for cell in sent if cell.error <= EXACT]
    furthest = max(sent, key=lambda cell: cell.error)
    peaks = against_theory().peaks
    exact = [error for error in peaks if error.overcount <= NEARLY_EXACT]
    beyond = [error.beyond for error in peaks]
    inside = f"{close(beyond)} within 5 % of the range; the worst is {percent(max(beyond, key=abs))} outside"
    rows = [
        ["model states", f"the sizes of the engines' own tensors: all {len(runs())} runs", ", ".join(states)],
        ["bytes communicated per step", f"the recorded collectives: all {len(sent)} runs of several processes",
         f"{len(exactly_sent)} within 0.001 %; the worst {percent(furthest.error)} `{furthest.record.run_id}`"],
        ["peak of the tensors in a step", f"the measured peak: all {len(peaks)} runs that measured it",
         close_peaks(peaks)],
        ["the same peak", f"the {len(exact)} of these runs whose measurement is at most {percent(NEARLY_EXACT, 0)} too "
         "large", close_peaks(exact)],
        ["the same peak", f"all {len(peaks)} runs, with the range of values that the true peak may have", inside],
    ]  # fmt: skip
    return tabulate(["predicted quantity", "compared with", "result"], rows)


def off(errors: Iterable[float]) -> str:
    """Return the median, the 90th percentile and the worst of errors; the worst has its sign."""
    summary = published_rows.summarize((str(index), error) for index, error in enumerate(errors))
    return off_by(summary)


def off_by(summary: dict[str, Any]) -> str:
    """Return the same of errors that are summed up already."""
    return f"{percent(summary['median'])} / {percent(summary['percentile_90'])} / {100 * summary['worst']:+.0f} %"


MEASUREMENTS = {  # of published memory, as a reader names them
    "peak of tensors": "peak of tensors",
    published_rows.ACTIVATIONS: "of these: peaks in forward or backward, where activations count",
    "peak, instrument not named": "peak, tool not named",
    "peak reserved by the allocator": "peak reserved by PyTorch's allocator",
    "whole card": "memory used on the whole card",
    "tensors between steps": "tensors between two steps",
}


def memory_errors(by: str) -> dict[str, list[dict[str, Any]]]:
    """Return the errors of predicted memory by metric or by source: of the planner first, then of the estimators."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in published_rows.memory():
        if row["by"] == by:
            groups.setdefault(row["group"], []).append(row)
    return groups


def planner_memory() -> str:
    """Tabulate the errors of the planner's memory by what was measured, and of peaks of tensors by source."""
    rows = []
    for group, (errors, *_) in memory_errors("metric").items():
        name, _, grade = group.rpartition(", grade ")
        rows.append([MEASUREMENTS[name], grade, str(errors["count"]), off_by(errors)])
    for group, (errors, *_) in memory_errors("source").items():
        source, _, grade = group.rpartition(", ")
        rows.append([f"peak of tensors, from {source}", grade, str(errors["count"]), off_by(errors)])
    return tabulate(["what was measured", "grade", "values", "error: median / 90th percentile / worst"], rows)


OF_ADAPTERS = {  # quantities of published rows with adapters, as a reader names them
    "peak_allocated_bytes": "peak of tensors",
    "peak_reserved_bytes": "peak reserved by PyTorch's allocator",
    "used_bytes": "memory used on the whole card",
    "peak_unknown_bytes": "peak, tool not named",
    "allocated_bytes": "tensors between two steps",
    "seconds_per_step": "seconds per step",
    "tokens_per_second_per_gpu": "seconds per step, from tokens per second",
}


def adapters_table() -> str:
    """Tabulate the errors of memory and times of adapters by what was measured and by source.

    FSDP1 is separate, because the planner predicts FSDP2.
    """
    groups: dict[tuple[str, str], list[published_rows.AdapterError]] = {}
    for each in published_rows.adapter_errors():
        family = each.case.family.replace(" adapters", "")
        family += ", FSDP1 on 2 GPUs" if family.startswith("fms") and each.case.box.num_gpus > 1 else ""
        groups.setdefault((each.case.quantity, family), []).append(each)
    rows = []
    for quantity, words in OF_ADAPTERS.items():
        for (of_group, family), errors in groups.items():
            if of_group == quantity:
                printed = [each.printed_error for each in errors if each.printed_error is not None]
                cells = [off(each.error for each in errors), off(printed) if printed else ""]
                rows.append([words, family, str(len(errors)), *cells])
    column = "error of the prediction: median / 90th percentile / worst"
    return tabulate(["what was measured", "source", "values", column, "error of the value that `advise` prints"], rows)


def adapters_that_fit() -> str:
    """Tabulate how many published configurations with adapters trained, and how many are predicted to fit."""
    cases = [case for case in measured_by_others.adapter_cases() if case.quantity == "fits"]
    rows = []
    for trained, words in ((True, "trained"), (False, "ran out of memory")):
        of_kind = [case for case in cases if bool(case.published) == trained]
        fitting = sum(bool(prediction.predicted_memory(case)) for case in of_kind)
        rows.append([words, str(len(of_kind)), str(fitting), str(len(of_kind) - fitting)])
    return tabulate(["published", "configurations", "predicted to fit", "predicted not to fit"], rows)


PRINTED = {
    "peak_allocated_bytes": "peak of tensors",
    "peak_reserved_bytes": "reserved by PyTorch's allocator",
    "used_bytes": "whole card",
}


def printed_memory() -> str:
    """Compare the memory that `advise` prints with published memory, by what was measured and by source."""
    rows = []
    for quantity, words in PRINTED.items():
        by_source: dict[str, list[float]] = {}
        for case, error in published_rows.printed_memory():
            if case.quantity == quantity:
                by_source.setdefault(published_rows.source_of(case), []).append(error)
        every = [error for errors in by_source.values() for error in errors]
        rows.append([words, f"all {len(by_source)} sources", *_printed(every), of_sources(by_source)])
        rows += [[words, source, *_printed(errors), ""] for source, errors in sorted(by_source.items())]
    column = "error: median / 90th percentile / worst"
    return tabulate(["measured", "source", "values", column, "printed value is too low", OF_SOURCES], rows)


def _printed(errors: list[float]) -> list[str]:
    return [str(len(errors)), off(errors), str(sum(error < 0 for error in errors))]


OF_SOURCES = "median of the sources' medians"


def of_sources(by_source: dict[str, list[float]]) -> str:
    """Return the median of the median errors of the sources, so that all of them have the same weight."""
    return percent(float(np.median([np.median(np.abs(errors)) for errors in by_source.values()])))


def estimators() -> str:
    """Compare peaks of tensors with the planner and with two estimators of model states."""
    groups = {name: each for name, each in memory_errors("metric").items() if name.startswith("peak of tensors, ")}
    groups |= memory_errors("source")
    rows = [
        [f"{'all sources, ' * name.startswith('peak of')}{name.removeprefix('peak of tensors, ')}",
         str(each[0]["count"]), *map(off_by, each)]
        for name, each in groups.items()
    ]  # fmt: skip
    return tabulate(["source and grade", "values", *published_rows.ESTIMATORS], rows)


def planner_fits() -> str:
    """Compare which published configurations are predicted to fit with what trained, and list the wrong predictions."""
    foundry = [bool(prediction.fits(peaks_of.peak(row.shape, row.engine, row.job), row.box))
               for row in measured_by_others.throughput_rows()]  # fmt: skip
    verdicts = published_rows.fits_verdicts()
    rows = [["LLM Foundry, trained", str(len(foundry)), str(sum(foundry)), str(foundry.count(False))]]
    wrong: list[str] = []
    for label, trained in (("other sources, trained", True), ("other sources, out of memory", False)):
        mine = [verdict for verdict in verdicts if verdict.trained == trained]
        wrong += [
            f"- {verdict.case.family}: {verdict.case.name}: {'trained' if trained else 'ran out of memory'}"
            for verdict in mine
            if verdict.predicted != trained
        ]
        yes = sum(verdict.predicted for verdict in mine)
        rows.append([label, str(len(mine)), str(yes), str(len(mine) - yes)])
    table = tabulate(["configurations", "number", "predicted to fit", "predicted not to fit"], rows)
    return "\n\n".join([table, "The wrong predictions are:", "\n".join(wrong)])


WITH_EXPANDABLE_SEGMENTS = ("torchao",)  # families of traced rows: torchtitan sets this option of the allocator


class Traced(NamedTuple):
    """A published amount of GPU memory, with what a dry run and the planner give for it, in bytes."""

    case: MeasuredCase
    traced: float
    predicted: float


@cache
def traced_memory() -> list[Traced]:
    """Return the published amounts of memory that a dry run traced. For a whole card, what is outside is added."""
    loss = ", eager loss"  # which names did not state when the traces were recorded
    cases = {
        (case.family, case.name.replace(loss, ""), case.published): case for case in measured_by_others.cases("memory")
    }
    found = []
    for family, name, _, quantity, published, _, peak, reserved in json.loads(TRACES.read_text())["rows"]:
        if quantity == "fits":
            continue
        case = cases[family, name.replace(loss, ""), published]
        outside = prediction.outside_bytes(case.box) if quantity == "used_bytes" else 0
        allocator = "expandable_segments" if family in WITH_EXPANDABLE_SEGMENTS else "default"
        traced = peak if quantity == "peak_allocated_bytes" else reserved[allocator] + outside
        found.append(Traced(case, traced, published_rows.without_its_source(case)))
    return found


def traced() -> str:
    """Tabulate published memory, what a dry run traced, and what the planner predicts, in GB."""
    rows = [
        [PRINTED[each.case.quantity], each.case.name,
         *(f"{num_bytes / 1e9:.1f}" for num_bytes in (each.case.published, each.traced, each.predicted))]
        for each in traced_memory()
    ]  # fmt: skip
    return tabulate(["what was published", "configuration", "published", "traced", "predicted by the planner"], rows)


class Unseen(NamedTuple):
    """A published step time of grade A or B, predicted by constants that were fitted without its source."""

    strategy: str
    source: str
    grade: str
    is_described: bool
    error: float


def unseen_times() -> list[Unseen]:
    """List the published step times with the errors of predictions that were made without their source."""
    cases = {(case.name, case.family): case for case in measured_by_others.cases("times")}
    rows_of_foundry = {row.title: row for row in measured_by_others.throughput_rows()}
    found = []
    for row in published_rows.load().content["unseen"]:
        if row["grade"] == "C":
            continue
        case: MeasuredCase | MeasuredRow
        if row["family"] == published_rows.FOUNDRY:
            case, source = rows_of_foundry[row["name"]], published_rows.FOUNDRY
        else:
            case = cases[row["name"], row["family"]]
            source = case.measured_by
        strategy = intervals.name_of(case.shape, case.engine)
        if strategy in ("FSDP", "ZeRO-3"):
            strategy += ", one node" if case.box.num_nodes == 1 else ", several nodes"
        found.append(Unseen(strategy, source, row["grade"], not row["outside"], row["error"]))
    return found


def planner_times() -> str:
    """Tabulate the errors of predicted step times by strategy and by source, each predicted without its source."""
    times = unseen_times()
    groups = {name: [time for time in times if time.strategy == name] for name in sorted({t.strategy for t in times})}
    groups |= {f"all of grade {grade}": [time for time in times if time.grade == grade] for grade in "AB"}
    groups["all"] = times
    rows = []
    for name, members in groups.items():
        described = [time for time in members if time.is_described]
        by_source: dict[str, list[float]] = {}
        for time in described:
            by_source.setdefault(time.source, []).append(time.error)
        cells = [off(time.error for time in described), of_sources(by_source)] if described else ["", ""]
        every = off(time.error for time in members)
        rows.append([name, str(len(members)), every, str(len(described)), str(len(by_source)), *cells])
    error = "error: median / 90th percentile / worst"
    head = ["strategy", "all published times", error, "times that the model describes", "sources", error, OF_SOURCES]
    sources = {time.source: [t for t in times if t.source == time.source] for time in times}
    of_source = [
        [name, ", ".join(sorted({time.strategy for time in members})), str(len(members)), off(t.error for t in members)]
        for name, members in sorted(sources.items())
    ]
    by_source_head = ["source", "strategies", "published times", error]
    return f"{tabulate(head, rows)}\n\nThe same times by source:\n\n{tabulate(by_source_head, of_source)}"


def planner_intervals() -> str:
    """Tabulate the intervals of step times, and how often they contain times that were not used for them."""
    names = {
        "fsdp": "FSDP",
        "zero3": "ZeRO-3",
        "resident": "one process, DDP, ZeRO-0 to ZeRO-2",
        "compiled": "the same with torch.compile",
        "offload": "offload",
    }
    machines = {
        "known": "like published ones",
        "new count": "another number of GPUs",
        "new generation": "another generation of GPUs",
    }
    rows = [
        [names[engine], machines[distance], f"{evidence.spread:g}", str(evidence.sources), str(evidence.cases),
         f"{evidence.held} of {evidence.tried}"]
        for (engine, distance), evidence in intervals.EVIDENCE.items()
    ]  # fmt: skip
    return tabulate(["strategy", "machine", "factor", "sources", "times", "inside"], rows)


def left_out() -> str:
    """List why the model of times does not describe some published times, and how far they are from a prediction."""
    reasons: dict[str, list[tuple[str, float]]] = {}
    for row in published_rows.load().content["unseen"]:
        if row["outside"]:
            reasons.setdefault(row["outside"], []).append((row["family"], row["error"]))
    rows = []
    for reason, entries in reasons.items():
        sources = ", ".join(dict.fromkeys(family for family, _ in entries))
        rows.append([LEFT_OUT[reason.partition(":")[0]], sources, str(len(entries)), off(e for _, e in entries)])
    return tabulate(["reason", "source", "times", "error: median / 90th percentile / worst"], rows)


LEFT_OUT = {  # why, by how published.yaml begins to say it
    "small steps": "small steps: the GPU waits for the CPU to launch kernels, which the model hardly counts",
    "the engine's timers": "the source printed DeepSpeed's own timers, which leave out loading data and more",
    "the source contradicts itself": "the source contradicts itself",
    "uneven lengths": "sequences of different lengths: every rank waits for the one with the longest batch, and only "
    "the mean length is published",
}


def published_program() -> str:
    """Compare the losses of both sides: as published, repaired, and with each defect that alone changes them."""
    results = defects.read(ROOT / "reports" / "cpu" / "published" / "protocol.json")
    programs = {"as published": defects.AS_PUBLISHED, "all defects repaired": defects.MENDED}
    programs |= {f"all repaired except `{name}`": comparison for name, comparison in defects.LEFT_ALONE.items()}
    rows = []
    for name, comparison in programs.items():
        effects = [defects.effect(results, comparison, metric) for metric in defects.LOSSES]
        if name in list(programs)[:2] or {effect.word for effect in effects if effect} != {"no difference"}:
            rows.append([name, *map(in_words, effects)])
    settings, machine = results["settings"], results["machine"]
    tokens = f"{settings['num_train_examples']} reviews of {settings['sequence_length']} tokens"
    epochs = f"{settings['epochs']} epoch{'s' * (settings['epochs'] > 1)}"
    setting = f"BERT {settings['size']}, {tokens}, {epochs}; {machine['cpu']}, one thread."
    head = "version of the program", *(f"{metric}, ZeRO compared with plain training" for metric in defects.LOSSES)
    return f"{tabulate(head, rows)}\n\n{setting}"


def in_words(effect: defects.Effect | None) -> str:
    if effect is None:
        return "has no value"
    has_interval = None not in (effect.low, effect.high) and effect.low != effect.high
    between = f" ({relative(effect.low)} to {relative(effect.high)})" if has_interval else ""
    word = effect.word.replace("not told apart", "inconclusive")
    return f"{relative(effect.mean)}{between}, {word}"


def relative(value: float) -> str:
    """Format a ratio in percent, or as a power of ten if it is very small."""
    digits = f"{significant(100 * value)} %" if abs(value) >= 1e-3 or value == 0 else significant(value)
    return f"+{digits}" if value > 0 else digits


# ---------------------------------------------------------------- the places


def models() -> str:
    """The classes of transformers for which the planner has formulas."""
    counted = [
        [f"`{name}`", ", ".join(f"`{class_name}`" for class_name in model_type.classes)]
        for name, model_type in MODEL_TYPES.items()
    ]
    return tabulate(["`model_type`", "classes in `architectures`"], counted)


def architectures() -> str:
    """The classes of the installed transformers that were counted in their default configuration, and the others."""
    content = json.loads((ROOT / "reports" / "architectures.json").read_text(encoding="utf-8"))
    rows = []
    for kind in dict.fromkeys(row["kind"] for row in content["models"]):
        members = [row for row in content["models"] if row["kind"] == kind]
        refused = [row for row in members if "refused" in row]
        not_built = [row["class"] for row in refused if "transformers cannot" in row["refused"]]
        not_traced = [row["class"] for row in refused if row["class"] not in not_built]
        names = (", ".join(f"`{name}`" for name in group) or "none" for group in (not_built, not_traced))
        rows.append((kind, f"{len(members) - len(refused)} of {len(members)}", *names))
    return tabulate(("classes for", "counted", "transformers cannot build", "cannot be traced"), rows)


def rooms() -> str:
    """Return the table of folders and top-level modules from docs/rooms.yaml."""
    rooms = yaml.safe_load((ROOT / "docs" / "rooms.yaml").read_text(encoding="utf-8"))
    rows = [(f"`{name}`", room["purpose"], ", ".join(room["may_import"])) for name, room in rooms.items()]
    return tabulate(("folder or module", "purpose", "may import"), rows)


def decided(kind: str) -> str:
    """One row for each verdict and its reason, with all that have it."""
    groups: dict[allowed.Allowed, list[str]] = {}
    for name, rule in allowed.rules(kind).items():
        groups.setdefault(rule, []).append(f"`{'--' * (kind == 'flags')}{name}`")
    rows = [
        [("refused", "accepted")[rule.is_accepted], ", ".join(names), rule.reason] for rule, names in groups.items()
    ]
    explanation = "accepted: where the record shows its effect; refused: what it would do, and what to do instead"
    return tabulate(["verdict", kind, explanation], sorted(rows, key=lambda r: r[0]))


FRONTIER = CPU / "frontier"
FIRST_SCREEN = "number in README", "what it is", "source", "measured on", "seeds, repeats"


def frozen(caps: tuple[float, ...] = (3, 6)) -> dict[tuple[float, str], str]:
    """Return the corrected predictions in the protocol of `frontier`, by memory limit and strategy."""
    _, _, text = (ROOT / "study" / "studies" / "frontier.yaml").read_text(encoding="utf-8").partition("# Correction")
    sizes = re.findall(r"([a-z]\w+) (none|\d+m) (\d+m)", " ".join(re.split(r"\s+#?\s*", text)))
    return {(cap, name): size for name, *predicted in sizes for cap, size in zip(caps, predicted, strict=True)}


def fits() -> str:
    """List the largest model that each strategy trained under each limit, and the size that was predicted before."""
    predicted, trained = frozen(), {(row.cap_gib, row.strategy): row.trained for row in frontier.largest([FRONTIER])}
    caps = sorted({cap for cap, _ in trained})
    names = list(dict.fromkeys(name for _, name in trained))
    head = ["strategy", *(text for cap in caps for text in (f"{cap:g} GiB: largest that trained", "predicted"))]
    rows = [[name, *(cell for cap in caps for cell in (trained[cap, name], predicted[cap, name]))] for name in names]
    return tabulate(head, [[cell or "none" for cell in row] for row in rows])


def speeds() -> str:
    """List the largest batch of each strategy under 3 GiB, its time at DDP's batch, and its throughput at its own."""
    largest = {row.strategy: row.trained for row in frontier.largest([CPU / "equal-memory-batches"])}
    timed = {row.strategy: row.cells() for row in frontier.speeds([CPU / "equal-memory"])}
    columns = "time per step at DDP's batch, compared with DDP", "throughput at its largest batch, compared with DDP"
    head = ["strategy", "largest batch", *columns]
    names = in_order({*largest, *timed})
    cells_of = {name: [largest.get(name), *(timed.get(name, [""] * 6)[at] for at in (2, 5))] for name in names}
    return tabulate(head, [[name, *(cell or "" for cell in cells)] for name, cells in cells_of.items()])


def learned(study: str) -> str:
    """List the strategies and planted faults of a study of losses: how far they end from DDP, and the test's p."""
    table = verdict_text.table_of_arms(first_screen.learned(study))
    head = "| trained with | seeds | mean difference | 90 % interval | largest difference | p | "
    rows = [" | ".join(line.split(" | ")[at] for at in (0, 1, 2, 3, 4, 6)) + " |" for line in table[1:]]
    return "\n".join([head.strip(), *rows]).replace(", wrong on purpose", " (planted fault)")


WITH_MARGINS = {
    "learned": "BERT of two layers, fp32",
    "learned-gpt": "GPT of two layers, fp32",
    "learned-bf16": "the same GPT, bf16 under autocast",
}


def margins() -> str:
    """Say what the studies found whose margins were fixed in advance."""
    rows = []
    for name, model in WITH_MARGINS.items():
        study, _, verdict, _ = first_screen.learned(name)
        arms = [arm for arm in verdict.arms if not arm.is_broken]
        alike = [arm for arm in arms if arm.is_within and not arm.is_further]
        *others, last = (SIZE_STRATEGIES[arm.name] for arm in alike)
        names = f"{', '.join(others)} and {last}"
        faults = [arm.is_further for arm in verdict.arms if arm.is_broken]
        result = "**No difference detected.**" if alike == arms else "**A difference was detected.**"
        if verdict.lacks:
            result = f"**No verdict**, because {'; '.join(verdict.lacks)}."
        cells = [
            f"[`{name}`](../study/studies/{name}.yaml)",
            f"{model}, {max(len(arm.differences) for arm in arms)} seeds, {study.protocol.step} steps",
            f"{result} The test detected {sum(faults)} of {len(faults)} planted faults, and no difference for {names}. "
            f"Their mean losses are within {terminal.percent(study.protocol.margin)} of DDP's.",
        ]
        rows.append(cells)
    return tabulate(["study", "model", "result"], rows)


def series() -> str:
    """List the same ratios over several series of runs, with the interval for one more series."""

    def with_interval(ratios: tuple[float, ...]) -> str:
        if len(ratios) < 2:
            return ", ".join(f"{ratio:.2f}" for ratio in ratios)
        middle, low, high = frontier.over_series(ratios)
        return f"{middle:.2f} ({low:.2f} to {high:.2f}; {len(ratios)})"

    rows = frontier.speeds([CPU / "equal-memory-again"])
    table_rows = [
        [row.strategy, with_interval(row.equal_ratios), str(row.batch or ""), with_interval(row.own_ratios)]
        for row in rows
    ]
    of_what = "(95 % prediction interval; number of series)"
    step, throughput = (f"{name} compared with DDP {of_what}" for name in ("time per step", "throughput"))
    return tabulate(["strategy", step, "largest batch", throughput], table_rows)


@cache
def _peak_runs() -> pd.DataFrame:
    runs = plots.filter_runs(tables.runs(CPU / "peaks-real"), status="ok", seed=0)
    runs["precision"] = runs["precision"].str.removesuffix("-autocast")  # all that DDP has in 16 bits
    return runs


def peak_runs() -> pd.DataFrame:
    """Return the runs of `peaks-real`, in a copy that the caller may change."""
    return _peak_runs().copy()


SHOWN = ["ddp", "zero1", "zero2", "zero2_tuned", "zero3", "zero3_tuned", "fsdp2"]


def overview() -> str:
    """Give memory, time and largest model of each strategy together, for a GPT of 124M parameters in fp32."""
    runs = plots.filter_runs(peak_runs(), size="124m", precision="fp32", processes=2).set_index("strategy")
    times = {
        row.strategy: "{:.2f}x ({:.2f} to {:.2f})".format(*frontier.over_series(row.equal_ratios))
        for row in frontier.speeds([CPU / "equal-memory-again"])
        if len(row.equal_ratios) > 1
    }
    trained = {row.strategy: row.trained for row in frontier.largest([FRONTIER]) if row.cap_gib == 3}

    def compared_with_ddp(strategy: str, column: str) -> str:
        return f"{runs[column][strategy]:.2f} GiB ({runs[column][strategy] / runs[column]['ddp']:.2f}x)"

    rows = [
        [f"`{name}`", compared_with_ddp(name, "peak_gib"), compared_with_ddp(name, "peak_process_gib"),
         times.get(name, "1.00x"), f"{str(trained[name]).removesuffix('m')} million"]
        for name in SHOWN
    ]  # fmt: skip
    head = [
        "strategy",
        "peak memory of the tensors, 4 sequences per step",
        "peak memory of the whole process, 4 sequences per step",
        "time per step compared with DDP (95 % interval), 8 sequences per step",
        "parameters of the largest model with 3 GiB per process, 2 sequences per step",
    ]
    return tabulate(head, rows)


def batches() -> str:
    """Give the largest batch of each strategy under 3 GiB, and its throughput with this batch, compared with DDP."""
    largest = {row.strategy: row.trained for row in frontier.largest([CPU / "equal-memory-batches"])}
    rows = {row.strategy: row for row in frontier.speeds([CPU / "equal-memory-again"])}
    cells = [["`ddp`", largest["ddp"], "1.00x"]]
    for name in SHOWN[1:]:
        if ratios := rows[name].own_ratios:
            num_series = len(rows[name].equal_ratios)
            failed = num_series - len(ratios)
            batch = f"{rows[name].batch}" + f" (out of memory in {failed} of {num_series} series)" * bool(failed)
            cells.append([f"`{name}`", batch, "{:.2f}x ({:.2f} to {:.2f})".format(*frontier.over_series(ratios))])
    head = "strategy", "largest batch, in sequences per step", "throughput compared with DDP (95 % interval)"
    return tabulate(head, cells)


BY_SIZE = {
    "GPT 11M, fp32": ("11m", "fp32"), "GPT 62M, fp32": ("62m", "fp32"), "GPT 124M, fp32": ("124m", "fp32"),
    "GPT 254M, fp32": ("254m", "fp32"), "BERT-large 335M, fp32": ("large", "fp32"),
    "GPT 124M, bf16": ("124m", "bf16"), "BERT-large 335M, bf16": ("large", "bf16"),
}  # fmt: skip


def by_size() -> str:
    """Compare the peak of tensors with DDP's by model and precision, on two processes."""
    runs = peak_runs()
    columns = [
        plots.filter_runs(runs, size=size, precision=precision, processes=2).set_index("strategy")["peak_gib"]
        for size, precision in BY_SIZE.values()
    ]
    rows = [[f"`{name}`", *(f"{column[name] / column['ddp']:.2f}x" for column in columns)] for name in SHOWN[1:]]
    return tabulate(["strategy", *BY_SIZE], rows)


@cache
def adapter_runs() -> pd.DataFrame:
    """Return the runs of `lora`. The column `kind` has what they train: whole, lora, in_4_bits, or bf16 (LoRA)."""
    runs = plots.filter_runs(tables.runs(CPU / "lora"), status="ok")
    return runs.assign(kind=[name.rpartition("-")[2] for name in runs["run"]])


def adapters() -> str:
    """Compare training of all weights and of a LoRA adapter: peak memory, and bytes sent per step, by model."""
    runs = plots.filter_runs(adapter_runs(), precision="fp32")
    kinds = {"whole": "all weights", "lora": "LoRA", "in_4_bits": "LoRA, weights in 4 bits"}
    rows = []
    for size, model in (("124m", "GPT 124M"), ("large", "BERT-large")):
        of_model = plots.filter_runs(runs, size=size)
        control = of_model[of_model["strategy"] == "ddp"].set_index("kind")["peak_gib"]
        for kind, words in kinds.items():
            for row in of_model[of_model["kind"] == kind].itertuples():
                peak = f"{row.peak_gib:.2f} GiB ({row.peak_gib / control[kind]:.2f}x)"
                sent = 1024 * row.sent_gib_per_step
                rows.append([f"{model}: {words}", f"`{row.strategy}`", peak, f"{sent:,.1f} MiB"])
    head = ["model: what is trained", "strategy", "peak memory of the tensors (compared with DDP)", "sent per step"]
    return tabulate(head, rows)


def real_peaks() -> str:
    """List the peaks of tensors in GiB, and the predicted ones in parentheses, by model, precision and processes."""
    runs = peak_runs()
    runs["cell"] = [f"{row.peak_gib:.2f} ({row.theory_peak_gib:.2f})" for row in runs.itertuples()]
    blocks = []
    for sizes in ({"124m": "GPT-124M"}, {"large": "BERT-large", "base": "BERT-base"}):
        selected = runs[(runs["processes"] > 1) & runs["size"].isin(sizes)]
        pivoted = selected.pivot(index="strategy", columns=["size", "precision", "processes"], values="cell").fillna("")
        columns = sorted(
            pivoted.columns, key=lambda column: (list(sizes).index(column[0]), column[1] != "fp32", column[2])
        )
        head = [
            "strategy",
            *(f"{sizes[size]}, {precision}, {processes} processes" for size, precision, processes in columns),
        ]
        names = in_order(pivoted.index)
        blocks.append(tabulate(head, [[name, *(pivoted.loc[name, column] for column in columns)] for name in names]))
    return "\n\n".join(blocks)


def crossings() -> str:
    """Say from which model size on each strategy needs less memory than DDP: measured, and predicted."""
    rows = [[row.strategy, row.measured, row.by_theory] for row in tables.crossings(CPU / "peaks-real").itertuples()]
    return tabulate(["strategy", "less than DDP from this size on, measured", "predicted"], rows)


def states_by_strategy() -> str:
    """Bytes of model states per parameter that each of eight processes keeps, by the ZeRO paper; FSDP2 as it is."""
    stages = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}
    rows = [
        [name, *(_states_in_words(stage, precision) for precision in ("fp32", "bf16"))]
        for name, stage in stages.items()
    ]
    fsdp2 = _states_in_words(3, "fp32")  # its parameters stay in fp32 if it computes in bf16
    return tabulate(["strategy", "fp32", "bf16 with fp32 master weights"], [*rows, ["FSDP2", fsdp2, fsdp2]])


def _states_in_words(stage: int, precision: str) -> str:
    states = paper_bytes_per_parameter(stage, 8, precision)
    return f"{states.parameters:g} + {states.gradients:g} + {states.optimizer_states:g} = {states.total:g}"


def default_buffers() -> str:
    """Peaks of GPT-124M with DeepSpeed's default buffers and with smaller ones, compared with DDP."""
    buffers = {
        "ddp": "as large as all gradients (124 million elements)",
        "zero3": "DeepSpeed's default (500 million elements)",
        "zero3_tuned": "smaller (0.6 million elements)",
        "fsdp2": "as large as one block of the model",
    }
    peaks = first_screen.peaks()
    rows = [
        [f"`{name}`", size, f"{peaks[name]:.2f} GiB", f"{peaks[name] / peaks['ddp']:.2f}x"]
        for name, size in buffers.items()
    ]
    head = "strategy", "buffer for gradients", "peak memory of the tensors", "compared with DDP"
    return tabulate(head, rows)


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
        for version, matrix in committed.read(package).items():
            verdicts = Counter(matrix["cells"][name]["verdict"] for name in cell_names)
            bad = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in FAULTS if verdicts[verdict])
            is_new = known_bad.base_release(version) >= known_bad.base_release(lower_bound(package))
            findings.append((f"{bad or 'none'} of {len(cell_names)}", "yes" if is_new else "no", version))
        groups = [
            (finding, [version for *_, version in group]) for finding, group in groupby(findings, lambda row: row[:2])
        ]
        rows += [[f"`{package}`", between_ends(versions), *finding] for finding, versions in reversed(groups)]
    return tabulate(["package", "releases (how many)", "wrong or crashed cells", "supported"], rows)


def optimizers_by_release() -> str:
    """Count the wrong and crashed cells of each optimizer under ZeRO 0 to 3, by release of DeepSpeed."""
    rows = []
    for optimizer in OPTIMIZERS:
        findings = [
            ((_optimizer_result(matrix["cells"], optimizer),), version)
            for version, matrix in committed.read("deepspeed", committed.OPTIMIZERS).items()
        ]
        rows += [[f"`{optimizer}`", *row] for row in _by_release(findings)]
    return tabulate(["optimizer", "DeepSpeed", "cells at stages 0 to 3"], rows)


def _optimizer_result(
    cells: Mapping[str, Any], optimizer: str, engines: Sequence[str] = OPTIMIZERS_UNDER["deepspeed"]
) -> str:
    """Say how many of an optimizer's cells under some engines are wrong, and how."""
    names = [cell.name for cell in of_optimizers([optimizer], engines) if cell.name in cells]
    if not names:
        return "not tested" if of_optimizers([optimizer], engines) else ""
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
    return f"of {len(names)}: {', '.join(words)}" if words else f"all {len(names)} right"


def installed_optimizers() -> str:
    """Count the verdicts of each optimizer's cells with the newest installation, by group of engines."""
    cells = committed.newest(committed.OPTIMIZERS)["cells"]
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


MUON_CASES = {
    "stage 0": "zero0/fp32/2-ranks/accumulation-1/muon",
    "stage 2": "zero2/fp32/2-ranks/accumulation-1/muon",
    "stage 2, clipping not written": "zero2/fp32/2-ranks/accumulation-1/clipping_absent/muon",
    "stage 3, 4 micro batches": "zero3/fp32/2-ranks/accumulation-4/muon",
    "stage 3, clipping not written": "zero3/fp32/2-ranks/accumulation-1/clipping_absent/muon",
    "stage 3, zero.Init": "zero3/fp32/2-ranks/accumulation-1/zero_init/muon",
}


def muon_by_release() -> str:
    """Say how far Muon moved the weights, relative to the reference, by release of DeepSpeed."""
    findings = []
    for version, matrix in committed.read("deepspeed", committed.OPTIMIZERS).items():
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
    return [[between_ends(versions), *row] for row, versions in reversed(groups)]


def between_ends(versions: list[str]) -> str:
    """Name neighboring releases by the first and the last."""
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]} ({len(versions)})"


def exact() -> str:
    """Numbers of trainings in exact arithmetic that equal the reference or were refused, and the planted faults."""
    report = json.loads((ROOT / "reports" / "exact.json").read_text())
    trained = [cell for cell in report["cells"] if not cell["outcome"].startswith("refused")]
    matching = [cell for cell in trained if cell["outcome"] == "same bits"]
    faults = {fault["fault"] for fault in report["faults"]}
    engines = in_order(fault["strategy"] for fault in report["faults"])
    num_seen = sum(fault["seen"] for fault in report["faults"])
    rows = [
        ["trainings that are bitwise identical to the reference", f"{len(matching)} of {len(trained)}"],
        ["strategies that were trained", ", ".join(in_order({cell["strategy"] for cell in trained}))],
        ["strategies that cannot be trained on a CPU", ", ".join(_never_trained(report["cells"]))],
        [
            f"detected cases of {len(faults)} planted faults, each under {', '.join(engines)}",
            f"{num_seen} of {len(report['faults'])}",
        ],
    ]
    return tabulate(["test", "result"], rows)


def _never_trained(cells: list[dict[str, Any]]) -> list[str]:
    trained = {cell["strategy"] for cell in cells if not cell["outcome"].startswith("refused")}
    return in_order({cell["strategy"] for cell in cells} - trained)


def roundings() -> str:
    """List the causes of differences: what removes each, and how far pairs with only this cause end apart."""
    files = [file for file in records.find([CPU / "bits"]) if file.record.status == "ok" and file.record.digests]
    rows, single = [], bits.single_roundings(files)
    met = {name for file in files for name in bits.roundings(file.record)}
    for name in (cause for cause in bits.ROUNDINGS if cause in met):
        pin, effect = f"`{bits.PIN_OF[name]}`" if name in bits.PIN_OF else "nothing", single.get(name)
        pairs = "no such pair" if effect is None else f"{effect.num_pairs - effect.num_same} of {effect.num_pairs}"
        largest = "" if effect is None or effect.largest is None else terminal.scientific(effect.largest)
        rows.append([f"**{name}**", bits.ROUNDINGS[name], pin, pairs, largest])
    head = ["cause", "explanation", "removed by", "pairs of runs with only this cause: how many differ",
            "largest relative difference of their held-out losses"]  # fmt: skip
    return tabulate(head, rows)


def plain(cell: bits.Cell | None) -> str:
    """Say what a cell of the view `bits` says, in the words of the guides."""
    if cell is None or cell.step is not None:
        return bits.shown(cell)
    return "(reference)" if cell.is_reference else "identical"


# Model, and the head of the setting's column in the view `bits`; then what the guide calls the setting.
WEIGHTS = {
    ("gpt-wikitext", "2 processes"): "GPT",
    ("gpt-wikitext", "2 processes, fixed order"): "GPT, fixed order",
    ("gpt-wikitext", "2 processes, clipped at 1"): "GPT, gradient clipping",
    ("gpt-wikitext", "2 processes, clipped at 1, fixed order"): "GPT, gradient clipping, fixed order",
    ("gpt-wikitext", "2 processes, 3 micro batches"): "GPT, three micro batches",
    ("gpt-wikitext", "2 processes, 3 micro batches, fixed order"): "GPT, three micro batches, fixed order",
    ("gpt-wikitext", "3 processes"): "GPT, three processes",
    ("gpt-wikitext", "3 processes, fixed order"): "GPT, three processes, fixed order",
    ("gpt-wikitext", "4 processes"): "GPT, four processes",
    ("gpt-wikitext", "4 processes, fixed order"): "GPT, four processes, fixed order",
    ("gpt-wikitext", "4 processes, fixed: collectives"): "GPT, four processes, fixed order of the collectives only",
    ("bert-imdb", "2 processes"): "BERT",
    ("bert-imdb", "2 processes, fixed order"): "BERT, fixed order",
    ("bert-imdb", "2 processes, clipped at 1"): "BERT, gradient clipping",
    ("bert-imdb", "2 processes, clipped at 1, fixed order"): "BERT, gradient clipping, fixed order",
    ("bert-imdb", "2 processes, 3 micro batches"): "BERT, three micro batches",
    ("bert-imdb", "2 processes, 3 micro batches, fixed order"): "BERT, three micro batches, fixed order",
    ("bert-imdb", "3 processes"): "BERT, three processes",
    ("bert-imdb", "3 processes, fixed order"): "BERT, three processes, fixed order",
    ("bert-imdb", "4 processes"): "BERT, four processes",
    ("bert-imdb", "4 processes, fixed order"): "BERT, four processes, fixed order",
}


def weights() -> str:
    """Say for each setting in fp32 which strategies train the weights of DDP, and why the others do not."""
    columns = {
        (heading.split()[0], head): column
        for heading, column_groups in bits.settings([CPU / "bits"]).items()
        if ", fp32, " in heading
        for group in column_groups
        for head, column in zip(bits.heads(group), group, strict=True)
    }
    rows = []
    for setting, name in WEIGHTS.items():
        cells = {strategy: row[0] for strategy, row in bits.grid([columns[setting]]).items()}
        rows.append([name, *(same_weights(cells.get(strategy)) for strategy in ("zero1", "zero2", "zero3", "fsdp2"))])
    return tabulate(["setting", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2"], rows)


def same_weights(cell: bits.Cell | None) -> str:
    """Say whether weights are those of DDP, or name the causes of the difference."""
    if cell is None:
        return "not run"
    return "identical" if cell.step is None else f"differs: {', '.join(cell.roundings)}"


def learned_bits() -> str:
    """Compare the long trainings of the study `bits-learned` with DDP's."""
    cells_by_setting: dict[str, dict[str, str]] = {}
    for heading, column_groups in bits.settings([CPU / "bits-learned"]).items():
        workload, precision, steps, seed = heading.split(", ")[:4]
        for columns in column_groups:
            for head, column in zip(bits.heads(columns), columns, strict=True):
                pins = "fixed order" if "fixed order" in head else "unmodified"
                cells_by_setting[f"{workload.split('-')[0].upper()}, {steps}, {seed}, {precision}, {pins}"] = {
                    name: plain(cells[0]) for name, cells in bits.grid([column]).items()
                }
    names = in_order({name for cells in cells_by_setting.values() for name in cells})
    rows = [[name, *(cells.get(name, "") for cells in cells_by_setting.values())] for name in names]
    return tabulate(["strategy", *cells_by_setting], rows)


MEASURED_STRATEGIES = {
    "ddp": "DDP",
    "zero2": "ZeRO-2, default buffers",
    "zero2_tuned": "ZeRO-2, smaller buffers",
    "zero3": "ZeRO-3, default buffers",
    "zero3_tuned": "ZeRO-3, smaller buffers",
    "fsdp2": "FSDP2",
}


def measured() -> str:
    """Compare the strategies of README's picture with DDP: memory, time, largest model and throughput."""
    peaks, times, rates = first_screen.peaks(), first_screen.times(), first_screen.throughputs()
    largest = first_screen.largest_models()
    rows = []
    for name, label in MEASURED_STRATEGIES.items():
        rate = f"{rates[name]:.2f}x" if name in rates else "did not fit"
        rows.append(
            [label, f"{peaks[name] / peaks['ddp']:.2f}x", f"{times[name]:.2f}x", f"{largest[name]} million", rate]
        )
    head = [
        "strategy",
        "memory of tensors",
        "time per step",
        "largest model in 3 GiB",
        "throughput, largest batch in 3 GiB",
    ]
    return tabulate(head, rows)


# The models of README's table of predictions, each with its number of H100 GPUs.
SIZES = {"gpt2-xl": 8, "llama-3.1-8b": 8, "llama-3.1-70b": 64}
SIZE_NAMES = {"gpt2-xl": "GPT-2 XL (1.5B)", "llama-3.1-8b": "Llama 3.1 8B", "llama-3.1-70b": "Llama 3.1 70B"}
SIZE_STRATEGIES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
ANSWERED_SIZES = ("gpt2-xl", "llama-3.1-8b")  # what the sentence under the table is about
SIZE_SEQUENCES = 8  # per GPU, so that a step computes long enough for its time to be predicted with both ends


def sizes() -> str:
    """Predicted memory per GPU and time per step of models that people train, by strategy."""
    columns = {model: _predicted_options(model, num_gpus) for model, num_gpus in SIZES.items()}
    head = ["strategy", *(f"{SIZE_NAMES[model]}, {num_gpus} GPUs" for model, num_gpus in SIZES.items())]
    rows = [
        [label, *(_size_cell(options[name]) for options in columns.values())] for name, label in SIZE_STRATEGIES.items()
    ]
    return f"{tabulate(head, rows)}\n\n" + " ".join(_size_sentence(model, columns[model]) for model in ANSWERED_SIZES)


def _size_sentence(model: str, options: dict[str, StrategyPrediction]) -> str:
    """Say what ZeRO-3 saves compared with DDP, and what it costs compared with DDP or, if DDP does not fit, ZeRO-2."""
    memory = {name: f"{option.needed_bytes / 2**30:,.0f} GiB" for name, option in options.items()}
    baseline = "ddp" if options["ddp"].fits else "zero2"
    zero3, other = options["zero3"].prediction.step, options[baseline].prediction.step
    overlap = zero3.low <= other.high and other.low <= zero3.high
    time = "about as long as" if overlap else f"{zero3.total / other.total:.2f} times as long as"
    return (
        f"For {SIZE_NAMES[model]} on {SIZES[model]} GPUs, ZeRO-3 needs {memory['zero3']} per GPU and DDP needs "
        f"{memory['ddp']}. We predict that a step with ZeRO-3 takes {time} a step with {SIZE_STRATEGIES[baseline]}."
    )


def _predicted_options(model: str, num_gpus: int) -> dict[str, StrategyPrediction]:
    request = planner.Request(
        gpu="h100",
        num_gpus=num_gpus,
        micro_batch_size=SIZE_SEQUENCES,
        gradient_accumulation_steps=1,
        activation_checkpointing="full",
    )
    return {option.strategy.name: option for option in planner.advise(model, request).options}


def _size_cell(option: StrategyPrediction) -> str:
    memory = f"{option.needed_bytes / 2**30:,.0f} GiB"
    if not option.fits:
        return f"{memory}, does not fit"
    step = option.prediction.step
    interval = f"at least {step.low:.2f}" if option.is_short else f"{step.low:.2f} to {step.high:.2f}"
    return f"{memory}, {step.total:.2f} s ({interval})"


PUBLIC_QUANTITIES = {
    "seconds_per_step": "time",
    "tokens_per_second_per_gpu": "tokens per second",
    "peak_allocated_bytes": "peak of tensors",
    "peak_reserved_bytes": "peak reserved",
    "fits": "whether it fits",
}


def public_predictions() -> str:
    """Compare the predictions that were committed before the logs were read with the logs."""
    head = [
        "trainings",
        "what",
        "values",
        "error: median / 90th percentile / worst",
        "inside the interval",
        "expected",
        "met",
    ]
    rows = []
    for each in public_errors.summaries():
        error = "" if each.median is None else (
            f"{percent(each.median)} / {percent(each.ninetieth)} / {100 * each.worst:+.0f} %"
        )  # fmt: skip
        inside = f"{each.inside[0]} of {each.inside[1]}" if each.inside else ""
        if each.too_fast:
            inside = "; ".join(filter(None, [inside, f"no upper end: {each.too_fast[1]}"]))
        right = f"right: {each.right[0]} of {each.right[1]}" if each.right else ""
        met = "" if each.is_met is None else "yes" if each.is_met else "**no**"
        rows.append(
            [each.group, PUBLIC_QUANTITIES[each.quantity], each.num, error or right, inside, _expected(each), met]
        )
    return tabulate(head, rows)


def _expected(each: public_errors.Summary) -> str:
    limit = each.limit
    if limit is None:
        return ""
    parts = {
        "at least {:.0f} % inside": limit.inside and 100 * limit.inside,
        "median at most {:.0f} %": limit.median and 100 * limit.median,
        "all at most {:.0f} %": limit.most and 100 * limit.most,
        "80 % of them at most {:.0f} %": limit.fourth_fifth and 100 * limit.fourth_fifth,
        "measured at least {:g} times as long": limit.too_short,
    }
    said = [text.format(value) for text, value in parts.items() if value]
    return ", ".join([*said, *(["all right"] if limit.is_right else [])])


def public_overall() -> str:
    """Judge the expectations about all sources together."""
    inside: dict[str, list[bool]] = {}
    for row in public_errors.compared():
        if row.is_inside is not None:
            inside.setdefault(public_errors.SOURCES[row.family], []).append(row.is_inside)
    share = statistics.median(sum(answers) / len(answers) for answers in inside.values())
    too_fast = [row.is_too_fast for row in public_errors.compared() if row.is_too_fast is not None]
    met = [summary.is_met for summary in public_errors.summaries() if summary.is_met is not None]
    fits = [row for row in public_errors.compared() if row.quantity == "fits"]
    num_failed = sum(not row.measured for row in fits)
    return (
        f"{sum(met)} of the {len(met)} expectations in the table were met. Over the {len(inside)} sources with "
        f"intervals, the median of the shares of times inside is {100 * share:.0f} % (expected: at least 75 %). "
        f"{sum(too_fast)} of {len(too_fast)} steps whose interval has no upper end are faster than its lower end "
        f"(expected: at most 5 %). Of the {len(fits)} trainings of which we predicted whether they fit, {num_failed} "
        "ran out of memory."
    )


PLACES: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/planner-accuracy.md", "public"): public_predictions,
    ("reports/planner-accuracy.md", "public_overall"): public_overall,
    ("README.md", "public"): first_screen.public_sentences,
    ("README.md", "sizes"): sizes,
    ("README.md", "measured"): measured,
    ("docs/concepts.md", "states"): states_by_strategy,
    ("docs/concepts.md", "buffers"): default_buffers,
    ("reports/README.md", "numbers"): lambda: tabulate(FIRST_SCREEN, first_screen.table()),
    **{("docs/first-hour.md", name): make for name, make in first_hour.TABLES.items()},
    ("docs/memory-and-time.md", "overview"): overview,
    ("docs/memory-and-time.md", "adapters"): adapters,
    ("docs/memory-and-time.md", "by_size"): by_size,
    ("docs/memory-and-time.md", "batches"): batches,
    ("docs/losses.md", "weights"): weights,
    ("docs/losses.md", "margins"): margins,
    ("reports/losses.md", "roundings"): roundings,
    ("reports/losses.md", "exact"): exact,
    ("reports/losses.md", "learned_bits"): learned_bits,
    ("reports/frontier.md", "fits"): fits,
    ("reports/equal-memory.md", "speeds"): speeds,
    ("reports/equal-memory.md", "series"): series,
    ("reports/losses.md", "learned"): partial(learned, "learned"),
    ("reports/losses.md", "gpt"): partial(learned, "learned-gpt"),
    ("reports/losses.md", "bf16"): partial(learned, "learned-bf16"),
    ("reports/peaks.md", "peaks"): real_peaks,
    ("reports/peaks.md", "crossings"): crossings,
    ("reports/checkpoints.md", "resumed"): resumed,
    ("reports/checkpoints.md", "other_ranks"): other_ranks,
    ("reports/checkpoints.md", "saving"): saving,
    ("reports/throughput.md", "throughput"): throughput,
    ("reports/faults.md", "faults"): faults,
    ("reports/machines.md", "machines"): machines,
    ("reports/prove.md", "proofs"): proofs,
    ("reports/diff.md", "limits"): limits,
    ("reports/diff.md", "diff_times"): diff_times,
    ("reports/dry-run.md", "traced"): traced,
    ("reports/planner-accuracy.md", "accuracy"): planner_accuracy,
    ("reports/planner-accuracy.md", "intervals"): planner_intervals,
    ("reports/planner-accuracy.md", "memory"): planner_memory,
    ("reports/planner-accuracy.md", "printed"): printed_memory,
    ("reports/planner-accuracy.md", "estimators"): estimators,
    ("reports/planner-accuracy.md", "fits"): planner_fits,
    ("reports/planner-accuracy.md", "adapters"): adapters_table,
    ("reports/planner-accuracy.md", "fitting_adapters"): adapters_that_fit,
    ("reports/planner-accuracy.md", "times"): planner_times,
    ("reports/planner-accuracy.md", "excluded"): left_out,
    ("reports/planner-accuracy.md", "models"): models,
    ("reports/planner-accuracy.md", "architectures"): architectures,
    ("docs/claims.md", "claims"): lambda: "\n".join(sentences.tally(sentences.read())),
    ("reports/published-program.md", "protocol"): published_program,
    ("reports/doctor.md", "judged"): lambda: doctor_observed.tally(doctor_observed.judged()),
    ("reports/doctor.md", "files"): lambda: doctor_observed.table(doctor_observed.judged()),
    ("docs/architecture.md", "rooms"): rooms,
    ("reports/launcher.md", "flags"): lambda: decided("flags"),
    ("reports/launcher.md", "variables"): lambda: decided("variables"),
    ("reports/conformance/README.md", "supported"): supported,
    ("docs/releases.md", "installed_optimizers"): installed_optimizers,
    ("reports/conformance/README.md", "optimizers"): optimizers_by_release,
    ("reports/conformance/README.md", "muon"): muon_by_release,
}


def pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of a table between the two comments of this name, and of these comments."""
    return re.compile(rf"(<!-- {name}(?:: [^>]*)? -->\n)(.*?)(<!-- /{name} -->)", re.DOTALL)


def between(page: str, name: str) -> str:
    """Return the text between the two comments of this name in a page."""
    return pattern(name).search((ROOT / page).read_text(encoding="utf-8"))[2].strip("\n")


def main() -> None:
    """Write every table, and the page of theory's errors."""
    THEORY.write_text(f"{whole_theory()}\n", encoding="utf-8")
    for (page, name), make in PLACES.items():
        path, table = ROOT / page, make()
        text = path.read_text(encoding="utf-8")
        path.write_text(
            pattern(name).sub(lambda m, table=table: f"{m[1]}{table}\n{m[3]}", text),
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
