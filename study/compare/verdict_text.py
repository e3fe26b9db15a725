"""The page of a study that was fixed in advance: its answer, a table per endpoint, and what these rest on."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from study.compare import admitted, verdict, words
from study.compare.admitted import Runs, Wanted
from study.compare.verdict import SAME, Judged
from study.compare.words import processes, signed_percent
from study.files import parse_yaml
from study.records import find as records
from study.running import studies
from study.running.studies import Endpoint, Protocol, Study

MODELS = {"bert-imdb": "BERT", "gpt-wikitext": "GPT"}
DEVIATIONS = Path(__file__).with_name("deviations.yaml")  # no part of a protocol, whose digest the runs bear
ONE_START = 5  # times as far as the next: then a mean over starts tells of one of them


class Table(NamedTuple):
    """A table and the sentences below it."""

    title: str
    head: Sequence[str]
    rows: list[list[Any]]  # in Markdown
    notes: Sequence[str] = ()


class Decided(NamedTuple):
    """A study with its runs, judged."""

    study: Study
    runs: Runs
    judged: list[Judged]
    protocol: Protocol

    @property
    def primary(self) -> Endpoint:
        return next(endpoint for endpoint in self.protocol.endpoints if endpoint.primary)

    @property
    def model(self) -> str:
        return MODELS[self.workload]

    @property
    def workload(self) -> str:
        return str(self.study.parts[0].flags.get("workload", "bert-imdb"))

    def on(self, endpoint: Endpoint) -> list[Judged]:
        return [row for row in self.judged if row.endpoint == endpoint]


def decide(folders: Sequence[Path], study: Study) -> Decided:
    """Judge a study that has a protocol. Raises Refusal where the runs do not let the protocol's tests be made."""
    assert study.protocol is not None
    runs = admit(folders, study)
    return Decided(study, runs, verdict.judge(runs, study.protocol, study.control), study.protocol)


def admit(folders: Sequence[Path], study: Study) -> Runs:
    """Take the runs that the protocol of a study lets in. Raises Refusal as `admitted.read`."""
    assert study.protocol is not None
    wanted = [Wanted(run.run_id, run.strategy.name, run.world_size, run.config) for run in studies.runs(study)]
    return admitted.read(folders, wanted, study.protocol, study.name, study.sha256)


def decided_in(folders: Sequence[Path], own: str = "") -> list[Decided]:
    """Judge every study with a protocol of which runs lie here; `own` may be a file of the user's. As `decide`."""
    names = sorted({run.outcome.study for run in records.find_runs(folders) if run.outcome}) if folders else []
    chosen = [studies.find(own if Path(own).stem == name else name) for name in names]
    return [decide(folders, study) for study in chosen if study.protocol is not None]


def page(folders: Sequence[Path], study: Study) -> str:
    """Make the page of a study that has a protocol, in Markdown. Raises Refusal."""
    decided = decide(folders, study)
    lines = []
    for table in tables(decided):
        lines += [f"## {table.title}", "", *words.markdown(table.head, table.rows), ""]
        lines += [*table.notes, ""] if table.notes else []
    lines += ["## What it rests on", "", *(f"- {line}" for line in basis(decided)), ""]
    return words.page(study.question, answer(decided), lines, f"--verdict {study.name}", folders)


# ---------------------------------------------------------------- sentences


def _not_falling(decided: Decided) -> str:
    """A sentence where the control's held-out loss does not fall from the first look to the last."""
    runs = [run for run in decided.runs.taken if run.strategy == decided.study.control and not run.label]
    control = [run.held_out for run in runs]
    steps = sorted(set.intersection(*(set(each) for each in control)))
    first, last = (float(np.mean([each[step]["loss"] for each in control])) for step in (steps[0], steps[-1]))
    if last < first:
        return ""
    return (
        f" The {decided.model}'s loss does not fall meanwhile ({first:.3f} after {steps[0]} steps, {last:.3f} after "
        f"{steps[-1]}): this compares {steps[-1]} updates, and says nothing of learning."
    )


def _one_start(rows: Sequence[Judged]) -> str:
    """A sentence where all that is seen is one start's: what a mean and its interval cannot say."""
    by_seed: dict[int, float] = {}
    for row in rows:
        for seed, difference in zip(row.seeds, row.differences, strict=True):
            by_seed[seed] = max(by_seed.get(seed, 0.0), abs(float(difference)))
    *others, largest = sorted(by_seed.values())
    if largest <= ONE_START * others[-1]:  # nothing moved at all, too
        return ""
    return (
        f" Nearly all of that is one start of {len(by_seed)}: in the others no training moved by more than "
        f"{_size(others[-1], rows[0].endpoint)}. So larger shifts in rarer starts are not excluded."
    )


