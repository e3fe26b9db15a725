"""Select the runs of a study that count for its result.

The study's protocol admits a run if it was planned and if it trained as planned. Each planned run counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from study.compare.facts import libraries, steps_at_an_end
from study.config import NOT_TRAINED, RunConfig
from study.records import find as records
from study.records import machine
from study.records.find import RecordFile
from study.records.schema import Outcome, Record
from study.records.steps import steps_of
from study.running.studies import Protocol
from zero_study.errors import Refusal

# The paths of text and weights differ from machine to machine. Their digests are compared instead.
_PLACES = NOT_TRAINED | {"data", "init", "weights"}


class PlannedRun(NamedTuple):
    """A run that the study's plan contains."""

    run_id: str
    strategy: str
    world_size: int
    config: RunConfig


class AdmittedRun(NamedTuple):
    """The results of one admitted run: its held-out metrics by step, and its training losses."""

    run_id: str
    strategy: str
    seed: int
    label: str  # of the part of the study; empty if the run has none of the protocol's labels
    held_out: dict[int, dict[str, float]]  # step -> metric -> value; step 0 is before the first step
    training: tuple[float, float]  # mean loss of the first steps, and of the same number of last steps
    started_at: str
    commit: str  # of the code


class Runs(NamedTuple):
    """The runs of a study, divided into admitted, excluded and missing runs."""

    taken: list[AdmittedRun]
    left_out: dict[str, str]  # run_id -> reason
    missing: list[str]  # planned runs without an outcome
    num_planned: int


def read(folders: Sequence[Path], wanted: Iterable[PlannedRun], protocol: Protocol, study: str, sha256: str) -> Runs:
    """Read the runs of a study, and divide them into admitted, excluded and missing runs.

    Raises Refusal if the folders have no run of the study, or if two different runs have the same id.
    """
    planned = {run.run_id: run for run in wanted}
    runs = _runs_of(folders, study)
    files: dict[str, RecordFile] = {}
    left_out: dict[str, str] = {}
    for outcome, file in runs:
        record = None if file is None else file.record
        if reason := _reason(planned.get(outcome.run_id), outcome, record, protocol, sha256):
            left_out[outcome.run_id] = reason
        elif file is not None:
            files[outcome.run_id] = file
    left_out |= _outliers({run_id: file.record for run_id, file in files.items()})
    labels = (*protocol.variants, *protocol.broken)
    taken = [_trained(file, labels) for run_id, file in files.items() if run_id not in left_out]
    missing = planned.keys() - {outcome.run_id for outcome, _ in runs}
    return Runs(taken, left_out, sorted(missing), len(planned))


def _runs_of(folders: Sequence[Path], study: str) -> list[tuple[Outcome, RecordFile | None]]:
    """Return the outcomes and records of the study's runs below the folders. Copies of a run are included.

    Raises Refusal if there is no run, or if two different runs have the same id.
    """
    runs = []
    identities: dict[str, tuple[Any, ...]] = {}
    for run in records.find_runs(folders):
        if run.outcome is None or run.outcome.study != study:
            continue
        run_id = run.outcome.run_id
        if identities.setdefault(run_id, run.identity) != run.identity:
            raise Refusal(
                f"{run.folder}: {run_id} is in two folders, and the two runs differ. Name only one of the folders."
            )
        runs.append((run.outcome, run.record))
    if not runs:
        raise Refusal(
            f"{' '.join(map(str, folders))}: there is no run of the study {study} to judge. Run it with `zero-study "
            f"run {study}`."
        )
    return runs


def _reason(
    planned: PlannedRun | None, outcome: Outcome, record: Record | None, protocol: Protocol, sha256: str
) -> str | None:
    """Return why the protocol excludes a run, without regard to other runs. None if it admits the run."""
    if planned is None:
        return "the study does not plan this run"
    if outcome.status != "ok" or record is None:
        return f"it ended {outcome.status}"
    if outcome.study_sha256 != sha256:
        return "the study's file had a different text when it was started"
    return _other_code(record) or _other_request(planned, record) or _not_evaluated(record, protocol)


def _other_code(record: Record) -> str | None:
    """Return why a run was not trained by one committed version of the code. None if it was."""
    if record.continues is not None:
        return "it started from the checkpoint of another run"
    if record.machine.get("git_dirty") is not False or any(part.is_dirty for part in record.code or ()):
        return "its code was changed since its commit"
    return record.mixed_code


def _other_request(planned: PlannedRun, record: Record) -> str | None:
    """Return the first setting in which a run differs from its plan, as text. None if there is none."""
    recorded = RunConfig.model_validate(record.config)
    plan, run = (config.model_dump(mode="json", exclude=set(_PLACES)) for config in (planned.config, recorded))
    if differs := next((name for name in plan if plan[name] != run[name]), None):
        return f"{differs} was {run[differs]}, but the study plans {plan[differs]}"
    if (record.strategy, record.world_size) != (planned.strategy, planned.world_size):
        return f"it is {record.strategy} on {record.world_size} processes, which the study does not plan"
    return None


def _not_evaluated(record: Record, protocol: Protocol) -> str | None:
    evaluated = {int(line["step"] or 0) for line in record.evaluation}
    missing = {0, protocol.step} - evaluated
    return f"its held-out loss was not measured at step {min(missing)}" if missing else None


def _outliers(runs: dict[str, Record]) -> dict[str, str]:
    """Return the runs that differ from most others in something that must be equal, with the reasons.

    Libraries, arithmetic and text must be the same for all runs. The machine, the pretrained weights and the initial
    weights must be the same for all runs of one seed.
    """
    odd = _unlike(runs, ("libraries", "arithmetic settings", "text"))
    for start in {record.seed for record in runs.values()}:
        of_start = {run_id: record for run_id, record in runs.items() if record.seed == start}
        odd |= _unlike(of_start, ("machine", "pretrained weights", "initial weights"))
    return odd


def _unlike(runs: dict[str, Record], names: Sequence[str]) -> dict[str, str]:
    """Return the runs that differ from most of these runs in one of the named facts, with the reason."""
    facts = {
        run_id: {
            "machine": record.box,
            "libraries": libraries(record.machine),
            "arithmetic settings": machine.arithmetic(record.machine),
            "text": (record.data or {}).get("digest"),
            "pretrained weights": record.weights_sha256,
            "initial weights": record.initial_parameters and record.initial_parameters.sha256,
        }
        for run_id, record in runs.items()
    }
    odd: dict[str, str] = {}
    for name in names:
        values = [run[name] for run in facts.values()]
        most = max(values, key=values.count, default=None)
        odd |= {
            run_id: f"it differs from most runs in its {name}" for run_id, run in facts.items() if run[name] != most
        }
    return odd


def _trained(file: RecordFile, labels: Sequence[str]) -> AdmittedRun:
    record, losses = file.record, [line["loss"] for line in steps_of(file)]
    ends = steps_at_an_end(len(losses))
    return AdmittedRun(
        run_id=record.run_id,
        strategy=record.strategy,
        seed=record.seed,
        label=label_of(record.run_id, labels),
        held_out={
            int(line["step"] or 0): {name: value for name, value in line.items() if value is not None}
            for line in record.evaluation
        },
        training=(fmean(losses[:ends]), fmean(losses[-ends:])),
        started_at=record.started_at,
        commit=record.machine.get("git_commit") or "unknown",
    )


def label_of(run_id: str, labels: Iterable[str]) -> str:
    """Return the label with which a run's id ends. Empty if it ends with none of `labels`."""
    return next((label for label in labels if label and run_id.endswith(f"-{label}")), "")
