"""What came of a study that was fixed in advance, as a page of Markdown: the answer first, then what it rests on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from study.compare import markdown, verdict
from study.compare.verdict import Judged, Runs
from study.compare.words import processes
from study.records.protocol import Endpoint, Protocol

HEAD = ["arm", "processes", "seeds", "difference (95 %)", "worst seed", "within the margin?", "further than rounding?"]


def page(folders: Sequence[Path], protocol: Protocol, study: str, sha256: str, question: str, control: str) -> str:
    """Make the page. Raises Refusal where the runs do not let the protocol's tests be made."""
    runs = verdict.read(folders, protocol, study, sha256)
    judged = verdict.judge(runs, protocol, control)
    lines = [f"# {question}", "", answer(judged, protocol, control), ""]
    for endpoint in protocol.endpoints:
        rows = [_row(row) for row in judged if row.endpoint == endpoint]
        spread, largest = verdict.null_spread(runs, endpoint, control)
        lines += [f"## {heading(endpoint)}", "", *markdown.markdown(HEAD, rows), ""]
        lines += [
            f"{control.upper()}'s own runs, from weights one unit in the last place apart, are "
            f"{_size(spread, endpoint)} from one another (root mean square), at most {_size(largest, endpoint)}.",
            _planned(endpoint, protocol, judged),
            "",
        ]
    lines += [*_target(runs, protocol, control), *_once(runs, protocol, control), *_basis(runs, protocol, study)]
    command = markdown.command(f"verdict {study}", folders)
    return "\n".join([*lines, "", f"Made by `{command}`."])


def answer(judged: Sequence[Judged], protocol: Protocol, control: str) -> str:
    """One paragraph for who reads no table: on the primary endpoint."""
    endpoint = next(endpoint for endpoint in protocol.endpoints if endpoint.primary)
    rows = [row for row in judged if row.endpoint == endpoint]
    same = [row for row in rows if row.equivalence == "same within the margin"]
    further = [row for row in rows if row.further]
    what = f"{_name(endpoint)} after {endpoint.step} steps"
    margin = _size(endpoint.margin, endpoint)
    if len(same) == len(rows):
        first = f"None of {len(rows)} arms differs from {control.upper()} in {what} by as much as {margin}"
    else:
        others = ", ".join(f"{_arm(row)} {row.equivalence}" for row in rows if row not in same)
        first = (
            f"{len(same)} of {len(rows)} arms differ from {control.upper()} in {what} by less than {margin}; {others}"
        )
    second = (
        f"{', '.join(map(_arm, further))}: further from it than rounding alone carries {control.upper()} from itself"
        if further
        else f"none is further from it than rounding alone carries {control.upper()} from itself"
    )
    widest = max(rows, key=lambda row: max(-row.low, row.high))
    seeds = min(len(row.seeds) for row in rows)
    interval = f"{_size(widest.low, endpoint, True)} to {_size(widest.high, endpoint, True)}"
    tests = f"{seeds} seeds, two one-sided tests at {100 * protocol.significance:g} %"
    return f"{first} ({tests}; the widest interval is {_arm(widest)}'s, {interval}). And {second}."


def heading(endpoint: Endpoint) -> str:
    kind = "primary" if endpoint.primary else "secondary"
    return f"{_name(endpoint).capitalize()}, step {endpoint.step} ({kind}; margin {_size(endpoint.margin, endpoint)})"


def _name(endpoint: Endpoint) -> str:
    return f"held-out {endpoint.metric}"


def _arm(row: Judged) -> str:
    return f"`{row.strategy}` on {processes(row.world_size)}"


def _size(value: float, endpoint: Endpoint, signed: bool = False) -> str:
    """A difference in the margin's unit, for people."""
    unit = "points" if endpoint.metric == "accuracy" else "%"
    return f"{100 * value:{'+' if signed else ''}.2g} {unit}"


def _row(row: Judged) -> list[str]:
    e = row.endpoint
    worst = row.differences[np.argmax(np.abs(row.differences))]
    interval = f"{_size(row.mean, e, True)} ({_size(row.low, e, True)} to {_size(row.high, e, True)})"
    rounding = f"{'yes' if row.further else 'no'}: {row.distance:.2f} times as far, p {row.p_null:.3f}"
    return [
        f"`{row.strategy}`",
        str(row.world_size),
        str(len(row.seeds)),
        interval,
        _size(float(worst), e, True),
        "yes" if row.equivalence == "same within the margin" else row.equivalence,
        rounding,
    ]


def _planned(endpoint: Endpoint, protocol: Protocol, judged: Sequence[Judged]) -> str:
    rows = [row for row in judged if row.endpoint == endpoint]
    num_seeds = min(len(row.seeds) for row in rows)
    planned = verdict.power(endpoint.planned_sd, endpoint.margin, num_seeds, protocol.significance)
    lowest = min(rows, key=lambda row: row.power)
    return (
        f"Power of the test for the margin, were there no difference: planned {planned:.2f} (spread "
        f"{_size(endpoint.planned_sd, endpoint)}, from the pilot), reached at least {lowest.power:.2f} "
        f"({_arm(lowest)}, spread {_size(float(lowest.differences.std(ddof=1)), endpoint)})."
    )


def _target(runs: Runs, protocol: Protocol, control: str) -> list[str]:
    target = protocol.target
    rows = []
    arms: dict[tuple[str, int, bool], list[int | None]] = {}
    for run in runs.taken:
        if not run.is_once:
            arms.setdefault((run.strategy, run.world_size, run.is_null), []).append(verdict.reached(run, protocol))
    for (strategy, world_size, is_null), steps in sorted(arms.items()):
        there = [step for step in steps if step is not None]
        rows.append(
            [
                f"`{strategy}`" + (" from neighbouring weights" if is_null else ""),
                world_size,
                f"{len(there)} of {len(steps)}",
                f"{statistics.median(there):g} ({min(there)} to {max(there)})" if there else "none",
            ]
        )
    title = f"## Steps to a held-out loss of {target.loss:g} (looked at every {target.every} steps)"
    return [title, "", *markdown.markdown(["arm", "processes", "reached", "steps: median (range)"], rows), ""]


def _once(runs: Runs, protocol: Protocol, control: str) -> list[str]:
    found = verdict.same_weights(runs, protocol, control)
    rows = [
        [f"`{arm}`", f"`{other}`", "yes" if same else "no"]
        for arm, others in found.items()
        for other, same in others.items()
    ]
    if not rows:
        return []
    text = "One seed each: do these end with the arm's weights, bit by bit? Those that do are not run ten times."
    return [
        "## Strategies that train the same",
        "",
        text,
        "",
        *markdown.markdown(["arm", "strategy", "same"], rows),
        "",
    ]


def _basis(runs: Runs, protocol: Protocol, study: str) -> list[str]:
    first, last = (choose(run.started_at for run in runs.taken) for choose in (min, max))
    lines = [
        "## What it rests on",
        "",
        f"- {len(runs.taken)} runs, begun between {first} and {last}.",
        f"- The protocol, `study/studies/{study}.yaml`, was fixed on {protocol.fixed_on}.",
        f"- Pilot, not among them: {protocol.pilot}",
        *(f"- Left out by the protocol: {rule}" for rule in protocol.exclusions),
        *(f"- Left out: {run_id}, {reason}" for run_id, reason in runs.left_out.items()),
    ]
    if runs.deviating:
        lines.append(f"- Begun under another text of the protocol: {', '.join(sorted(runs.deviating))}")
    else:
        lines.append("- Every run was begun under the protocol as it stands: each outcome has the digest of its file.")
    return lines