def answer(decided: Decided) -> str:
    """One paragraph on the primary endpoint, with every arm that was not shown to be the same."""
    endpoint, rows, control = decided.primary, decided.on(decided.primary), decided.study.control
    same = [row for row in rows if row.equivalence == SAME]
    what = f"{_name(endpoint)} after {endpoint.step} steps, over {_seeds(rows)} seeds,"
    shown = f"was shown to be below {_size(endpoint.margin, endpoint)}"
    first = f"For {len(same)} of {len(rows)} arms the mean difference from {control.upper()} in {what} {shown}"
    if others := [f"{_arm(row)} {row.equivalence}" for row in rows if row not in same]:
        first += f"; {', '.join(others)}"
    worst, by = _furthest(rows)
    further = [row for row in rows if row.further]
    than = f"than one unit in the last place of its initial weights carries {control.upper()}"
    second = (
        f"{', '.join(map(_arm, further))} {'is' if len(further) == 1 else 'are'} further from it {than}"
        if further
        else f"Of none was it shown that its runs are further from it {than}"
    )
    bodies = len({run.body for run in decided.runs.taken})
    started = "one body" if bodies == 1 else f"{bodies} bodies"
    return (
        f"{first}. The single run furthest from its control, by {_size(by, endpoint, True)}, is of {_arm(worst)}."
        f"{_one_start(rows)}{_not_falling(decided)} {second}. All of it is of {started}, one split and "
        "one set of held-out text."
    )


def heading(endpoint: Endpoint) -> str:
    kind = "primary" if endpoint.primary else "secondary"
    return f"{_name(endpoint).capitalize()}, step {endpoint.step}: {kind}, margin {_size(endpoint.margin, endpoint)}"


def _seeds(rows: Sequence[Judged]) -> int:
    """How many seeds every arm has."""
    return min(len(row.seeds) for row in rows)


def _furthest(rows: Sequence[Judged]) -> tuple[Judged, float]:
    """The arm of the run that is furthest from its control, and by how much."""
    worst = max(rows, key=lambda row: float(np.abs(row.differences).max()))
    return worst, float(worst.differences[np.argmax(np.abs(worst.differences))])


def _name(endpoint: Endpoint) -> str:
    return f"held-out {endpoint.metric}"


def _arm(row: Judged) -> str:
    return f"`{row.strategy}` on {processes(row.world_size)}"


def _size(value: float, endpoint: Endpoint, signed: bool = False) -> str:
    """A difference in the margin's unit, for people."""
    number = np.format_float_positional(100 * value, precision=2, fractional=False, trim="-", sign=signed)
    return f"{number} {'point' if number == '1' and endpoint.metric == 'accuracy' else _unit(endpoint)}"


def _unit(endpoint: Endpoint) -> str:
    return "points" if endpoint.metric == "accuracy" else "%"


# ---------------------------------------------------------------- tables


def tables(decided: Decided) -> list[Table]:
    """A table for each endpoint, the steps to the target, and what trains the same to the bit."""
    found = [_of_endpoint(decided, endpoint) for endpoint in decided.protocol.endpoints]
    found += [_target(decided.runs, decided.protocol), _training(decided)]
    same = verdict.same_weights(decided.runs, decided.protocol)
    if same:
        words = {True: "yes", False: "no", None: "not shown: no such run"}
        rows = [[f"`{arm}`", f"`{other}`", words[same]] for (arm, other), same in same.items()]
        text = "One seed each: do these end with the arm's weights, bit by bit? Those that do are not run ten times."
        found.append(Table("Strategies that train the same", ["arm", "strategy", "same"], rows, [text]))
    return found


def _of_endpoint(decided: Decided, endpoint: Endpoint) -> Table:
    protocol, control, judged = decided.protocol, decided.study.control, decided.on(endpoint)
    apart = verdict.neighbours_apart(decided.runs, protocol, endpoint, control)
    unit = _unit(endpoint)
    confidence = f"{100 * (1 - 2 * protocol.significance):g} %"
    head = [
        "arm",
        f"mean difference, {unit} ({confidence})",
        f"worst seed, {unit}",
        "within?",
        "further than a neighbour?",
    ]
    rms, largest = float(np.sqrt((apart**2).mean())), float(np.abs(apart).max())
    spread = (
        f"Neighbours, {control.upper()} from weights one unit in the last place apart, are {_size(rms, endpoint)} from "
        f"one another (root mean square), at most {_size(largest, endpoint)}."
    )
    planned = verdict.power(endpoint.planned_sd, endpoint.margin, _seeds(judged), protocol.significance)
    lowest = min(judged, key=lambda row: (row.power, -row.differences.std()))
    power = (
        f"Power of the test for the margin, were there no difference and were runs spread normally: planned "
        f"{_power(planned)} (spread {_size(endpoint.planned_sd, endpoint)}, from the pilot), reached "
        f"{_power(lowest.power)} at the least ({_arm(lowest)}, spread "
        f"{_size(float(lowest.differences.std(ddof=1)), endpoint)})."
    )
    return Table(heading(endpoint), head, [_row(row, _seeds(judged)) for row in judged], [spread, power])


