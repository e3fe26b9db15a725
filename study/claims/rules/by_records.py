"""Decide claims by the committed records of this project's runs.

FUNCTIONS has the functions that the ledger may name. All records are from a CPU. Losses are compared seed by seed with
compare/differences.py, for the models of the studies in LEARNED, in fp32 with two processes. If bytes differ between
the models or ranks of a study, the interval is from the smallest to the largest value.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from study.claims.rules import MissingEvidence, Observed
from study.records import find as records
from study.records.find import RecordFile
from study.records.schema import Record
from study.records.steps import steps_of
from study.running import studies
from zero_study.files import ROOT
from zero_study.theory.model_states import STATE_PARTS

if TYPE_CHECKING:
    import pandas as pd

    from study.claims import defects

T = TypeVar("T")

CPU = ROOT / "reports" / "cpu"
RECORDS = CPU / "records"
PROTOCOL = CPU / "published" / "protocol.json"
LEARNED = ("learned", "learned-gpt", "learning-bert")  # studies about the losses that models reach
WORLD_SIZE = 2  # number of processes of the runs whose losses are compared
VALUES = "the lowest and the highest value"  # how an interval over several runs was computed
PARTS = (*STATE_PARTS, "model_states")  # model_states: parameters, gradients and optimizer states together
NOTICEABLE_SHARE = 0.01  # collectives with a smaller share of a step's bytes are for losses and norms
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")


@lru_cache(maxsize=16)
def _finished(study: str) -> list[RecordFile]:
    return [run for run in records.find([_folder(study)]) if run.record.status == "ok"]


def _folder(study: str) -> Path:
    """Return the folder with the committed records of a study. Raises MissingEvidence if the study has none."""
    folder = RECORDS / study
    if not any(folder.rglob("*.json*")):
        raise MissingEvidence(f"{folder}: there are no records in this folder")
    return folder


def _some(candidates: Iterable[RecordFile], description: str) -> list[RecordFile]:
    runs = list(candidates)
    if not runs:
        raise MissingEvidence(
            f"arguments: there is no committed record of {description}. Name runs that have a record."
        )
    return runs


def _known(value: T | None) -> T:
    """Return a value that every record of a successful run has."""
    assert value is not None
    return value


def _name(path: str) -> str:
    """Return the name of a strategy, given its name or the path of its file."""
    return Path(path).stem


# ---------------------------------------------------------------- what is learned


def loss_difference(
    study: str, strategy: str, control: str, part: str = "training", steps: int | None = None
) -> Observed:
    """Return the relative difference between the losses of a strategy and the baseline, with its interval over seeds.

    If `part` is "training", the loss is the mean of the last ten steps, or of the first `steps` if that is given. If it
    is "evaluation", the loss is the held-out loss at the end.
    """
    if part not in ("training", "evaluation"):
        raise ValueError(f"part {part!r}: must be 'training' or 'evaluation'")
    from study.compare.facts import CURVE

    table = _table(study)
    if steps is not None:  # the first losses replace the last ones
        at = CURVE.index("loss")
        table = table.assign(mean_final_loss=[curve[:steps, at].mean() for curve in table["curve"]])
    return _compared(table, study, strategy, control, "mean_final_loss" if part == "training" else "eval_loss")


def different_bits(strategy: str, control: str) -> Observed:
    """Return in how many trainings a strategy and the baseline end with different bits of weights or moments.

    All orders of additions are fixed. The settings are those of the studies `bits` and `bits-learned` in which the two
    strategies have the same roundings.
    """
    from study.compare import bits

    compared, different = [], 0
    for study in ("bits", "bits-learned"):
        for _, pinned in bits.settings([_folder(study)]).values():
            for column in pinned:
                sound = [run.record for run in column if not bits.is_faulty(run.record)]
                of = {record.strategy: record for record in sound if record.config["fixed_order"] == "all"}
                if {strategy, control} <= of.keys() and not bits.differing_roundings(of[strategy], of[control]):
                    different += bits.first_differing_step(of[strategy], of[control]) is not None
                    compared.append(of[strategy].run_id)
    if not compared:
        raise ValueError(
            f"arguments: the studies of bits have no training that ran under both {strategy} and {control}. "
            "Name other strategies."
        )
    return Observed(
        different, tuple(sorted(compared)), told=f"comparing weights and moments of {len(compared)} trainings"
    )


def gradient_norm_ratio(study: str, strategy: str, control: str) -> Observed:
    """Return the mean gradient norm of a strategy divided by that of the baseline, with its interval over seeds."""
    difference = _compared(_table(study), study, strategy, control, "mean_grad_norm")
    low, high = difference.ends
    return Observed(1 + difference.number, difference.evidence, (1 + low, 1 + high), told=difference.told)


@lru_cache(maxsize=len(LEARNED))
def _table(study: str) -> pd.DataFrame:
    """Return the table of runs of a study of LEARNED, including those of the study STUDY-others.

    Runs with a label are left out, because variants of the control are not controls. Some strategies ran only once and
    ended with exactly the weights of another strategy. They get copies of all runs of that strategy.
    """
    import pandas as pd

    from study.compare import table, verdict

    if study not in LEARNED:
        raise ValueError(f"study {study!r}: must be one of {', '.join(LEARNED)}")
    runs = table.read([_folder(study), *RECORDS.glob(f"{study}-others")])
    verdict.require_whole(sorted({run.run_id for run in studies.runs(studies.find(study))} - set(runs["run_id"])))
    once = runs[runs["run_id"].str.endswith("-once")]
    arms = runs[runs["run_id"].str.fullmatch(r".*-seed\d+") & (runs["world_size"] <= WORLD_SIZE)]
    arm_of = arms[arms["world_size"] == WORLD_SIZE].set_index("final_sha256")["strategy"]
    copies = [
        arms[arms["strategy"] == arm_of[digest]].assign(strategy=strategy)
        for strategy, digest in zip(once["strategy"], once["final_sha256"], strict=True)
        if digest in arm_of
    ]
    return pd.concat([arms, *copies], ignore_index=True)


def _compared(table: pd.DataFrame, study: str, strategy: str, control: str, metric: str) -> Observed:
    from study.compare import differences, pairs

    selected = table[table["strategy"].isin([strategy, control])]
    compared = differences.compare(selected, control, [metric])
    rows = compared[
        (compared["strategy"] == strategy)
        & (compared["world_size"] == (1 if strategy == "single" else WORLD_SIZE))
        & (compared["control_world_size"] == WORLD_SIZE)
    ]
    if len(rows) != 1 or rows["relative_low"].isna().any():
        raise MissingEvidence(
            f"arguments: no committed records of {study} under {strategy} and {control} in several seeds"
        )
    row = rows.iloc[0]
    couples = pairs.pair(selected, control).compared
    ids = {name for column in ("run", "control_run") for name in selected.loc[couples[column], "run_id"]}
    runs = selected[selected["run_id"].isin(ids) & (selected["world_size"] <= WORLD_SIZE)]
    interval = float(row["relative_low"]), float(row["relative_high"])
    evidence = tuple(sorted(set(runs["run_id"])))
    method = str(row["interval"]).replace(", t", ", Student's t")
    return Observed(float(row["relative_difference"]), evidence, interval, told=f"95 % interval of {method}")


# ---------------------------------------------------------------- what is held


def state_bytes_per_parameter(strategy: str, world_size: int, precision: str, part: str) -> Observed:
    """Return the bytes per parameter of one category of memory, such as gradients, just before the optimizer step.

    The value is that of the rank that uses the most memory. `part` is one of PARTS. "model_states" are the states that
    the ZeRO paper counts.
    """
    if part not in PARTS:
        raise ValueError(f"part {part!r}: must be one of {', '.join(PARTS)}")
    setting = (_name(strategy), world_size, precision)
    runs = _some(
        (
            f
            for f in _finished("model-states")
            if (f.record.strategy, f.record.world_size, _known(f.record.proof).precision) == setting
        ),
        f"model states under {strategy} on {world_size} processes in {precision}",
    )
    values = [_largest_part(f, part) / _known(f.record.num_params) for f in runs]
    return _from_least_to_most(values, runs)


def state_ratio(strategy: str, part: str, precision: str, world_size: int, to_world_size: int) -> Observed:
    """Return the bytes of `part` on one of `world_size` ranks divided by those on one of `to_world_size` ranks."""
    above, below = (
        state_bytes_per_parameter(strategy, count, precision, part) for count in (world_size, to_world_size)
    )
    if not min(below.ends):
        raise ValueError(f"arguments: {part} have 0 bytes on {to_world_size} processes. Name another part.")
    return _ratio(above, below, above.told)


def _ratio(above: Observed, below: Observed, description: str) -> Observed:
    """Return one observed value divided by another, with the interval that follows from both intervals."""
    (low, high), (least, most) = above.ends, below.ends
    interval = None if (low, least) == (high, most) else (low / most, high / least)
    return Observed(above.number / below.number, above.evidence + below.evidence, interval, told=description)


def _from_least_to_most(values: list[float], runs: list[RecordFile]) -> Observed:
    interval = None if len(set(values)) == 1 else (min(values), max(values))
    evidence = tuple(f.record.run_id for f in runs)
    return Observed(statistics.mean(values), evidence, interval, told="" if interval is None else VALUES)


def held_ratio(study: str, of: str, to: str, part: str, label: str = "") -> Observed:
    """Return the memory per rank of one strategy divided by that of another, just before the optimizer step.

    `part` is one of PARTS. The interval is from the smallest to the largest ratio over the models of the study. Only
    runs with the label are compared.
    """
    if part not in PARTS:
        raise ValueError(f"part {part!r}: must be one of {', '.join(PARTS)}")
    above, below = (_labeled(study, label, strategy) for strategy in (of, to))
    shared = sorted(above.keys() & below.keys())
    if not shared:
        raise ValueError(f"arguments: no model of {study} ran under both {of} and {to}. Name other strategies.")
    pairs = [(above[model], below[model]) for model in shared]
    values = [_largest_part(over, part) / _largest_part(under, part) for over, under in pairs]
    return _from_least_to_most(values, [run for pair in pairs for run in pair])


def _labeled(study: str, label: str, strategy: str) -> dict[tuple[str, str], RecordFile]:
    """Return the runs of a strategy that have a label, by workload and model size."""
    runs = (f for f in _finished(study) if f.record.strategy == strategy and _label(f.record.run_id) == label)
    return {(f.record.workload, f.record.config["size"]): f for f in runs}


def _label(run_id: str) -> str:
    """Return the label at the end of a run's name, after its seed. Return "" if it has none."""
    return re.split(r"-seed\d+-?", run_id)[-1]


