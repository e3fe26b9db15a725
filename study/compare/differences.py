"""Make the view `differences`: differences from the baseline, with confidence intervals and equivalence tests.

The intervals are those of paired differences, or Welch's. Equivalence is tested by two one-sided tests (TOST) against a
margin. The margin is the repeatability limit (ISO 5725-6) of the control's own repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from study.compare import pairs, predicted, view
from study.compare import table as tidy
from study.compare.parity import WITHIN
from zero_study import terminal

Kind = Literal["learned", "times", "bytes"]

METRICS: dict[str, Kind] = {
    "mean_final_loss": "learned",
    "loss_area": "learned",
    "eval_loss": "learned",
    "mean_grad_norm": "learned",
    "seconds_per_step": "times",
    "tokens_per_second_per_gpu": "times",
    "mfu": "times",
    "joules_per_token": "times",
    "peak_allocated_bytes": "bytes",  # on a GPU
    "peak_tensor_bytes": "bytes",  # on a CPU
    "model_state_bytes": "bytes",
    "collective_bytes": "bytes",
}
# The quantity of `pairs.limits` that decides whether a metric can be compared.
_LIMIT = {metric: "losses" if kind == "learned" else "speed" for metric, kind in METRICS.items()}
_LIMIT |= {"peak_allocated_bytes": "memory", "peak_tensor_bytes": "memory"}
_LIMIT |= {"model_state_bytes": "states", "collective_bytes": "states"}

CONFIDENCE = 0.95
# From this number of differences on, the interval is bootstrapped. With 8 normally distributed differences, the 95 %
# BCa interval missed the true mean in 11 of 100 cases. With 20 differences, it missed the mean in 7 of
# 100 cases. Student's t interval missed it in 5 of 100 cases.
BOOTSTRAP_FROM = 20
RESAMPLES = 2000
# The smallest possible margin, relative. The order of summation alone causes such differences of fp32 losses.
FLOOR: dict[Kind, float] = {"learned": WITHIN, "times": 0.0}
# The largest useful margin, relative. A verdict "no difference" within a wider margin would be meaningless, because
# published effects begin at 1.2 % of a loss, and a slow-down of 3 % is worth knowing.
CEILING: dict[Kind, float] = {"learned": 0.01, "times": 0.02}
CONSTANT = 1e-14  # relative; values that differ by less are equal except for rounding

_POOLED = ("box", "workload", "size", "precision")
_SHOWN = ("box", "workload", "size", "world_size", "global_batch_size", "precision", "sequence_length", "num_steps",
          "config_digest", "data_digest", "libraries")  # fmt: skip
COLUMNS = (
    *_SHOWN, "metric", "strategy", "control", "control_world_size", "n_pairs", "n_repeats", "control_value", "value",
    "difference", "low", "high", "margin", "relative_difference", "relative_low", "relative_high", "relative_margin",
    "interval", "verdict", "why", "limit",
)  # fmt: skip


class Margin(NamedTuple):
    """The margin of equivalence: the largest relative difference expected between equal runs of the baseline."""

    relative: float
    num_runs: int  # repeats from which the margin was estimated


class Estimate(NamedTuple):
    """An estimated difference from the baseline, with its interval.

    It is relative for learned metrics, and a difference of logarithms for times.
    """

    value: float
    bounds: tuple[float, float] | None  # bounds of the interval; None if there is no interval
    equivalent: bool | None  # result of the two one-sided tests; None without a margin or an interval
    n: int
    interval: str


def compare(table: pd.DataFrame, control: str = "ddp", metrics: Iterable[str] = METRICS) -> pd.DataFrame:
    """Compare each strategy with the baseline in each metric, and return a table with one row per comparison.

    Returns one row per comparison, with the columns `COLUMNS`. The metric `mfu` needs a table to which
    `predicted.with_theory` has added its columns.

    `pairs.pair` decides which runs are compared, and its `refused` lists the others. The kind of a metric (`METRICS`)
    decides how values are compared:

    - learned: seed by seed. The mean of a seed's repeats is compared with that of the control's repeats.
    - times: launch by launch, as logarithms of ratios.
    - bytes: exactly, without a test.

    With two or more seeds, the interval is that of the paired differences. It is by Student's t or, from
    `BOOTSTRAP_FROM` differences on, by the bootstrap (BCa). With a single seed, learned metrics have no interval,
    however often the seed was repeated. For times, the repeats of a single seed give Welch's interval. A single run
    gives no interval. The column `interval` names the method.

    `low` and `high` are the bounds of `difference`, in the metric's unit. `relative_low` and `relative_high` are the
    bounds of `relative_difference`, which is value / control_value - 1. Each interval is a 95 % interval of one
    comparison. It is not corrected for the number of comparisons: among twenty comparisons without any effect, one
    interval is expected not to contain 0.

    The column `verdict` has one of these values:

    - "higher" or "lower" for learned metrics: the interval does not contain 0 and reaches beyond `FLOOR`. The margin
      comes from the spread of runs, so it cannot rule out a difference.
    - "no difference": otherwise, if two one-sided tests at 5 % show that the difference is within the margin from
      `margins`.
    - "higher" or "lower" for times: otherwise, if the interval does not contain 0. A disturbance of the machine slows
      several runs in a row, which the interval does not account for, so the margin counts first.
    - "inconclusive": otherwise.

    Without a margin, only the interval decides. `n_pairs` is the number of differences on which an interval is based.
    For Welch's interval, it is the number of runs on the smaller side. `n_repeats` is the number of runs of the seed
    that was repeated most often. `limit` is the reason from `pairs.limits` why the metric cannot be compared. The
    differences of learned metrics are shown nevertheless.
    """
    metrics = list(metrics)
    margin_of = {metric: margins(table, metric, control) for metric in metrics if METRICS[metric] != "bytes"}
    facts = {name: table[name].to_numpy() for name in {*_SHOWN, "strategy", "seed", *metrics}}
    rows = []
    for group in _groups(table, pairs.pair(table, control).compared):
        first = {name: facts[name][group.runs[0]] for name in (*_SHOWN, "strategy")}
        first |= {"control": control, "control_world_size": facts["world_size"][group.controls[0]]}
        place = tuple(first[name] for name in _POOLED)
        for metric in metrics:
            margin = margin_of[metric].get(place) if metric in margin_of else None
            comparison = _comparison(metric, group, facts[metric], facts["seed"], margin, control)
            if comparison is not None:
                rows.append({**first, "metric": metric, **comparison})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def margins(table: pd.DataFrame, metric: str, control: str = "ddp") -> dict[tuple, Margin]:
    """Return the margin of equivalence (repeatability limit) of a metric, by machine, workload, size and precision.

    The limit is that of ISO 5725-6, 4.1.4: 95 of 100 pairs of equal runs differ by less than 1.96 sqrt(2) s_r. Here,
    s_r is the standard deviation of equal runs. It is relative to the mean or, for times, that of the logarithms, and
    it is pooled over settings and seeds. Because s_r is an estimate, often from few repeats, Student's quantile
    replaces 1.96. With more repeats, the quantile approaches 1.96. The limit is never below `FLOOR`. If no run was
    repeated, there is no limit.

    Without dropout, the control trains the same on any number of processes, apart from the order of summation. For
    learned metrics, such runs therefore also count as repeats. This matters on a CPU: other repeats are bit-identical
    there, so only these runs show how far rounding errors grow during a training.
    """
    kind = METRICS[metric]
    runs = table[(table["status"] == "ok") & (table["strategy"] == control)].dropna(subset=[metric, *pairs.CELL])
    if kind == "times":
        runs = runs[~runs["oversubscribed"]]
    values = np.log(runs[metric]) if kind == "times" else runs[metric]
    cut = runs[["world_size", "micro_batch_size"]]  # how the global batch is divided
    if kind == "learned":
        cut = cut.where(runs["dropout"] > 0, 0)
    alike = values.groupby([runs[name] for name in (*pairs.CELL, "seed")] + [cut[name] for name in cut], sort=False)
    deviations = values - alike.transform("mean")
    if kind == "learned":
        deviations /= alike.transform("mean").abs()
    squares = runs[list(_POOLED)].assign(
        square=deviations**2, alike=alike.ngroup(), repeated=alike.transform("size") > 1
    )
    totals = squares.groupby(list(_POOLED)).agg(
        square=("square", "sum"), runs=("square", "size"), alike=("alike", "nunique"), repeated=("repeated", "sum")
    )
    by_place = {}
    for place, square, num_runs, num_alike, repeated in totals[totals["repeated"] > 0].itertuples():
        degrees = num_runs - num_alike
        limit = repeatability_limit(square / degrees, degrees)
        limit = np.expm1(limit) if kind == "times" else limit
        by_place[place] = Margin(max(float(limit), FLOOR[kind]), int(repeated))
    return by_place


def repeatability_limit(variance: float, degrees: int) -> float:
    """Return the difference that 95 of 100 pairs of equal runs do not exceed (the limit of ISO 5725-6).

    `variance` is that of equal runs, estimated with `degrees` degrees of freedom.
    """
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees) * np.sqrt(2 * variance))


class _Group(NamedTuple):
    """The runs of one strategy in one setting, and the control's runs that they are compared with.

    Runs are given by their row numbers in the table.
    """

    runs: np.ndarray
    controls: np.ndarray  # all repeats of the same seeds
    couples: np.ndarray  # shape (pairs, 2): a run and its partner
    limits: dict[str, str]  # the reasons from `pairs.limits`, by quantity


def _groups(table: pd.DataFrame, compared: pd.DataFrame) -> Iterator[_Group]:
    alike = table.groupby(
        [*pairs.CELL, "strategy", "world_size", "micro_batch_size"], sort=False, dropna=False
    ).ngroup()
    alike, ok, seed = alike.to_numpy(), (table["status"] == "ok").to_numpy(), table["seed"].to_numpy()
    limits_of = {name: compared[name].to_numpy(object) for name in pairs.LIMITS}
    couples = np.column_stack([table.index.get_indexer(compared[name]) for name in ("run", "control_run")])
    for (_, of_control), members in compared.groupby(
        [alike[couples[:, 0]], alike[couples[:, 1]]], sort=False
    ).indices.items():
        runs = couples[members, 0]
        controls = np.flatnonzero(ok & (alike == of_control) & np.isin(seed, seed[runs]))
        # A limit of one pair, for example because its runs shared cores, applies to the whole group.
        limits = {
            name: reason
            for name, reasons in limits_of.items()
            for reason in reasons[members]
            if isinstance(reason, str)
        }
        yield _Group(runs, controls, couples[members], limits)


def _comparison(
    metric: str, group: _Group, values: np.ndarray, seeds: np.ndarray, margin: Margin | None, control: str
) -> dict[str, Any] | None:
    """Compare a strategy's values of one metric with the control's. None if both have no value."""
    kind = METRICS[metric]
    # Without the runs and the pairs of runs for which the metric is not known.
    runs, controls = (rows[~np.isnan(values[rows])] for rows in (group.runs, group.controls))
    couples = group.couples[~np.isnan(values[group.couples]).any(axis=1)]
    group = group._replace(runs=runs, controls=controls, couples=couples)
    if not len(group.runs) and not len(group.controls):
        return None
    limit = group.limits.get(_LIMIT[metric])
    average = {"learned": np.mean, "times": stats.gmean, "bytes": np.median}[kind]
    facts: dict[str, Any] = {
        "n_pairs": len(group.couples),
        "n_repeats": max(Counter(seeds[group.runs]).values(), default=0),
        "value": average(values[group.runs]) if len(group.runs) else None,
        "control_value": average(values[group.controls]) if len(group.controls) else None,
        "limit": limit,
    }
    if not len(group.couples):
        return {**facts, "verdict": "inconclusive", "why": "not measured on both sides"}
    if limit is not None and kind != "learned":
        return {**facts, "verdict": "inconclusive", "why": f"not comparable: {limit}"}
    if kind == "bytes":
        return {**facts, **_exact(values[group.runs], values[group.controls])}
    return {**facts, **_tested(kind, group, values, seeds, margin, limit, control)}


def _tested(
    kind: Kind,
    group: _Group,
    values: np.ndarray,
    seeds: np.ndarray,
    margin: Margin | None,
    limit: str | None,
    control: str,
) -> dict[str, Any]:
    """Compare a learned metric or a time with the control: difference, interval, margin and verdict."""
    # The margin does not apply if the dropout masks differ, because repeats of the control draw the same masks.
    usable = margin if limit is None else None
    allowed = None if usable is None else np.log1p(usable.relative) if kind == "times" else usable.relative
    estimate_of = _launches if kind == "times" else _seeds
    value, control_value, estimate = estimate_of(values, seeds, group, group.couples, allowed)
    facts = {"n_pairs": estimate.n, "value": value, "control_value": control_value, "interval": estimate.interval}
    facts |= {"difference": value - control_value, "relative_difference": value / control_value - 1}
    if usable is not None:
        facts |= {"relative_margin": usable.relative, "margin": usable.relative * control_value}
    if estimate.bounds is not None:
        low, high = (np.expm1(bound) if kind == "times" else bound for bound in estimate.bounds)
        facts |= {"relative_low": low, "relative_high": high, "low": low * control_value, "high": high * control_value}
    without = limit or f"{control} was not repeated, so there is no margin"
    verdict, reason = _verdict(estimate, kind, usable, control, without)
    return {**facts, "verdict": verdict, "why": reason}


def _exact(values: np.ndarray, control_values: np.ndarray) -> dict[str, Any]:
    """Compare bytes exactly, without a test.

    The verdict is "higher" or "lower" if this holds for every run, and "no difference" if all runs have the same bytes.
    Otherwise it is "inconclusive".
    """
    value, control_value = np.median(values), np.median(control_values)
    facts = {"difference": value - control_value, "margin": 0.0}
    if control_value:
        facts |= {"relative_difference": value / control_value - 1, "relative_margin": 0.0}
    if values.min() > control_values.max() or values.max() < control_values.min():
        return {
            **facts,
            "verdict": "higher" if value > control_value else "lower",
            "why": "the bytes of every run differ in this direction",
        }
    if np.ptp(values) == np.ptp(control_values) == 0:
        return {**facts, "verdict": "no difference", "why": "the same number of bytes in every run"}
    return {
        **facts,
        "verdict": "inconclusive",
        "why": "the bytes differ from run to run, and the ranges of the strategy and of the control overlap",
    }


def _launches(
    values: np.ndarray, seeds: np.ndarray, group: _Group, couples: np.ndarray, margin: float | None
) -> tuple[float, float, Estimate]:
    """Compare times by their logarithms.

    Returns the geometric mean, that of the control, and the difference with its interval.
    """
    if len(np.unique(seeds[couples[:, 0]])) == 1:
        logs, control_logs = np.log(values[group.runs]), np.log(values[group.controls])
        estimate = unpaired(logs, control_logs, margin)
    else:
        # Launches that are paired with the same launch of the control are averaged and make one difference.
        partners = np.unique(couples[:, 1])
        logs = np.array([np.log(values[couples[couples[:, 1] == partner, 0]]).mean() for partner in partners])
        control_logs = np.log(values[partners])
        estimate = _paired(logs - control_logs, margin, f"{len(logs)} pairs of launches")
    return np.exp(logs.mean()), np.exp(control_logs.mean()), estimate


def _seeds(
    values: np.ndarray, seeds: np.ndarray, group: _Group, couples: np.ndarray, margin: float | None
) -> tuple[float, float, Estimate]:
    """Compare a metric of learning seed by seed.

    Returns the mean, that of the control, and the difference relative to the control's mean, with its interval.
    """
    common = np.unique(seeds[couples[:, 0]])
    means, control_means = (
        np.array([values[rows[seeds[rows] == seed]].mean() for seed in common]) for rows in (group.runs, group.controls)
    )
    value, control_value = means.mean(), control_means.mean()
    if len(common) == 1:
        return (
            value,
            control_value,
            Estimate(value / control_value - 1, None, None, 1, "there is no interval, because there is only one seed"),
        )
    return value, control_value, _paired((means - control_means) / control_value, margin, f"{len(common)} seeds")


def _paired(differences: np.ndarray, margin: float | None, description: str) -> Estimate:
    """Estimate the mean of at least two paired differences.

    The interval is by Student's t or by the bootstrap. Equivalence is tested by TOST against the margin.
    """
    value, n = differences.mean(), len(differences)
    if np.ptp(differences) <= CONSTANT:
        equivalent = margin is not None and margin > 0 and abs(value) <= margin
        return Estimate(value, (value, value), equivalent, n, f"{description}, all equal")
    if n < BOOTSTRAP_FROM:
        low, high = stats.ttest_1samp(differences, 0).confidence_interval(CONFIDENCE)
        method = "t"
    else:
        low, high = bootstrap_interval(differences, CONFIDENCE, RESAMPLES)
        method = "bootstrap (BCa)"
    equivalent = None
    if margin is not None:
        above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
        below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
        equivalent = max(above, below) < 1 - CONFIDENCE
    return Estimate(value, (low, high), equivalent, n, f"{description}, {method}")


def t_interval(sample: np.ndarray) -> tuple[float, float | None, float | None]:
    """Return the mean of a sample, and the bounds of its interval by Student's t.

    Both bounds are None if the sample has one value. They equal the mean if all values are equal.
    """
    if len(sample) < 2:
        return float(sample.mean()), None, None
    if np.ptp(sample) <= CONSTANT:
        return float(sample.mean()), float(sample.mean()), float(sample.mean())
    low, high = stats.ttest_1samp(sample, 0).confidence_interval(CONFIDENCE)
    return float(sample.mean()), float(low), float(high)


def bootstrap_interval(sample: np.ndarray, confidence: float, resamples: int) -> tuple[float, float]:
    """Return the interval of a mean by the bootstrap (BCa).

    The values must not all be equal. The random numbers have a fixed seed, so the result is reproducible.
    """
    low, high = stats.bootstrap(
        (sample,),
        np.mean,
        confidence_level=confidence,
        n_resamples=resamples,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(low), float(high)


def unpaired(values: np.ndarray, control_values: np.ndarray, margin: float | None) -> Estimate:
    """Estimate the difference of two means with Welch's interval, and test equivalence against the margin (TOST).

    There is no interval if one of the groups has fewer than two values, or if all its values are equal.
    """
    value, n = values.mean() - control_values.mean(), min(len(values), len(control_values))
    description = f"one seed, {len(values)} against {len(control_values)} repeats"
    if n < 2:
        return Estimate(
            value, None, None, n, "there is no interval, because there is one seed without repeats of both strategies"
        )
    if min(np.ptp(values), np.ptp(control_values)) <= CONSTANT:
        return Estimate(value, None, None, n, f"{description}; there is no interval, because repeats are equal")
    low, high = stats.ttest_ind(values, control_values, equal_var=False).confidence_interval(CONFIDENCE)
    equivalent = None
    if margin is not None:
        above = stats.ttest_ind(values + margin, control_values, equal_var=False, alternative="greater").pvalue
        below = stats.ttest_ind(values - margin, control_values, equal_var=False, alternative="less").pvalue
        equivalent = max(above, below) < 1 - CONFIDENCE
    return Estimate(value, (low, high), equivalent, n, f"{description}, Welch")


def _verdict(
    estimate: Estimate, kind: Kind, margin: Margin | None, control: str, without_margin: str
) -> tuple[str, str]:
    """Return the verdict and its reason. `without_margin` is the reason why there is no margin."""
    if estimate.bounds is None:
        return "inconclusive", estimate.interval
    low, high = estimate.bounds
    leaves_out_0, furthest = low > 0 or high < 0, max(-low, high)
    direction, detected = "higher" if low > 0 else "lower", f"the interval does not contain 0 ({estimate.interval})"
    if leaves_out_0 and kind == "learned" and furthest > FLOOR[kind]:
        if estimate.equivalent and margin is not None:
            detected += f", but the difference is within {_margin(margin, control)}"
        return direction, detected
    if estimate.equivalent and margin is not None:
        ceiling = f"{100 * CEILING[kind]:g} %"
        if margin.relative > CEILING[kind]:
            repeats = f"{margin.num_runs} repeats of {control} differ by {_percent(margin.relative)}"
            # Not for times: a disturbance of the machine slows several runs in a row, which the interval does
            # not account for.
            if kind == "learned" and furthest <= CEILING[kind]:
                return "no difference", f"the interval is within {ceiling}, although {repeats}"
            return "inconclusive", f"{repeats}, and a margin above {ceiling} says nothing"
        within = f"within {_margin(margin, control)}"
        return "no difference", f"{within}, although the interval does not contain 0" if leaves_out_0 else within
    if margin is None and furthest <= FLOOR[kind]:
        return "no difference", f"the interval is within {100 * FLOOR[kind]:g} %, the smallest possible margin"
    if leaves_out_0:
        return direction, detected
    if margin is None:
        return "inconclusive", f"the interval contains 0; {without_margin}"
    return "inconclusive", f"the interval contains 0 and reaches beyond {_percent(margin.relative)}"


def _margin(margin: Margin, control: str) -> str:
    return f"{_percent(margin.relative)}, the margin from {margin.num_runs} repeats of {control}"


def _percent(relative: float) -> str:
    return "more than 100 %" if relative > 1 else terminal.percent(relative, 3)


# ---------------------------------------------------------------- the view

_WORK = ("box", "workload", "size", "precision", "global_batch_size")
_DISTINGUISHING = {"sequence_length": "length {:.0f}", "num_steps": "{:.0f} steps", "config_digest": "settings {:.8}"}
SHOWN_REASONS = 12  # reasons for leaving runs out that are listed; the others are only counted
EXPLANATION = """\
Each strategy is compared with the control's runs that do the same work with the same seed.

