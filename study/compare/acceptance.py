"""Make the view `acceptance`: a table of the checks that each strategy passes on this machine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from study.compare import view
from study.compare.parity import largest_loss_difference, settings, shown_arithmetic
from study.records import find as records
from study.records import schema
from study.records.find import RecordedRun, RecordFile
from study.records.schema import Record
from zero_study import terminal

# The largest relative difference of any step's loss from that of `single`. In fp32, the programs
# differ only in the order of additions.
LOSS_TOLERANCE = 1e-4
LOSS_TOLERANCE_IN_16_BITS = 1e-2
# The longest that the host may wait for the next batch, as a share of the step time. A longer wait means that the batch
# was not fetched while the GPU computed.
LARGEST_WAIT = 0.2

OK, FAILED, NOT_RUN = "ok", "failed", "not run"
STATUSES = (OK, FAILED, NOT_RUN)
WAYS = ("fp32", "bf16", "fp16", "compiled", "shared GPU")
AS_SINGLE = "as single"

EXPLANATION = f"""\
The table shows which checks each strategy passes on this machine. An empty cell means that no run requested the
check.

- fp32, bf16, fp16 (with or without autocast), compiled, shared GPU: a run of this kind verified its engine and
  trained to its end.
- as single: at every step, the loss differs from that of `single` by a relative difference of at most
  {LOSS_TOLERANCE:g}, or {LOSS_TOLERANCE_IN_16_BITS:g} in 16 bits.
