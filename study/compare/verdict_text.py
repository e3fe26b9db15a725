"""What came of a study that was fixed in advance, as a page of Markdown: the answer first, then what it rests on."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from study.compare import admitted, markdown, verdict
from study.compare.admitted import Runs, Wanted
from study.compare.verdict import Judged
from study.compare.words import processes
from study.records.protocol import Endpoint, Protocol

HEAD = ["arm", "processes", "seeds", "mean difference", "worst seed", "within the margin?", "further than a neighbour?"]


def page(
    folders: Sequence[Path],
    wanted: Iterable[Wanted],
    protocol: Protocol,
    study: str,
    sha256: str,
    question: str,
    control: str,
) -> str:
    """Make the page. Raises Refusal where the runs do not let the protocol's tests be made."""
    runs = admitted.read(folders, wanted, protocol, study, sha256)
    judged = verdict.judge(runs, protocol, control)
    lines = [f"# {question}", "", answer(judged, protocol, control), ""]
    for endpoint in protocol.endpoints:
        rows = [_row(row) for row in judged if row.endpoint == endpoint]
        apart, largest = verdict.neighbours_apart(runs, protocol, endpoint, control)
        confidence = f"{100 * (1 - 2 * protocol.significance):g} %"
        head = [f"{name} ({confidence})" if name == "mean difference" else name for name in HEAD]
        lines += [f"## {heading(endpoint)}", "", *markdown.markdown(head, rows), ""]
        lines += [
            f"Neighbours, {control.upper()} from weights one unit in the last place apart, are "
            f"{_size(apart, endpoint)} from one another (root mean square), at most {_size(largest, endpoint)}.",
            _planned(endpoint, protocol, judged),
            "",
        ]
    lines += [*_target(runs, protocol), *_once(runs, protocol), *_basis(runs, protocol, study)]
    return "\n".join([*lines, "", f"Made by `{markdown.command(f'verdict {study}', folders)}`."])


def answer(judged: Sequence[Judged], protocol: Protocol, control: str) -> str:
    """One paragraph for who reads no table: on the primary endpoint."""
    endpoint = next(endpoint for endpoint in protocol.endpoints if endpoint.primary)
    rows = [row for row in judged if row.endpoint == endpoint]
    same = [row for row in rows if row.equivalence == "same within the margin"]
    seeds = min(len(row.seeds) for row in rows)
    what = f"{_name(endpoint)} after {endpoint.step} steps, over {seeds} seeds,"
    shown = f"was shown to be below {_size(endpoint.margin, endpoint)}"
    first = f"For {len(same)} of {len(rows)} arms the mean difference from {control.upper()} in {what} {shown}"
    if others := [f"{_arm(row)} {row.equivalence}" for row in rows if row not in same]:
        first += f"; {', '.join(others)}"
    worst = max(rows, key=lambda row: float(np.abs(row.differences).max()))
    most = _size(float(worst.differences[np.argmax(np.abs(worst.differences))]), endpoint, True)
    further = [row for row in rows if row.further]
    than = f"than one unit in the last place of its initial weights carries {control.upper()}"
    second = (
        f"{', '.join(map(_arm, further))} {'is' if len(further) == 1 else 'are'} further from it {than}"
        if further
        else f"Of none was it shown that its runs are further from it {than}"
    )
    return (
        f"{first}. The single run furthest from its control is {_arm(worst)}'s: {most}. {second}. All of it is of one "
        "body, one split and one set of held-out text."
    )


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
    further = f"{'yes' if row.further else 'not shown'}: {row.distance:.2f} times as far, p {row.p_neighbour:.3f}"
    return [
        f"`{row.strategy}`",
        str(row.world_size),
        str(len(row.seeds)),
        interval,
        _size(float(worst), e, True),
        "yes" if row.equivalence == "same within the margin" else row.equivalence,
        further,
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


def _target(runs: Runs, protocol: Protocol) -> list[str]:
    target = protocol.target
    arms: dict[tuple[str, int, bool], list[int | None]] = {}
    for run in runs.taken:
        if run.label != protocol.once:
            key = (run.strategy, run.world_size, run.label in protocol.neighbours)
            arms.setdefault(key, []).append(verdict.reached(run, protocol))
    rows = []
    for (strategy, world_size, is_neighbour), steps in sorted(arms.items()):
        there = [step for step in steps if step is not None]
        rows.append(
            [
                f"`{strategy}`" + (", neighbours" if is_neighbour else ""),
                world_size,
                f"{len(there)} of {len(steps)}",
                f"{statistics.median(there):g} ({min(there)} to {max(there)})" if there else "none",
            ]
        )
    title = f"## Steps to a held-out loss of {target.loss:g} (looked at every {target.every} steps)"
    return [title, "", *markdown.markdown(["arm", "processes", "reached", "steps: median (range)"], rows), ""]


def _once(runs: Runs, protocol: Protocol) -> list[str]:
    words = {True: "yes", False: "no", None: "not shown: no such run"}
    found = verdict.same_weights(runs, protocol)
    rows = [[f"`{arm}`", f"`{other}`", words[same]] for (arm, other), same in found.items()]
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
    commits = ", ".join(f"{commit[:10]} ({n})" for commit, n in Counter(run.commit for run in runs.taken).most_common())
    return [
        "## What it rests on",
        "",
        f"- {len(runs.taken)} of {runs.num_planned} planned runs, begun between {first} and {last}.",
        f"- Commits of the code that ran, and how many: {commits}.",
        f"- The protocol is `study/studies/{study}.yaml`, fixed on {protocol.fixed_on}. Each of these runs was begun "
        "under this text: its outcome has the file's digest.",
        "- p of each endpoint are corrected for the number of arms (Holm), and not for the number of endpoints: the "
        "primary one decides.",
        f"- Pilot, not among them: {protocol.pilot}",
        *(f"- Left out by the protocol: {rule}" for rule in protocol.exclusions),
        *(f"- Left out: {run_id}, {reason}" for run_id, reason in sorted(runs.left_out.items())),
    ]
