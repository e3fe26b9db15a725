"""What a study that was fixed in advance decided: its answer, figure and tables, as `zero-study compare --verdict`."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from study.compare import verdict_text
from study.compare.verdict_text import MODELS, Decided
from study.compare.words import processes
from study.errors import Refusal
from study.report import markup
from study.report.figures.decided import decided as figure
from study.report.markup import Html
from study.report.pages.opening import lead
from study.report.pages.questions import losses
from study.report.pages.runs import in_project
from study.report.words import count, listed


def decide(folders: Sequence[str], study: str = "") -> list[Decided]:
    """Judge every study with a protocol whose runs lie here; `study` may be a file of the user's own.

    Raises Refusal where runs of no such study lie in folders that were named, and for what the protocols do not allow.
    """
    places = [in_project(name) for name in folders]
    found = verdict_text.decided_in(places, study)
    if places and not found:
        raise Refusal(f"{' '.join(folders)}: no run of a study that was fixed in advance lies here")
    return found


def decided_first(found: Sequence[Decided]) -> Html:
    """What the studies found: the answer of each."""
    first, *others = map(_bare, map(verdict_text.answer, found))
    return Html(f"{lead(first).text}\n{markup.paragraphs(*others)}" if others else lead(first).text)


def decided_drawn(found: Sequence[Decided]) -> Html:
    """The primary endpoint of each study."""
    parts = [
        f"<section>\n<h3>{markup.escape(each.study.question)}</h3>\n{figure(each)._repr_html_()}\n</section>"
        for each in found
    ]
    return Html("\n".join(parts))


def decided_choice(found: Sequence[Decided]) -> Html:
    """What of it follows for a choice of strategy."""
    judged = [row for each in found for row in each.on(each.primary)]
    apart = [f"{row.strategy} on {row.world_size}" for row in judged if row.equivalence in ("higher", "lower")]
    if apart:
        return Html(
            markup.paragraphs(f"{', '.join(apart)} learned otherwise than the control; see how far before you choose.")
        )
    unsure = sum(row.equivalence == "undecided" for row in judged)
    words = "These trainings give no reason to choose by what is learned; memory and time are left"
    words += f", though for {unsure} of {len(judged)} the margin could not be shown" if unsure else ""
    models = "one model" if len(found) == 1 else f"{len(found)} models"
    return Html(
        markup.paragraphs(
            f"{words}. They are of {models} of some millions of parameters, in fp32: of larger models, longer runs and "
            "16 bits they say nothing."
        )
    )


def decided_tables(found: Sequence[Decided]) -> Html:
    """Every endpoint arm by arm, what decides first; steps to the target, what trains the same, what it rests on."""
    parts = []
    for each in found:
        parts.append(f"<h3>{markup.escape(each.study.question)}</h3>\n{markup.paragraphs(_beyond_chance(each))}")
        for table in verdict_text.tables(each):
            columns = sorted(range(len(table.head)), key=lambda i: (i > 0, not table.head[i].endswith("?")))
            head = [table.head[i] for i in columns]
            rows = [[_cell(row[i]) for i in columns] for row in table.rows]
            parts.append(markup.table(table.title, head, [("", rows)], _bare(" ".join(table.notes)), head))
        basis = markup.items([_bare(line) for line in verdict_text.basis(each)])
        parts.append(markup.details("What it rests on: protocol, dates, code, what was left out", basis))
    return Html("\n".join(parts))


def _beyond_chance(study: Decided) -> str:
    """Which arms stray further than the smallest change carries the control, for who knows none of our words."""
    rows, control = study.on(study.primary), study.study.control
    further = [f"{row.strategy} on {processes(row.world_size)}" for row in rows if row.further]
    others = f"of the other {len(rows) - len(further)} this could not be shown" if further else ""
    found = (
        f"Trainings by {listed(further)} ended further from these than these end from one another, by more than "
        f"chance explains; {others}"
        if further
        else "Of no way to train could it be shown that its trainings end further from these than these do from one "
        "another"
    )
    return (
        f"How far does chance alone carry a training? Each plain one ({control}) was repeated "
        f"{count(len(study.protocol.neighbours), 'time')} with first weights that differ in nothing but their last "
        f"digit. {found}. All of it is of one starting model and one set of text that no training saw."
    )


def other_losses(runs: pd.DataFrame, compared: pd.DataFrame, control: str, found: Sequence[Decided]) -> Html:
    """The losses of runs whose question no study here was fixed in advance to decide: folded where there is one."""
    if not found:
        return losses(runs, compared, control)
    rest = runs[~runs["workload"].isin({each.workload for each in found})]
    if rest.empty:
        return Html("")
    what = listed([MODELS[workload] for workload in sorted(rest["workload"].unique())])
    seeds, steps = (rest.groupby("workload")[name] for name in ("seed", "num_steps"))
    least, most = int(steps.min().min()), int(steps.max().max())
    heading = (
        f"{what}: no study fixed in advance asks this of it. {count(int(seeds.nunique().max()), 'start')} of "
        f"{least if least == most else f'{least} to {most}'} steps, compared after they had run: a test that all ways "
        "compute the same, not of what is learned in the end"
    )
    return Html(markup.details(heading, losses(rest, compared, control).text))


def _cell(cell: object) -> str | Html:
    """What stands in parentheses below what it is of: a phone has no room beside."""
    first, _, rest = _bare(cell).partition(" (")
    return Html(f"{markup.escape(first)}<small>{markup.escape(rest.removesuffix(')'))}</small>") if rest else first


def _bare(cell: object) -> str:
    """Without Markdown's quotes of code."""
    return str(cell).replace("`", "")