- NCCL: ranks that do not share a GPU communicate with NCCL.
- energy: the record has the energy in joules. NVML: the record has the GPU memory of the process.
- batches: the host waits for the next batch for at most {LARGEST_WAIT:.0%} of a step."""


class Verdict(NamedTuple):
    status: str
    reason: str = ""


class _Run(NamedTuple):
    """One run: its strategy, its kind of training, and whether it trained."""

    run_id: str
    strategy: str
    way: str
    trained: Verdict
    file: RecordFile | None  # its record; None if it did not train to its end


def tolerance(precision: str) -> float:
    """Return the largest relative difference that is allowed between the losses of a run and of its reference run."""
    return LOSS_TOLERANCE if precision == "fp32" else LOSS_TOLERANCE_IN_16_BITS


def page(folders: Sequence[Path]) -> str:
    """Return the page of the view `acceptance` in Markdown: which checks each strategy passes on this machine.

    The table has a row for each strategy and a column for each check. Below it are the reasons for each check that is
    not ok, and the loss differences of each run.
    """
    recorded_runs = list({run.identity: run for run in records.find_runs(folders)}.values())
    runs = [_read(run) for run in recorded_runs]
    references = {_work(run.file.record): run.file for run in runs if run.file and _is_reference(run.file.record)}
    strategies = sorted({run.strategy for run in runs}, key=lambda name: (name != "single", name != "ddp", name))
    cells = _cells(strategies, runs, references)
    shown = {place: f"**{FAILED}**" if cell.status == FAILED else cell.status for place, cell in cells.items()}
    rows = [[f"`{name}`", *(shown.get((name, check), "") for check in CHECKS)] for name in strategies]
    machines = sorted({run.record.record.box for run in recorded_runs if run.record})
    counts = Counter(cell.status for cell in cells.values())
    summary = f"{'; '.join(machines or [schema.UNKNOWN_BOX])}: {', '.join(f'{counts[s]} {s}' for s in STATUSES)}."
    lines = [summary, "", *terminal.markdown(["strategy", *CHECKS], rows), ""]
    lines += [*_reasons(cells), *_distances(runs, references)]
    return view.page(
        "Acceptance: the checks that each strategy passes", EXPLANATION, lines, "--view acceptance", folders
    )


Cells = dict[tuple[str, str], Verdict]  # by strategy and check


def _cells(strategies: Sequence[str], runs: Sequence[_Run], references: dict[str, RecordFile]) -> Cells:
    """Return the verdict of each check that at least one run of a strategy requests, by strategy and check."""
    cells: Cells = {}
    for strategy in strategies:
        own = [run for run in runs if run.strategy == strategy]
        for check in CHECKS:
            if verdict := _check(check, own, references):
                cells[strategy, check] = verdict
    return cells


# ---------------------------------------------------------------- one run


def _read(run: RecordedRun) -> _Run:
    facts = run.record.record if run.record else run.outcome
    assert facts is not None
    config = facts.config or {}
    way = str(config.get("precision", "fp32"))[:4]
    if config.get("share_device") and facts.world_size > 1:
        way = "shared GPU"
    if config.get("compile"):
        way = "compiled"
    trained = _trained(run)
    return _Run(facts.run_id, facts.strategy, way, trained, run.record if trained.status == OK else None)


def _trained(run: RecordedRun) -> Verdict:
    """Return whether a run trained to its end, with the reason if it did not.

    A run starts to train only after it has verified its engine. The verdict OK therefore also means that the engine is
    the requested one.
    """
    status, message = "", ""
    if run.outcome:
        status, message = run.outcome.status, run.outcome.message
    elif run.record:
        failure = run.record.record.failure
        status, message = run.record.record.status, failure.error.partition("\n")[0] if failure else ""
    if status == "ok" and run.record:
        return Verdict(OK)
    if status in ("skipped", "interrupted"):
        return Verdict(NOT_RUN, message)
    return Verdict(FAILED, f"{status}: {message}")


def _is_reference(r: Record) -> bool:
    """Return whether a run can be a reference: strategy `single`, not compiled, and without a shared GPU."""
    return r.strategy == "single" and not r.config.get("compile") and not r.config.get("share_device")


def _work(r: Record) -> str:
    """Return a key that is equal for runs that should have equal losses.

    Settings that should not change the losses are left out of the key: autocast, the type in which gradients are
    accumulated, compilation, and a shared GPU.
    """
    ignored = {"precision", "accumulation_dtype", "compile", "share_device"}
    config = {name: value for name, value in settings(r).items() if name not in ignored}
    digest = (r.data or {}).get("digest")
    return json.dumps([r.box, digest, r.config["precision"][:4], config], sort_keys=True)


# ---------------------------------------------------------------- one check of one strategy


def _check(check: str, runs: list[_Run], references: dict[str, RecordFile]) -> Verdict | None:
    """Return the verdict of one check for one strategy. None if no run requests this check."""
    if check in WAYS:
        return _worst(_of_training(run) for run in runs if run.way == check)
    finished = [run.file for run in runs if run.file]
    if check == AS_SINGLE:
        return _worst(_as_single(file, references) for file in finished if not _is_reference(file.record))
    return _of_observation(_OBSERVED[check], [file.record for file in finished])


def _of_training(run: _Run) -> Verdict:
    """Return the verdict on one run's training. If the training failed, the reason names the run."""
    if run.trained.status != FAILED:
        return run.trained
    return Verdict(FAILED, f"{run.run_id}: {run.trained.reason}")


def _of_observation(observation: _Observation, finished: Sequence[Record]) -> Verdict | None:
    """Return the verdict on an observation that only GPUs provide, such as the energy.

    NOT_RUN if all runs that need the observation ran on a CPU, or if the machine does not show the quantity. None if no
    finished run needs it.
    """
    observed = [r for r in finished if observation.is_asked(r)]
    on_gpu = [r for r in observed if r.device != "cpu"]
    if observed and not on_gpu:
        return Verdict(NOT_RUN, "on a CPU")
    otherwise = FAILED if observation.is_required else NOT_RUN
    return _worst(
        Verdict(OK) if observation.holds(r) else Verdict(otherwise, f"{r.run_id}: {observation.reason}") for r in on_gpu
    )


def _worst(verdicts: Iterable[Verdict]) -> Verdict | None:
    """Return the worst verdict: failed, then not run, then ok. None if there are no verdicts."""
    return min(verdicts, key=lambda verdict: (FAILED, NOT_RUN, OK).index(verdict.status), default=None)