def _largest_part(run: RecordFile, part: str) -> int:
    largest: int = max(getattr(rank, part) for rank in _known(run.record.model_state_bytes))
    return largest


def peak_ratio(
    of: str, to: str, precision: str | None = None, study: str = "peaks-real", label: str | None = None
) -> Observed:
    """Return the peak tensor memory of one strategy divided by that of another, for the process that uses the most.

    The interval is from the smallest to the largest ratio over the models, numbers of processes and precisions of the
    study. If `precision` or `label` is given, only runs with it are used. In bf16, DDP uses autocast.
    """
    from study.compare import table

    runs = table.read([_folder(study)]).query("status == 'ok'")
    if label is not None:
        runs = runs[runs["run_id"].map(_label) == label]
    runs = runs.assign(precision=runs["precision"].str.removesuffix("-autocast"))
    if precision is not None:
        runs = runs[runs["precision"] == precision]
    above, below = (runs[runs["strategy"] == name] for name in (of, to))
    pairs = above.merge(below, on=["workload", "size", "world_size", "precision", "seed"], suffixes=("", "_below"))
    ratios = [float(ratio) for ratio in pairs["peak_tensor_bytes"] / pairs["peak_tensor_bytes_below"]]
    description = "the only pair" if len(pairs) == 1 else f"the lowest and the highest ratio of {len(pairs)} pairs"
    evidence = (*pairs["run_id"], *pairs["run_id_below"])
    return Observed(statistics.mean(ratios), evidence, (min(ratios), max(ratios)), told=description)