- n: the number of differences from which an interval is computed.
- difference: relative to the control, with its 95 % confidence interval.
- margin: 95 of 100 pairs of equal runs of the control differ by less. The rule for the margin was written when the
  first results were known.
- verdict: *higher* and *lower* mean that the interval does not contain 0. *no difference* means within the margin by
  two one-sided tests and, for losses and gradient norms, that the interval contains 0 or is within 0.001 %. Each
  interval is for one comparison: among twenty comparisons without any effect, one interval is expected not to
  contain 0. Bytes are counted, and compared exactly."""


def page(folders: Sequence[Path], control: str) -> str:
    """Return the page of the view `differences` in Markdown: verdicts by metric, and why runs were left out."""
    runs = predicted.with_theory(tidy.read(folders))
    tidy.check_control(runs, control)
    head = ["strategy", "processes", "n", control, "value", "difference", "margin", "verdict", "why"]
    lines = []
    for heading, metrics in _sections(compare(runs, control)):
        lines += [f"## {terminal.escape_markdown(heading)}", ""]
        for metric, rows in metrics.groupby("metric", sort=False):
            lines += [f"### {metric}", "", *terminal.markdown(head, map(_row, rows.to_dict("records"))), ""]
    lines += _untimed(runs) + _left_out(pairs.pair(runs, control).refused)
    option = "--view differences" + (f" --control {control}" if control != "ddp" else "")
    return view.page(f"Differences from {control}", EXPLANATION, lines, option, folders)


def _sections(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield a heading and the table rows for each training.

    The heading distinguishes it from the other trainings.
    """
    several = rows.groupby(list(_WORK), dropna=False)[list(_DISTINGUISHING)].nunique()
    distinguishing = [name for name, most in several.max().items() if most > 1]
    for values, members in rows.groupby([*_WORK, *distinguishing], sort=False, dropna=False):
        named_values = zip([*_WORK, *distinguishing], values, strict=True)
        facts_of_group = {name: value for name, value in named_values if not pd.isna(value)}
        parts = [
            f"{facts_of_group['workload']} {facts_of_group['size']}",
            facts_of_group.get("precision", "unknown precision"),
        ]
        parts += [f"batch {facts_of_group['global_batch_size']:.0f}"]
        parts += [
            _DISTINGUISHING[name].format(facts_of_group[name]) for name in distinguishing if name in facts_of_group
        ]
        yield ", ".join([*parts, facts_of_group["box"]]), members


