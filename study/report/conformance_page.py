"""The page of releases: what each of them trains beside what it says, from the committed matrices."""

from __future__ import annotations

from collections import Counter

from study.engines.conformance import committed
from study.engines.conformance.cells import TWISTS, of_release
from study.report import figures, markup
from study.report.drawing import Figure
from study.report.markup import Html, count

MOST_GROUPS = 12  # engines and classes that are drawn without a choice
VERDICTS = ("same", "wrong", "refused", "crashed")


def tally() -> Html:
    """How many cells of the newest installation came to which verdict: plain training, and each twist."""
    newest = committed.newest()
    counts: dict[str, Counter[str]] = {}
    for name, cell in newest["cells"].items():
        counts.setdefault(committed.twist_of(name), Counter())[cell["verdict"]] += 1
    rows = [
        [TWISTS[twist] if twist else "plain training", *(counts[twist][verdict] for verdict in VERDICTS)]
        for twist in sorted(counts, key=bool)
    ]
    rows.append(["all", *(sum(found[verdict] for found in counts.values()) for verdict in VERDICTS)])
    caption = f"DeepSpeed {newest['versions']['deepspeed']}, torch {newest['versions']['torch']}, on a CPU"
    note = "Wrong: further from a reference without an engine than rounding explains, with no message and status 0."
    return markup.table(caption, ["asked", *VERDICTS], [("", rows)], note)


def installation() -> Figure:
    """The newest installation: engines and classes down, what is asked of them across, and the worst verdict."""
    newest = committed.newest()
    columns: dict[str, list[str]] = {}
    for name in newest["cells"]:
        columns.setdefault(committed.column_of(name), []).append(name)
    at = {
        (group, column): verdict
        for column, names in columns.items()
        for group, verdict in committed.by_group(newest, names).items()
    }
    ordered = sorted(columns, key=lambda column: not column.startswith("micro"))
    title = f"DeepSpeed {newest['versions']['deepspeed']}: the worst verdict of one and two processes"
    return figures.verdict_grid("conformance", title, list(committed.grouped(newest["cells"])), ordered, at)


def by_release(package: str) -> Figure:
    """Plain training under each release of a package: releases down, for they are many; engines and classes across.

    Where there are too many to read, only engines and classes that ever are not the same.
    """
    asked = {cell.name for cell in of_release([package])}
    dates = committed.released(package)
    at = {
        (f"{version}, {dates[version]}" if version in dates else version, group): verdict
        for version, matrix in committed.read(package).items()
        for group, verdict in committed.by_group(matrix, asked).items()
    }
    groups = list(dict.fromkeys(group for _, group in at))
    if len(groups) > MOST_GROUPS:
        groups = [group for group in groups if any(at[of] != "same" for of in at if of[1] == group)]
    shown = {of: verdict for of, verdict in at.items() if of[1] in groups}
    versions = list(dict.fromkeys(version for version, _ in at))
    title = f"Plain training under each release of {package}: the worst of one and two micro batches, clipped and not"
    return figures.verdict_grid(f"conformance-{package}", title, versions, groups, shown)


def faults() -> Html:
    """What is wrong in which releases, and where its developers write about it."""
    rows = []
    for fault in committed.faults():
        link = Html('<a href="{}">{}</a>')
        threads = Html(", ").join(link.format(thread, thread.split("/")[-1]) for thread in fault.threads)
        span = f"{fault.first} to {fault.last}" if fault.first else f"up to {fault.last}"
        several = "several micro batches" if fault.several_micro_batches else ""
        when = ", ".join(word for word in (*fault.precisions, several, fault.models or "") if word)
        rows.append([span, ", ".join(fault.engines), when, fault.what, threads])
    head = ["releases", "engines", "where", "what", "threads"]
    return markup.table("What trains wrongly", head, [("", rows)], words=head)


def every_fault() -> Html:
    """Each cell that is not the same under the newest release, and how."""
    rows: dict[str, list[list[str]]] = {}
    for name, cell in committed.newest()["cells"].items():
        if cell["verdict"] != "same":
            rows.setdefault(cell["verdict"], []).append([name, committed.how(cell)])
    head = ["cell", "how"]
    return markup.lines(
        *(
            markup.details(count(len(found), f"{verdict} cell"), markup.table(verdict, head, [("", found)], words=head))
            for verdict, found in rows.items()
        )
    )