# ---------------------------------------------------------------- what is sent


def _sending(strategy: str, world_size: int, accumulation: int) -> list[RecordFile]:
    setting = (_name(strategy), world_size, accumulation, False)
    return _some(
        (f for f in _finished("communication") if _of_step(f.record) == setting),
        f"communication under {strategy} on {world_size} processes, micro steps: {accumulation}",
    )


def _of_step(r: Record) -> tuple[str, int, int, bool]:
    return r.strategy, r.world_size, _known(r.proof).gradient_accumulation_steps, r.config["activation_checkpointing"]


def volume(strategy: str, world_size: int, accumulation: int) -> Observed:
    """Return the bytes that a step communicates, divided by the bytes of all parameters. All-reduces count twice."""
    runs = _sending(strategy, world_size, accumulation)
    values = [_moved(f.record) / (4 * _known(f.record.num_params)) for f in runs]  # all runs are in fp32
    return _from_least_to_most(values, runs)


def _moved(r: Record, kinds: tuple[str, ...] | None = None) -> int:
    return sum(c.moved_bytes for c in _known(r.collectives_per_step) if kinds is None or c.kind in kinds)


def volume_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """Return the bytes that a training sends per step and byte of parameters, divided by those of another one."""
    return _ratio(volume(**of), volume(**to), VALUES)


