"""Do the engines train what they say, release by release? Committed matrices as a page."""

from __future__ import annotations

from collections import Counter

from study.engines.conformance import committed, matrix_text
from study.engines.conformance.cells import TWISTS, of_release
from study.report import markup
from study.report.figures import conformance as figures
from study.report.figures.drawing import Figure
from study.report.markup import Html
from study.report.pages.opening import lead
from study.report.words import count

ASK = (
    "Ask your own installation: zero-study conformance. It takes minutes on a CPU. The trainer of this project "
    "refuses a release that is known to train wrongly what a run asks for."
)


def opening() -> Html:
    """Say how many ways of training are right under the newest release, and draw them."""
    newest = committed.newest()
    verdicts = Counter(cell["verdict"] for cell in newest["cells"].values())
    plain = [cell["verdict"] for name, cell in newest["cells"].items() if not committed.twist_of(name)]
    words = (
        f"Of {len(newest['cells'])} ways to train a small model with DeepSpeed {newest['versions']['deepspeed']} or "
        f"with PyTorch's own engines, bare or through accelerate, {verdicts['same']} train what a program without an "
        f"engine trains; {verdicts['wrong']} train something else and say nothing, "
        f"{verdicts['refused'] + verdicts['crashed']} are refused or stop with an error. Of the plain ones, with one "
        f"loss and nothing special, {plain.count('wrong')} of {len(plain)} are wrong."
    )
    return Html(lead(words).text + figures.installation(newest)._repr_html_())


def by_release(package: str) -> Figure:
    """A package's releases beside each other, by the cells that each of them was asked."""
    asked = {cell.name for cell in of_release([package])}
    matrices = committed.read(package)
    others: dict[str, set[str]] = {}
    for matrix in matrices.values():
        for name, version in matrix["versions"].items():
            others.setdefault(name, set()).add(version.partition("+")[0])
    beside = [
        f"{figures.NAMES[name]} {', '.join(sorted(versions))}" for name, versions in others.items() if name != package
    ]
    dates = committed.released(package)
    verdicts = {
        f"{version}, {dates[version]}" if version in dates else version: committed.by_group(matrix, asked)
        for version, matrix in matrices.items()
    }
    return figures.releases(package, verdicts, " and ".join(beside))


def faults() -> Html:
    """What is wrong in which releases, and where its developers write about it."""
    lines = []
    for fault in committed.faults():
        threads = ", ".join(f'<a href="{thread}">{thread.split("/")[-1]}</a>' for thread in fault.threads)
        span = f"{fault.first} to {fault.last}" if fault.first else f"Up to {fault.last}"
        several = ", several micro batches" if fault.several_micro_batches else ""
        only = f", {fault.models}" if fault.models else ""
        words = f"{', '.join(fault.engines)} in {', '.join(fault.precisions)}{several}{only}: {fault.what}"
        lines.append(Html(markup.led(span, words).text + (f" (thread {threads})" if threads else "")))
    return Html(markup.items(lines))


def follows() -> Html:
    """What a reader does with it: what is wrong under plain training, and what only with a twist."""
    newest = committed.newest()
    wrong: dict[str, dict[str, None]] = {"": {}}
    for name, cell in newest["cells"].items():
        if cell["verdict"] == "wrong":
            wrong.setdefault(committed.twist_of(name), {})[" ".join(name.split("/")[:2])] = None
    lines = []
    for twist, groups in wrong.items():
        shown = [group for group in groups if not twist or group not in wrong[""]]
        if shown or not twist:
            asked = TWISTS[twist] if twist else "plain training"
            lines.append(markup.led(asked.capitalize(), f"Wrong under {', '.join(shown) or 'nothing'}."))
    return Html(markup.items(lines) + markup.paragraphs(ASK))


def every_fault() -> Html:
    """Each cell that is not the same under the newest release, and how."""
    newest = committed.newest()
    rows: dict[str, list[list[str]]] = {}
    for name, cell in newest["cells"].items():
        if cell["verdict"] != "same":
            rows.setdefault(cell["verdict"], []).append([name, matrix_text.how(cell)])
    head = ["cell", "how"]
    parts = [
        markup.details(count(len(listed), f"{verdict} cell"), markup.table(verdict, head, [("", listed)], words=head))
        for verdict, listed in rows.items()
    ]
    return Html("\n".join(parts))