def _row(row: dict[Any, Any]) -> list[Any]:
    show = terminal.bytes_text if row["metric"].endswith("_bytes") else "{:.4g}".format
    relative = "" if pd.isna(row["relative_difference"]) else f"{row['relative_difference']:+.3%}"
    if not pd.isna(row["relative_low"]):
        relative += f" ({row['relative_low']:+.3%} to {row['relative_high']:+.3%})"
    margin = row["relative_margin"]
    mine, theirs = row["world_size"], row["control_world_size"]
    return [
        row["strategy"],
        mine if mine == theirs else f"{mine} against {theirs}",
        row["n_pairs"],
        *("unknown" if pd.isna(row[name]) else show(row[name]) for name in ("control_value", "value")),
        relative,
        "" if pd.isna(margin) else f"{margin:.3%}",
        row["verdict"],
        row["why"],
    ]


def _untimed(runs: pd.DataFrame) -> list[str]:
    """Return a line with the number of runs without a time, and the reasons. Empty if all runs have a time."""
    ok = runs[runs["status"] == "ok"]
    reasons = Counter(ok["why_untimed"].dropna()).most_common()
    if not reasons:
        return []
    total = sum(n for _, n in reasons)
    return [
        f"Times are not compared for {total} of {len(ok)} runs "
        f"({'; '.join(f'{n}: {reason}' for reason, n in reasons)}).",
        "",
    ]


def _left_out(refused: pd.DataFrame) -> list[str]:
    """Return a section with the reasons why runs were left out, the most frequent first."""
    if refused.empty:
        return []
    runs = refused.to_dict("records")
    reasons = [
        run["reason"] + (f" ({run['message']})" if run["status"] != "ok" and not pd.isna(run["message"]) else "")
        for run in runs
    ]
    counted = Counter(reasons).most_common()
    lines = [f"- {n} run(s): {terminal.escape_markdown(reason)}" for reason, n in counted[:SHOWN_REASONS]]
    remaining = sum(n for _, n in counted[SHOWN_REASONS:])
    return ["## Not compared", "", *lines, *([f"- and {remaining} for other reasons"] if remaining else []), ""]