def reduced_ratio(strategy: str, world_size: int, accumulation: int) -> Observed:
    """Return the bytes of gradient reductions per step with gradient accumulation, divided by the bytes without it."""
    accumulated, plain = (_sending(strategy, world_size, steps) for steps in (accumulation, 1))
    values = [
        _moved(a.record, REDUCTIONS) / _moved(b.record, REDUCTIONS) for a, b in zip(accumulated, plain, strict=True)
    ]
    return _from_least_to_most(values, [*accumulated, *plain])


def uses_collective(strategy: str, world_size: int, collective: str) -> Observed:
    """Return whether a training step uses this collective operation for more than losses and norms."""
    runs = _sending(strategy, world_size, 1)
    kind = collective.replace("-", "_")
    shares = [_moved(f.record, (kind,)) / _moved(f.record) for f in runs]
    evidence = tuple(f.record.run_id for f in runs)
    is_used = [share > NOTICEABLE_SHARE for share in shares]
    return Observed(all(is_used), evidence, (all(is_used), any(is_used)))


# ---------------------------------------------------------------- accumulation


def accumulation_difference(workload: str, strategy: str, micro_batch: int) -> Observed:
    """Return the largest relative difference between the losses of a run with gradient accumulation and one without it.

    The losses of each step are compared. Both runs have the same global batch.
    """
    accumulated, plain = _parity_pair(workload, strategy, micro_batch)
    losses = [[line["loss"] for line in steps_of(f)] for f in (accumulated, plain)]
    value = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    return Observed(value, (accumulated.record.run_id, plain.record.run_id))


def _parity_pair(workload: str, strategy: str, micro_batch: int) -> tuple[RecordFile, RecordFile]:
    """Return a run with gradient accumulation and one without, from the runs of the study `parity` without dropout."""
    alike = [
        f
        for f in _finished("parity")
        if (f.record.workload, f.record.strategy, f.record.world_size) == (workload, strategy, WORLD_SIZE)
        and not f.record.config["dropout"]
    ]
    description = f"{workload} under {strategy} in the study parity"
    proofs = [(f, _known(f.record.proof)) for f in alike]
    accumulated = _some(
        (f for f, p in proofs if p.gradient_accumulation_steps > 1 and p.micro_batch_size == micro_batch),
        f"{description}, accumulated, micro batch {micro_batch}",
    )
    plain = _some((f for f, p in proofs if p.gradient_accumulation_steps == 1), description)
    return accumulated[0], plain[0]


# ---------------------------------------------------------------- a published program, mended


def protocol_effect(program: str, metric: defects.Metric) -> Observed:
    """Return the relative difference that ZeRO makes to a metric in a published program, with its interval.

    `program` is "published", or "mended" for the program with all defects corrected. The interval is over repeats.
    """
    from study.claims import defects

    programs = {"published": defects.AS_PUBLISHED, "mended": defects.MENDED}
    for name, value, allowed in (("program", program, programs), ("metric", metric, get_args(defects.Metric))):
        if value not in allowed:
            raise ValueError(f"{name} {value!r}: must be one of {', '.join(allowed)}")
    if not PROTOCOL.exists():
        raise MissingEvidence(f"{PROTOCOL}: there is no such file")
    effect = defects.effect(defects.read(PROTOCOL), programs[program], metric)
    if effect is None or effect.low is None or effect.high is None:
        raise ValueError(f"arguments: the {program} program has no {metric} in {PROTOCOL.name}. Run it again.")
    description = f"95 % interval of {len(effect.values)} repeats"
    runs = sorted({name for name, _ in (programs[program].plain, programs[program].zero)})
    evidence = tuple(f"{PROTOCOL.name}: {run}/{repeat}" for run in runs for repeat in effect.values)
    return Observed(effect.mean, evidence, (effect.low, effect.high), told=description)


FUNCTIONS: dict[str, Callable[..., Observed]] = {
    function.__name__: function
    for function in (
        loss_difference, different_bits, gradient_norm_ratio, state_bytes_per_parameter, state_ratio, held_ratio,
        peak_ratio, volume, volume_ratio, reduced_ratio, uses_collective, accumulation_difference, protocol_effect,
    )
}  # fmt: skip
