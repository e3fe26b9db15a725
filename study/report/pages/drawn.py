"""Which figures does a page show, and what stands beside what? Each is of one box, setting and number of processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pandas as pd

from study.compare import table
from study.compare.words import processes
from study.report import figures, markup
from study.report.figures import Figure
from study.report.markup import Html
from study.report.pages.opening import times_decide
from study.report.pages.runs import SETTING, bit_identical, blocks, boxes, once, worlds

Draw = Callable[[pd.DataFrame], Figure]


def drawn(runs: pd.DataFrame, draw: Draw, by_world: bool = True) -> Html:
    """A figure of each setting and number of processes; those of several boxes stand side by side."""
    rows = []
    for block in blocks(runs):
        parts = [members for _, members in worlds(block.runs)] if by_world else [block.runs]
        rows.append((block.words, [[part[part["box"] == box] for part in parts] for box in boxes(runs)]))
    return _side_by_side(rows, draw)


def compared_drawn(runs: pd.DataFrame, compared: pd.DataFrame, draw: Draw, metric: str) -> Html:
    """A figure of the comparisons of one metric, for each setting; those of several boxes stand side by side."""
    of_metric = compared[compared["metric"] == metric]
    if metric == "final_loss":
        of_metric = once(of_metric, runs)
    of_setting = dict(list(of_metric.groupby(list(SETTING))))
    rows = [
        (block.words, [[of_setting[block.key][of_setting[block.key]["box"] == box]] for box in boxes(runs)])
        for block in blocks(runs)
        if block.key in of_setting
    ]
    return _side_by_side(rows, draw)


def answer_drawn(runs: pd.DataFrame, compared: pd.DataFrame) -> Html:
    """The figure that shows the answer: memory against time where times decide, else what was learned."""
    if times_decide(compared):
        return drawn(runs, figures.pareto)
    return compared_drawn(runs, compared, figures.differences, "final_loss")


def times_drawn(runs: pd.DataFrame, compared: pd.DataFrame) -> Html:
    """Every run's time, and the differences to the control; nothing where times decide nothing."""
    if not times_decide(compared):
        return Html("")
    differences = compared_drawn(runs, compared, figures.differences, "seconds_per_step")
    return Html(f"{drawn(runs, figures.runtime).text}\n<h2>The difference to the control</h2>\n{differences.text}")


def worlds_drawn(runs: pd.DataFrame, compared: pd.DataFrame) -> Html:
    """Each setting against the number of processes: model states, and speed where times decide."""
    with_speed = times_decide(compared)
    return drawn(runs, lambda part: figures.world_sizes(part, with_speed), by_world=False)


def loss_curves(control: str) -> Draw:
    """What draws losses beside the control's; of strategies that ended bit-identical, one."""

    def draw(runs: pd.DataFrame) -> Figure:
        alike = [[control, *names] if control in names else names for names in bit_identical(runs)]
        kept = runs[runs["strategy"].isin([names[0] for names in alike])]
        figure = figures.loss_curves(table.steps(kept), control, kept)
        once = [" = ".join(dict.fromkeys(names)) for names in alike if len(set(names)) > 1]
        more = f" Bit-identical in the end, and drawn once: {'; '.join(once)}." if once else ""
        return dataclasses.replace(figure, caption=figure.caption + more)

    return draw


def _side_by_side(rows: Sequence[tuple[str, list[list[pd.DataFrame]]]], draw: Draw) -> Html:
    """One column per box for each setting; where there is one box, settings stand side by side."""
    columns = [
        (markup.escape(words), ["".join(_figure(runs, draw) for runs in column if len(runs)) for column in by_box])
        for words, by_box in rows
    ]
    if all(len(by_box) == 1 for _, by_box in columns):
        parts = [f"<section>\n<h3>{words}</h3>\n{figure}\n</section>" for words, (figure,) in columns]
        return Html(f'<div class="beside">\n{"".join(parts)}\n</div>')
    parts = [
        f'<h3>{words}</h3>\n<div class="beside">\n{"".join(f"<div>{figure}</div>" for figure in by_box)}\n</div>'
        for words, by_box in columns
    ]
    return Html("\n".join(parts))


def _figure(runs: pd.DataFrame, draw: Draw) -> str:
    try:
        return draw(runs)._repr_html_()
    except ValueError as nothing:  # the figures' word for: there is nothing to draw
        where = f"{runs['box'].iloc[0]}, {processes(runs['world_size'].max())}"
        return markup.paragraphs(f"No figure for {where}: {nothing}.", kind="note")
