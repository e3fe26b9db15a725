"""Plan a study's runs on this machine: which runs are finished, which cannot run and why, and how long the others take.

Only `checks.check` needs torch. If torch is not installed, the plan lists what it could not check.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from study.config import OF_THE_PROCESS, RunConfig
from study.records import find as records
from study.records import schema
from study.records.laboratory import LABORATORY
from study.records.schema import Outcome, OutcomeStatus, Record
from study.run import Run
from study.running import checks, studies
from study.running.estimate import Estimate, History, duration, model_state_bytes
from study.running.studies import Study
from zero_study import files, terminal
from zero_study.engines import this_machine
from zero_study.engines.extensions import is_built
from zero_study.engines.this_machine import Machine
from zero_study.errors import Refusal
from zero_study.strategy import shipped
from zero_study.theory import hardware

# The knobs, besides the batch, that decide whether a run fits into memory.
DECIDES_MEMORY = (
    "workload",
    "size",
    "sequence_length",
    "dropout",
    "precision",
    "accumulation_dtype",
    "attention",
    "activation_checkpointing",
    "compile",
    "share_device",
    "memory_cap",
)


@dataclass(frozen=True)
class Planned:
    """One run of a study, and whether it already has a result, is skipped or has to run."""

    run: Run
    kept: OutcomeStatus | None = None  # its earlier status, if that is a result
    skipped: str | None = None  # the reason

    @property
    def to_run(self) -> bool:
        return self.kept is None and self.skipped is None


@dataclass(frozen=True)
class Plan:
    """The runs of a study in the order in which they are to be run on this machine."""

    study: Study
    folder: Path
    box: Machine
    runs: list[Planned]
    history: History
    timeout_seconds: float
    checked: bool  # False: torch is not installed, so not everything was checked

    def estimate(self, planned: Planned) -> Estimate:
        """Estimate how long a run takes. The estimate is at most the run's time limit."""
        whole = self.history.estimate(planned.run)
        return whole._replace(seconds=min(whole.seconds, self.timeout_seconds))

    def in_words(self, planned: Planned) -> str:
        """Describe how long a run takes, and whether it would exceed its time limit."""
        whole = self.history.estimate(planned.run)
        limit = f". --timeout ends it after {duration(self.timeout_seconds)}"
        return f"{whole}{limit if whole.seconds > self.timeout_seconds else ''}"


# ---------------------------------------------------------------- making a plan


def select(
    study: Study,
    data_dir: Path | None,
    only: str,
    folder: Path | None = None,
    checkpoint_every: int | None = None,
    skip: str | None = None,
) -> list[Run]:
    """List a study's runs whose id contains `only` and does not contain `skip`.

    Raises Refusal if no run is left.
    """
    chosen = [run for run in studies.runs(study, data_dir, folder, checkpoint_every) if only in run.run_id]
    if not chosen:
        raise Refusal(
            f"--only {only}: no run of the study {study.name!r} has this text in its id. "
            "`zero-study plan` lists the ids."
        )
    remaining = [run for run in chosen if skip is None or skip not in run.run_id]
    if not remaining:
        raise Refusal(
            f"--skip {skip}: every selected run of the study {study.name!r} has this text in its id, so "
            "no run would be left. Use a longer text."
        )
    return remaining


def select_one(
    study: Study, data_dir: Path | None, run_id: str, folder: Path, checkpoint_every: int | None = None
) -> Run:
    """Find a run of a study by its complete id. Raises Refusal if there is none."""
    for run in studies.runs(study, data_dir, folder, checkpoint_every):
        if run.run_id == run_id:
            return run
    raise Refusal(f"The study {study.name!r} has no run {run_id}. `zero-study plan` lists its runs.")


def over_machines(runs: Iterable[Run], per_machine: int | None) -> list[Run]:
    """Distribute each run over machines with at most `per_machine` processes each.

    If `per_machine` is None, the runs stay as the study defines them. Raises Refusal if the processes of a run cannot
    be divided equally among machines.
    """
    if per_machine is None:
        return list(runs)
    spread: list[Run] = []
    for run in runs:
        num_machines, remainder = divmod(run.world_size, per_machine)
        if num_machines and remainder:
            raise Refusal(
                f"--per-machine {per_machine}: {run.run_id} has {run.world_size} processes, which cannot be divided "
                f"equally among machines. Use a divisor of {run.world_size}, or exclude the run with --skip."
            )
        spread.append(replace(run, num_machines=max(run.num_machines, num_machines)))
    return spread