def _as_single(file: RecordFile, references: dict[str, RecordFile]) -> Verdict:
    r = file.record
    reference, allowed = references.get(_work(r)), tolerance(r.config["precision"])
    if reference is None:
        return Verdict(NOT_RUN, f"there is no finished run of `single` with the same work{shown_arithmetic(r)}")
    if r.config["dropout"] and r.world_size > 1:
        return Verdict(
            NOT_RUN,
            "dropout is on, and each rank draws its own dropout masks, so the losses differ from those of `single`",
        )
    difference = largest_loss_difference(file, reference)
    if difference is not None and difference <= allowed:
        return Verdict(OK)
    return Verdict(
        FAILED,
        f"{r.run_id}: the relative difference of a loss from that of `single` is "
        f"{terminal.difference(difference)}, but "
        f"at most {allowed:g} is allowed",
    )


def _has_process_memory(r: Record) -> bool:
    return all(any(peak.process_bytes for peak in phases.values()) for phases in r.peak_memory or [{}])


def _waits_little(r: Record) -> bool:
    if r.timing is None or r.timing.data_wait_median_seconds is None or r.timing.median_seconds is None:
        return False
    return r.timing.data_wait_median_seconds <= LARGEST_WAIT * r.timing.median_seconds


class _Observation(NamedTuple):
    """A check of a quantity that a run on a GPU records."""

    is_asked: Callable[[Record], bool]
    holds: Callable[[Record], bool]
    reason: str  # to report if the check fails
    # False: this machine does not show the quantity if a record lacks it, which says nothing about the strategy.
    is_required: bool = True


_OBSERVED = {
    "NCCL": _Observation(
        lambda r: r.proof is not None and r.proof.distributed_type != "NO" and not r.config.get("share_device"),
        lambda r: r.proof is not None and "nccl" in (r.proof.backend or ""),
        "its ranks use another backend than NCCL",
    ),
    "energy": _Observation(
        lambda r: True,
        lambda r: all(r.energy_joules or [None]),
        "its record has no energy, because this GPU or its driver does not report it",
        is_required=False,
    ),
    "NVML": _Observation(
        lambda r: True,
        _has_process_memory,
        "its record has no memory of the process, because the driver does not report it, as in many containers",
        is_required=False,
    ),
    "batches": _Observation(
        lambda r: not r.config.get("share_device"),
        _waits_little,
        f"the host waited for batches for more than {LARGEST_WAIT:.0%} of a step, or no step was timed",
    ),
}


CHECKS = (*WAYS, AS_SINGLE, *_OBSERVED)


# ---------------------------------------------------------------- below the table


def _reasons(cells: Cells) -> list[str]:
    """Return a section with the reasons why checks failed or were not run. Each reason is listed once."""
    where: dict[Verdict, list[tuple[str, str]]] = {}
    for place, verdict in cells.items():
        if verdict.status != OK:
            where.setdefault(verdict, []).append(place)
    lines = []
    for verdict, places in sorted(where.items()):
        names = dict.fromkeys(f"`{name}`" for name, _ in places)
        checks = sorted({check for _, check in places}, key=CHECKS.index)
        lines.append(
            f"- {verdict.status}: {', '.join(checks)} of {', '.join(names)}: {terminal.escape_markdown(verdict.reason)}"
        )
    return ["## Checks that failed or were not run", "", *lines, ""] if lines else []


def _distances(runs: list[_Run], references: dict[str, RecordFile]) -> list[str]:
    """Return a table of the largest difference between the losses of each run and of its reference."""
    rows = []
    for file in (run.file for run in runs if run.file and not _is_reference(run.file.record)):
        if reference := references.get(_work(file.record)):
            difference = terminal.difference(largest_loss_difference(file, reference))
            allowed = tolerance(file.record.config["precision"])
            rows.append([file.record.run_id, reference.record.run_id, difference, f"{allowed:g}"])
    head = ["run", "compared with", "largest difference of a loss", "at most"]
    return ["## Differences from the loss of `single`", "", *terminal.markdown(head, rows), ""] if rows else []