def _power(power: float) -> str:
    return "above 0.99" if power > 0.99 else f"{power:.2f}"


def _row(row: Judged, seeds: int) -> list[str]:
    worst = row.differences[np.argmax(np.abs(row.differences))]
    mean, low, high = map(signed_percent, (row.mean, row.low, row.high))
    p = "< 0.001" if row.p_neighbour < 0.001 else f"{row.p_neighbour:.3f}"
    more = f", {len(row.seeds)} seeds" if len(row.seeds) > seeds else ""
    return [
        f"`{row.strategy}` on {row.world_size}{more}",
        f"{mean} ({low} to {high})",
        signed_percent(float(worst)),
        "yes" if row.equivalence == SAME else row.equivalence,
        f"{'yes' if row.further else 'not shown'} ({row.distance:.2f} times as far, p {p})",
    ]


def _target(runs: Runs, protocol: Protocol) -> Table:
    target = protocol.target
    arms: dict[tuple[str, int, bool], list[int | None]] = {}
    for run in runs.taken:
        if run.label != protocol.once:
            key = (run.strategy, run.world_size, run.label in protocol.neighbours)
            arms.setdefault(key, []).append(verdict.reached(run, protocol))
    rows: list[list[Any]] = []
    for (strategy, world_size, is_neighbour), steps in sorted(arms.items()):
        there = [step for step in steps if step is not None]
        rows.append(
            [
                f"`{strategy}` on {world_size}" + (", neighbours" if is_neighbour else ""),
                f"{len(there)} of {len(steps)}",
                f"{statistics.median(there):g} ({min(there)} to {max(there)})" if there else "none",
            ]
        )
    title = f"Steps to a held-out loss of {target.loss:g} (looked at every {target.every} steps)"
    return Table(title, ["arm", "reached", "steps: median (range)"], rows)


def _training(decided: Decided) -> Table:
    runs, control = decided.runs, decided.study.control
    ensembles = verdict.find_ensembles(runs, decided.protocol, control)
    rows = []
    for arm in decided.on(decided.primary):
        by_seed = runs.of(arm.strategy, arm.world_size)
        each = [
            by_seed[seed].training_loss / statistics.mean(run.training_loss for run in ensembles[seed]) - 1
            for seed in arm.seeds
        ]
        worst = max(each, key=abs)
        mean = signed_percent(statistics.mean(each))
        rows.append([f"`{arm.strategy}` on {arm.world_size}", mean, signed_percent(worst)])
    note = "No endpoint, and no test is made of it: what a training says of text that it has seen comes last."
    title = f"Training loss, mean of the last {admitted.LAST_STEPS} steps"
    return Table(title, ["arm", "mean difference, %", "worst seed, %"], rows, [note])


# ---------------------------------------------------------------- what it rests on


def basis(decided: Decided) -> list[str]:
    """When, by which code and under which text the runs were made; what was left out; the pilot; what deviated."""
    runs, protocol, name = decided.runs, decided.protocol, decided.study.name
    history = parse_yaml(DEVIATIONS.read_text()).get(name, {"committed": "nobody has noted which commit"})
    first, last = (choose(run.started_at for run in runs.taken) for choose in (min, max))
    commits = ", ".join(f"{commit[:10]} ({n})" for commit, n in Counter(run.commit for run in runs.taken).most_common())
    return [
        f"{len(runs.taken)} of {runs.num_planned} planned runs, begun between {first} and {last}.",
        f"Commits of the code that ran, and how many: {commits}.",
        f"The protocol is `study/studies/{name}.yaml`, fixed on {protocol.fixed_on} by {history['committed']}. "
        "Each of these runs was begun under this text: its outcome has the file's digest.",
        "p of each endpoint are corrected for the number of arms (Holm), and not for the number of endpoints: the "
        "primary one decides.",
        f"Pilot, not among them: {protocol.pilot}",
        *(f"Left out by the protocol: {rule}" for rule in protocol.exclusions),
        *(f"Left out: {run_id}, {reason}" for run_id, reason in sorted(runs.left_out.items())),
        *(f"Deviates from what was fixed: {deviation}" for deviation in history.get("deviations", ())),
    ]
