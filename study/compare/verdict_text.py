"""Make the page of a study with a protocol: its answer, a table of strategies, and the evidence behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from study.compare import eligible_runs, verdict, view
from study.compare.eligible_runs import PlannedRun, Runs
from study.compare.verdict import Arm, Verdict
from study.records import find as records
from study.running import studies
from study.running.studies import Study
from zero_study import terminal
from zero_study.files import parse_yaml
from zero_study.terminal import percent, signed_percent
from zero_study.verdict import Checked, NotChecked
from zero_study.verdict import Verdict as CheckVerdict

DEVIATIONS = Path(__file__).with_name("deviations.yaml")  # separate, because the protocol must not change
SHARES, PARTINGS = (1 / 24, 1 / 8, 1 / 4), (0.003, 0.01)  # for which the page shows the power


class Decided(NamedTuple):
    """A study with a protocol, together with its runs and its verdict."""

    study: Study
    runs: Runs
    verdict: Verdict
    elsewhere: dict[str, dict[int, float]]  # arms of the protocol's `broken_study`, for `verdict.judge`


def decide(folders: Sequence[Path], study: Study) -> Decided:
    """Return the verdict on a study that has a protocol. Raises Refusal if its runs are not enough for the tests."""
    assert study.protocol is not None
    runs, elsewhere = admit(folders, study), {}
    if broken_study := study.protocol.broken_study:
        # That study uses other releases of the engines, so only its losses are compared with these runs.
        broken = admit(folders, studies.find(broken_study), study)
        _, differences = verdict.differences_from_control(
            broken._replace(taken=[*runs.taken, *(run._replace(label=broken_study) for run in broken.taken)]),
            study.protocol.step,
            study.control,
        )
        elsewhere = {broken_study: differences[broken_study]}
    return _judged(study, runs, elsewhere)


def _judged(study: Study, runs: Runs, elsewhere: dict[str, dict[int, float]]) -> Decided:
    assert study.protocol is not None
    return Decided(study, runs, verdict.judge(runs, study.protocol, study.control, elsewhere), elsewhere)


def _without(decided: Decided, starts: Collection[int]) -> Decided:
    """Return the same study with a new verdict, made without the runs of some seeds."""
    runs = decided.runs._replace(taken=[run for run in decided.runs.taken if run.seed not in starts])
    remaining = {
        name: {at: by for at, by in arm.items() if at not in starts} for name, arm in decided.elsewhere.items()
    }
    return _judged(decided.study, runs, remaining)


def decided_in(folders: Sequence[Path]) -> list[Decided]:
    """Return the verdict on every study that has a protocol and runs below the folders.

    Raises Refusal as `decide` does.
    """
    names = sorted({run.outcome.study for run in records.find_runs(folders) if run.outcome})
    return [decide(folders, study) for study in map(studies.find, names) if study.protocol is not None]


def admit(folders: Sequence[Path], study: Study, of: Study | None = None) -> Runs:
    """Return the runs of a study, divided into admitted, excluded and missing runs by a protocol.

    The protocol is that of the study `of`, by default the study's own. Raises Refusal as `eligible_runs.read` does.
    """
    protocol = (of or study).protocol
    assert protocol is not None
    needed = [PlannedRun(run.run_id, run.strategy.name, run.world_size, run.config) for run in studies.runs(study)]
    return eligible_runs.read(folders, needed, protocol, study.name, study.sha256)


class Judged(NamedTuple):
    """The Markdown page of a study that has a protocol, and the verdict that the exit status follows from."""

    page: str
    verdict: CheckVerdict
    not_shown: list[str]  # strategies that are not shown to train to the same loss as the control


def judge(folders: Sequence[Path], study: Study) -> Judged:
    """Return the page and the verdict of a study that has a protocol.

    Raises Refusal as `decide` does.
    """
    decided = decide(folders, study)
    result = decided.verdict
    not_shown = [] if result.lacks else _further([arm for arm in result.arms if not arm.is_broken])
    return Judged(_page(decided, folders), _check(decided), not_shown)


def _check(decided: Decided) -> CheckVerdict:
    """Return the verdict for the exit status: what a study found, compared, and could not compare."""
    result, study, runs = decided.verdict, decided.study, decided.runs
    arms = [arm for arm in result.arms if not arm.is_broken]
    labels = (*study.protocol.variants, *study.protocol.broken) if study.protocol else ()
    planned = {run.strategy.name for run in studies.runs(study) if not eligible_runs.label_of(run.run_id, labels)} - {
        study.control
    }
    absent = sorted(planned - {arm.name for arm in arms})
    num_runs = sum(len(arm.differences) for arm in arms)
    left_out = Counter(runs.left_out.values())
    return CheckVerdict.of(
        0 if result.lacks else len(_further(arms)),
        [Checked(num_runs, "run", f"of {terminal.count(len(arms), 'strategy', 'strategies')} compared with "
                 f"{study.control}")],
        [
            *(NotChecked("a condition of the protocol", lack, True) for lack in result.lacks),
            *(NotChecked(name, "the protocol admits none of its runs", True) for name in absent),
            *(NotChecked(terminal.count(number, "run"), reason) for reason, number in left_out.items()),
        ],
    )  # fmt: skip


def _further(arms: Sequence[Arm]) -> list[str]:
    """Return the strategies that were not shown to train to the same loss as the control."""
    return [arm.name for arm in arms if arm.is_further or not arm.is_within]


def _page(decided: Decided, folders: Sequence[Path]) -> str:
    study = decided.study
    lines = [*table_of_arms(decided), "", *_null(decided), ""]
    if still := decided.verdict.still:
        later = _without(decided, still)
        text = (
            f"These seeds were left out after the result was known, which the protocol does not allow. {answer(later)}"
        )
        starts = ", ".join(map(str, still))
        lines += [
            f"## Without the seeds with which the control hardly learns ({starts})",
            "",
            text,
            "",
            *table_of_arms(later),
            "",
        ]
    lines += ["## Evidence", "", *(f"- {line}" for line in basis(decided)), ""]
    return view.page(study.question, answer(decided), lines, f"--verdict {study.name}", folders)


def table_of_arms(decided: Decided) -> list[str]:
    """Return a Markdown table of the differences of all strategies and injected faults from the baseline."""
    control = decided.study.control
    head = ["trained with", "seeds", f"mean difference from {control}", "90 % interval", "largest difference",
            f"distance relative to {control}'s variations", "p", "seeds beyond all variations",
            "share of all seeds, at most"]  # fmt: skip
    return terminal.markdown(head, map(_row, decided.verdict.arms))


def answer(decided: Decided) -> str:
    """Return the verdict on a study as sentences."""
    result = decided.verdict
    if result.lacks:
        return f"There is no verdict, because a condition of the protocol is not met: {'; '.join(result.lacks)}."
    arms = [arm for arm in result.arms if not arm.is_broken]
    if not arms:
        return "There is no verdict, because the protocol admits no run of any strategy."
    further = _further(arms)
    starts = min(len(arm.differences) for arm in arms)
    parted = max(arm.num_parted for arm in arms)
    most = max(arm.most_parted for arm in arms)
    margin, control = decided.study.protocol.margin if decided.study.protocol else 0.0, decided.study.control
    if further:
        names = ", ".join(further)
        return f"The study does not show that these strategies train to the same loss as {control}: {names}."
    names = ", ".join(arm.name for arm in arms)
    num_faults = sum(arm.is_broken for arm in result.arms)
    faults = "the planted fault" if num_faults == 1 else f"all {num_faults} planted faults"
    seeds = f"at most {parted} of {starts} seeds" if parted else f"none of {starts} seeds"
    return (
        f"The test detected {faults}. It flagged none of the tested strategies ({names}). The mean held-out loss of "
        f"each "
        f"strategy differs from {control}'s by less than {percent(margin)}. With {seeds}, a strategy's "
        f"final loss is further from {control}'s than that of any {control} training that differs only "
        f"in rounding. With so few seeds, the true share of seeds with such a difference could be as "
        f"high as {percent(most)} (95 % confidence)."
    )


def _row(arm: Arm) -> list[str]:
    worst = max(arm.differences.values(), key=abs)
    return [
        f"`{arm.name}`" + (" (planted fault)" if arm.is_broken else ""),
        str(len(arm.differences)),
        f"{signed_percent(arm.mean)} %",
        f"{signed_percent(arm.low)} to {signed_percent(arm.high)} %",
        f"{signed_percent(worst)} %",
        f"{arm.distance:.3g}",
        "< 0.001" if arm.p < 0.001 else f"{arm.p:.3f}",
        str(arm.num_parted),
        percent(arm.most_parted),
    ]


def _null(decided: Decided) -> list[str]:
    """Return sections about control runs with other rounding errors, and about the power of a study of this size."""
    result, protocol, control = decided.verdict, decided.study.protocol, decided.study.control
    assert protocol is not None
    whole = sorted(set.intersection(*(set(each) for each in result.null.values())))
    rows = [
        [f"`{name}`", str(len(each)), percent(float(np.median(np.abs(list(each.values()))))),
         percent(max(map(abs, each.values())))]
        for name, each in result.null.items()
    ]  # fmt: skip
    beside = np.array([[each[start] for each in result.null.values()] for start in whole])
    power = [
        [percent(share), *(f"{verdict.power(beside, len(whole), share, by, protocol):.2f}" for by in PARTINGS)]
        for share in SHARES
    ]
    falls = [1 - last / first for first, last in result.falls.values()]
    return [
        f"## Variations: {control}'s own training with other rounding",
        "",
        *terminal.markdown(["variation", "seeds", "median difference", "largest difference"], rows),
        "",
        f"In {100 * result.share_noticed:.0f} % of the seeds, the final loss of a variation differs from "
        f"that of {control} by at least {percent(protocol.noticed)}. The held-out loss of {control} "
        f"falls by {percent(min(falls))} to {percent(max(falls))}.",
        "",
        "## Which differences the study would have detected",
        "",
        "The table was simulated from the differences above. The table gives the probability that the study detects a "
        "strategy whose loss differs from the control's by the given amount, in the given share of seeds.",
        "",
        *terminal.markdown(["share of seeds", *(f"difference of {percent(by)}" for by in PARTINGS)], power),
    ]


def basis(decided: Decided) -> list[str]:
    """Return lines that describe how the runs of a study were made.

    They name the dates, the commits, the protocol's file, the pilot runs, the runs that were left out, and deviations
    from the protocol.
    """
    runs, protocol, name = decided.runs, decided.study.protocol, decided.study.name
    assert protocol is not None
    history = parse_yaml(DEVIATIONS.read_text()).get(name, {"committed": "an unknown commit"})
    first, last = (choose(run.started_at for run in runs.taken) for choose in (min, max))
    commits = ", ".join(f"{commit[:10]} ({n})" for commit, n in Counter(run.commit for run in runs.taken).most_common())
    return [
        f"{len(runs.taken)} of {runs.num_planned} planned runs, started between {first} and {last}.",
        f"Commits of the code, with the number of runs: {commits}.",
        f"The protocol is `study/studies/{name}.yaml`, fixed on {protocol.fixed_on} by {history['committed']}. "
        "None of these runs used another version of the protocol: each outcome has the digest of the file.",
        f"Pilot runs, which do not count: {protocol.pilot}",
        *(f"Left out by the protocol: {rule}" for rule in protocol.exclusions),
        *(f"Left out: {run_id}, {reason}" for run_id, reason in sorted(runs.left_out.items())),
        *(f"Deviation from the protocol: {deviation}" for deviation in history.get("deviations", ())),
    ]