def make_plan(
    study: Study, runs: Iterable[Run], folder: Path, timeout_seconds: float, retry: bool = True, forked: bool = False
) -> Plan:
    """Plan the runs for this machine from the content of their folders. Nothing is written.

    With `retry`, runs that failed earlier are run again. With `forked`, the runs are to be forked from one process.
    Runs that need an extension of DeepSpeed that is not built yet then come later, so that another process can build
    it meanwhile, and runs with timed steps come last, because a build would slow their steps down. Raises Refusal if a
    folder holds the record of a run with other flags.
    """
    machine = this_machine.find()
    planned: list[Planned] = []
    checked = True
    for run in runs:
        earlier_status = finished(run, timeout_seconds, retry)
        skipped = None
        if earlier_status is None:
            try:
                skipped = missing_resources(study, run, machine)
                if skipped is None:
                    checks.check(run)
                    skipped = _blind_torch(study)
            except Refusal as refusal:
                skipped = str(refusal)
            except ModuleNotFoundError as missing:
                if missing.name != "torch":
                    raise
                checked = False
        planned.append(Planned(run, earlier_status, skipped))
    ended = [(item.run, item.kept) for item in planned if item.kept]
    planned = [replace(item, skipped=implied_outcome(item.run, ended)) if item.to_run else item for item in planned]
    if forked:
        planned.sort(key=_waits_for)
    history = _history(folder, machine, forked)
    return Plan(study, folder, machine, planned, history, timeout_seconds, checked)


def _waits_for(planned: Planned) -> tuple[bool, bool]:
    """Return whether a run has timed steps, and whether it needs an extension of DeepSpeed that is not built yet."""
    run = planned.run
    needs_build = planned.to_run and not all(map(is_built, run.strategy.needed_extensions))
    return run.config.timing_warmup_steps < run.config.num_steps, needs_build


def finished(run: Run, timeout_seconds: float, retry: bool = True) -> OutcomeStatus | None:
    """Return the status of an earlier run in the same folder if it counts as a result, else None.

    Results are a complete record, a run that ran out of memory, and a run that timed out with at least as much time as
    now. A run that failed is run again only with `retry`. A run with a damaged record is run again, and a message says
    so.

    Raises Refusal if the record is of a run with other flags.
    """
    outcome = read_outcome(run.folder)
    path = run.folder / "record.json"
    if path.exists():
        record = schema.read(path)
        _check_same(run, record, path)
        if record.status in ("ok", "out_of_memory"):
            try:
                records.read_run(run.folder)
            except Refusal as damage:  # with the message that every command prints when it reads the record
                print(terminal.wrap(f"{run.run_id} will run again, because its record is damaged. {damage}"))
                return None
            is_late = record.status == "ok" and outcome and outcome.status == "crashed"
            return "crashed" if is_late else record.status
    if outcome is None or not _is_of(outcome, run):
        return None
    if outcome.status in ("ok", "skipped"):  # the record of the run was deleted, or the run never started
        return None
    if outcome.status == "timed_out":
        return outcome.status if (outcome.wall_seconds or 0) >= timeout_seconds else None
    return None if retry and outcome.status != "out_of_memory" else outcome.status


def read_outcome(run_dir: Path) -> Outcome | None:
    """Read the outcome that an earlier call wrote for a run.

    None if the run was never started, or was interrupted before it had an outcome.
    """
    path = run_dir / "outcome.json"
    return schema.read_outcome(path) if path.exists() else None


def _is_of(outcome: Outcome, run: Run) -> bool:
    """Return whether an outcome is of this run, with the same configuration.

    False for an old outcome without a configuration, because it cannot be compared.
    """
    has_same_ranks = (outcome.strategy, outcome.world_size) == (run.strategy.name, run.world_size)
    return has_same_ranks and outcome.config is not None and _differing(run, outcome.config) is None


def _check_same(run: Run, record: Record, path: Path) -> None:
    ranks = record.proof.ranks_of_machines if record.proof else None
    rate = record.machine.get("environment", {}).get(LABORATORY)
    difference = None
    if name := _differing(run, record.config):
        planned = run.config.model_dump(mode="json")
        difference = f"with {name}={record.config.get(name)!r}, but the study plans {planned[name]!r}"
    elif ranks is not None and len(ranks) != run.num_machines:
        difference = f"on {terminal.count(len(ranks), 'machine')}, but {run.num_machines} are planned"
    elif run.laboratory and rate not in (None, run.laboratory):
        difference = f"on a network with a rate of {rate}, but the study plans {run.laboratory}"
    elif record.strategy_file and (key := _differing_strategy(run.strategy.written, record.strategy_file)):
        difference = f"of {run.strategy.name}, but the strategy's file had a different {key} at that time"
    if difference:
        raise Refusal(
            f"{path}: this is the record of a run {difference}. Use another --runs-dir, or delete the record."
        )


