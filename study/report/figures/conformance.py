"""Where do engines train what they say? Grids of verdicts: of one installation, and over the releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from study.engines.conformance import committed, matrix_text
from study.report.figures.drawing import INK, Figure, below, finish, house_style, panels, rows

LOOKS: dict[str, dict[str, Any]] = {
    "same": {"marker": ".", "color": "#009E73", "s": 22},
    "wrong": {"marker": "X", "color": "#D55E00", "s": 60, "linewidth": 0},
    "refused": {"marker": "_", "color": INK, "s": 36},
    "crashed": {"marker": "s", "facecolor": "none", "edgecolor": INK, "s": 28},
}
MEANINGS = {"same": "same", "wrong": "wrong, and silent", "refused": "refused", "crashed": "stopped with an error"}
NAMES = {"deepspeed": "DeepSpeed", "accelerate": "accelerate", "torch": "torch"}
MOST_GROUPS = 12  # that are drawn without a choice


def installation(matrix: Mapping[str, Any]) -> Figure:
    """The cells of one installation: engines and classes down, what is asked of them across; the worst of its ranks."""
    columns: dict[str, list[str]] = {}
    for name in matrix["cells"]:
        columns.setdefault(committed.column_of(name), []).append(name)
    at = {
        (group, column): verdict
        for column, names in columns.items()
        for group, verdict in committed.by_group(matrix, names).items()
    }
    ordered = sorted(columns, key=lambda column: not column.startswith("micro"))
    deepspeed = matrix["versions"]["deepspeed"]
    caption = (
        f"DeepSpeed {deepspeed} and torch {matrix['versions']['torch']} on a CPU, by engine, precision class and what "
        "was asked: the worst verdict of one and two processes. Wrong means further from a reference without an engine "
        "than rounding explains, with no message and exit status 0."
    )
    return _grid("conformance", list(matrix_text.grouped(matrix["cells"])), ordered, at, caption)


def releases(package: str, verdicts: Mapping[str, Mapping[str, str]], beside: str) -> Figure:
    """Plain training under each release of a package: releases down, for they are many; engines and classes across.

    `verdicts`: by release and its date, the worst of each engine and class. `beside`: the versions of the other
    packages. Where there are too many to read, only engines and classes that ever are not the same.
    """
    groups = list(dict.fromkeys(group for found in verdicts.values() for group in found))
    whole = len(groups) <= MOST_GROUPS
    if not whole:
        groups = [group for group in groups if any(found.get(group, "same") != "same" for found in verdicts.values())]
    at = {(version, group): found[group] for version, found in verdicts.items() for group in groups if group in found}
    caption = (
        f"Plain training on two processes under each release of {NAMES[package]}, with {beside}: the worst of four "
        f"cells, with one and two micro batches, clipped and not."
        f"{'' if whole else ' Engines and classes that are the same throughout are left out.'}"
    )
    return _grid(f"conformance-{package}", list(verdicts), groups, at, caption)


def _grid(
    name: str, down: Sequence[str], across: Sequence[str], at: Mapping[tuple[str, str], str], caption: str
) -> Figure:
    with house_style(name):
        canvas, (ax,) = panels([0.24 * len(down) + 1.3])
        rows(ax, [row.replace("_", " ") for row in down])
        for verdict, look in LOOKS.items():
            places = [(across.index(column), down.index(row)) for (row, column), v in at.items() if v == verdict]
            ax.scatter(*zip(*places, strict=True), **look) if places else None
        heads = [column.replace("_", " ") for column in across]
        ax.set_xticks(range(len(across)), heads, rotation=75, ha="left", rotation_mode="anchor")
        ax.xaxis.tick_top()
        ax.set_xlim(-0.6, len(across) - 0.4)
        used = [verdict for verdict in LOOKS if verdict in at.values()]
        handles = [ax.scatter([], [], **LOOKS[verdict]) for verdict in used]
        below(canvas, handles, [MEANINGS[verdict] for verdict in used])
        told = [
            f"{row}: {', '.join(f'{column} {at[row, column]}' for column in across if (row, column) in at)}"
            for row in down
        ]
        return finish(canvas, name, f"Verdicts by row. {'; '.join(told)}.", caption)
