"""Which reports are there? The first page of a site: what it is about, every report, and what belongs to none."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from study.report.shell import Page

PAGE = Page("index.html", "All reports", "What it costs and saves to spread a training over several processors.")

_BODY = """\
<h1>What does it cost, and what does it save, to spread the training of a language model over several processors?</h1>
<p class="lead">A language model in training needs several times the memory that the model itself takes. Processors that
train it together can each hold all of that, or each a share of it; ZeRO is a family of methods that share. These pages
measure both on the same training, predict both for machines that were not at hand, and check what others have published
about them.</p>
<h2>Reports: what was measured</h2>
<p>A report answers one question from runs on the machine that it names. A run is one training from start to end. A
strategy is one way to spread it, such as a full copy for each processor (<code>ddp</code>) or a share of everything
(<code>zero3</code>). A rank is one of the processes that train together.</p>
{reports}
<h2>Pages that belong to no report</h2>
<dl class="ways">
{pages}
</dl>"""

_NONE = "<p>None is here yet; <code>zero-study run STUDY</code> and <code>zero-study report STUDY</code> make one.</p>"

# As `study/report/pages/opening.py` writes the question and the sentence that answers it.
_OPENING = re.compile(r'<h1>(.+?)</h1>\s*<p class="lead">(.+?)</p>', re.DOTALL)


class Report(NamedTuple):
    folder: str
    question: str  # HTML, as `answer` is
    answer: str  # the first sentence


def reports(site: Path) -> list[Report]:
    """The reports in the folders of a site, as their first pages describe them."""
    first_pages = sorted(site.glob("[!.]*/index.html"))  # without those that are being made
    openings = {page.parent.name: _OPENING.search(page.read_text("utf-8")) for page in first_pages}
    return [Report(folder, *opening.groups()) for folder, opening in openings.items() if opening]


def body(site: Path, pages: Sequence[Page]) -> str:
    """The first page of a site, with the ways to its reports and to these pages of its own."""
    to_reports = [
        _way(f"{quote(r.folder)}/index.html", r.question, f"<code>{html.escape(r.folder)}</code>: {r.answer}")
        for r in reports(site)
    ]
    to_pages = [_way(page.file, page.label, html.escape(page.description)) for page in pages]
    return _BODY.format(
        reports="\n".join(['<dl class="ways">', *to_reports, "</dl>"]) if to_reports else _NONE,
        pages="\n".join(to_pages),
    )


def _way(address: str, title: str, text: str) -> str:
    return f'<dt><a href="{address}">{title}</a></dt>\n<dd>{text}</dd>'