def _differing_strategy(now: dict[str, Any], then: dict[str, Any]) -> str | None:
    """Return the first key in which two strategy files distribute a run differently. None if they agree."""
    ours, theirs = shipped.normalized_settings(now), shipped.normalized_settings(then)
    return next((key for key in sorted(ours | theirs) if ours.get(key) != theirs.get(key)), None)


def _differing(run: Run, config: dict[str, Any]) -> str | None:
    """Return the first knob in which a recorded configuration differs from a run's. None if all are equal."""
    planned = run.config.model_dump(mode="json", exclude=OF_THE_PROCESS)
    # In a file that is older than a knob, the knob has its present default.
    defaults = {name: RunConfig.model_fields[name].default for name in planned}
    return next((name for name in sorted(planned) if config.get(name, defaults[name]) != planned[name]), None)


def _history(folder: Path, machine: Machine, forked: bool) -> History:
    """Collect the earlier runs of this folder and of the reports. Records that cannot be read are left out."""
    history = History(bool(machine.gpu_memory_bytes), hardware.find(machine.gpu_name or ""), forked)
    for path in sorted(folder.glob("*/record.json")):
        with suppress(Refusal):
            history.add(schema.read(path), read_outcome(path.parent))
    for record, outcome in _of_reports(files.ROOT):
        history.add(record, outcome, of_report=True)
    return history


@cache
def _of_reports(root: Path) -> list[tuple[Record, Outcome | None]]:
    """Read the committed runs in `reports/`. The result is cached, because reading takes seconds."""
    runs = []
    for report in sorted(root.glob("reports/*/records")):
        with suppress(Refusal):
            runs += [(run.record.record, run.outcome) for run in records.find_runs([report]) if run.record]
    return runs


# ---------------------------------------------------------------- why a run is skipped


def implied_outcome(run: Run, ended: Sequence[tuple[Run, OutcomeStatus]]) -> str | None:
    """Return the reason to skip this run: a finished run already shows how it would end.

    None if no finished run shows it.
    """
    exhausted = [ended_run for ended_run, status in ended if status == "out_of_memory"]
    return too_large_batch(run, exhausted) or implied_by_ladder(run, ended)


def too_large_batch(run: Run, exhausted: Iterable[Run]) -> str | None:
    """Name in a sentence the finished run that shows that this run would run out of memory.

    The finished run ran out of memory with a smaller global batch and no larger micro batch, and otherwise needs the
    same memory. None if there is no such run.
    """
    for exhausted_run in exhausted:
        alike = (run.strategy.name, run.world_size) == (exhausted_run.strategy.name, exhausted_run.world_size)
        alike = alike and all(getattr(run.config, key) == getattr(exhausted_run.config, key) for key in DECIDES_MEMORY)
        smaller = exhausted_run.config.global_batch_size < run.config.global_batch_size
        if alike and smaller and exhausted_run.micro_batch_size <= run.micro_batch_size:
            return f"{exhausted_run.run_id} ran out of memory with a smaller batch"
    return None


def implied_by_ladder(run: Run, ended: Iterable[tuple[Run, OutcomeStatus]]) -> str | None:
    """Name in a sentence the finished run that shows whether this run fits into memory.

    Both search for the largest model or batch that fits. If a larger one trained, this one fits. If a smaller one ran
    out of memory, this one does not fit. None if no run shows it.
    """
    if run.rung is None:
        return None
    knob, place = run.rung
    elsewhere = {knob, "output_dir"}
    for ended_run, status in ended:
        if ended_run.rung is None or ended_run.rung[0] != knob:
            continue
        alike = (ended_run.strategy.name, ended_run.world_size) == (run.strategy.name, run.world_size)
        if not alike or ended_run.config.model_dump(exclude=elsewhere) != run.config.model_dump(exclude=elsewhere):
            continue
        if status == "ok" and ended_run.rung[1] > place:
            return f"{ended_run.run_id} is larger and fits"
        if status == "out_of_memory" and ended_run.rung[1] < place:
            return f"{ended_run.run_id} is smaller and ran out of memory"
    return None


def missing_resources(study: Study, run: Run, machine: Machine) -> str | None:
    """Return what this machine lacks for a run: GPUs, memory, other machines or a simulated network.

    None if nothing is missing.
    """
    if run.laboratory and os.environ.get(LABORATORY) != run.laboratory:
        return f"needs a simulated network with a rate of {run.laboratory} (docs/machines.md)"
    if run.num_machines > 1 and run.main_process_ip is None:
        return (
            f"needs {run.num_machines} machines. Start it on each of them (docs/machines.md), or "
            "write a script with `zero-study plan STUDY --slurm`"
        )
    num_local = run.world_size if run.laboratory else run.num_local_ranks
    present = len(machine.gpu_memory_bytes)
    num_gpus = 1 if run.config.share_device else num_local
    if num_gpus > present and (present or study.device == "gpu"):
        return f"needs {terminal.count(num_gpus, 'GPU')}, found {present}"
    on_device, on_host = model_state_bytes(run)
    if not present:  # without a GPU, a rank's device is the host
        return _too_large("model states", on_device + on_host, num_local, "host", machine.host_memory_bytes)
    # If GPUs differ, assume the best case, because CUDA and NVML may number them differently.
    smallest = sorted(machine.gpu_memory_bytes, reverse=True)[num_gpus - 1]
    return _too_large("model states", on_device, num_local // num_gpus, "GPU", smallest) or _too_large(
        "offloaded model states", on_host, num_local, "host", machine.host_memory_bytes
    )


def _blind_torch(study: Study) -> str | None:
    """Return a message if a study of GPUs would train on the CPU because the installed PyTorch finds no GPU.

    None otherwise.
    """
    if study.device != "gpu":
        return None
    import torch

    return None if torch.cuda.device_count() else "the installed PyTorch finds no GPU. Install PyTorch's build for CUDA"


def _too_large(what: str, rank_bytes: float, num_ranks: int, where: str, available_bytes: int) -> str | None:
    if rank_bytes * num_ranks <= available_bytes:
        return None
    times = f" x {num_ranks} ranks" if num_ranks > 1 else ""
    return (
        f"the {what} need {rank_bytes / 1e9:.1f} GB per rank{times} by the paper's formula, but the {where} has only "
        f"{available_bytes / 1e9:.1f} GB"
    )


# ---------------------------------------------------------------- showing it


def show(plan: Plan) -> str:
    """Return a summary of the plan, followed by one line per run."""
    digits = len(str(len(plan.runs)))
    longest = max(len(planned.run.run_id) for planned in plan.runs)
    lines = []
    for number, planned in enumerate(plan.runs, 1):
        if planned.to_run:
            action, reason = "run", plan.in_words(planned)
        else:
            action, reason = ("keep", planned.kept) if planned.kept else ("skip", planned.skipped or "")
        line = f"{number:{digits}}  {action:4}  {planned.run.run_id:{longest}}  {reason}"
        if len(line) > terminal.width():  # the reason goes on lines of its own
            indent = " " * (digits + 8)
            line = f"{line[: digits + 8]}{planned.run.run_id}\n{terminal.wrap(reason, indent)}"
        lines.append(line)
    return "\n".join([heading(plan), "", *lines])


def heading(plan: Plan) -> str:
    """Return the study's question, the summary of the plan, the folder and this machine."""
    lines = [f"{plan.study.name}: {plan.study.question}", summary(plan)]
    lines += [f"Folder of the runs: {plan.folder}. This machine: {plan.box}."]
    return "\n".join(map(terminal.wrap, lines))


def summary(plan: Plan) -> str:
    """Return how many runs will start, are finished or are skipped, how long they take, and what was not checked."""
    estimates = [plan.estimate(planned) for planned in plan.runs if planned.to_run]
    num_kept = sum(planned.kept is not None for planned in plan.runs)
    text = f"{len(estimates)} to run, {num_kept} kept, {len(plan.runs) - num_kept - len(estimates)} skipped"
    if estimates:
        guesses = sum(not estimate.num_earlier_runs for estimate in estimates)
        text += f"; about {duration(sum(estimate.seconds for estimate in estimates))}"
        if guesses == len(estimates):
            text += ", which is a guess, because there is no similar earlier run"
        else:
            text += (
                f", estimated from earlier runs (and guessed for {terminal.count(guesses, 'run')})"
                if guesses
                else (", estimated from earlier runs")
            )
    text += "."
    if any(planned.run.rung for planned in plan.runs):
        text += (
            "\nMost runs will be skipped, because bisection needs only a few of them to find "
            "the largest run that trains."
        )
    if not plan.checked:
        text += "\nNot checked, because torch is not installed: DeepSpeed's extensions, data, packages."
    return text
