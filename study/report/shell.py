"""What stands around a page? Its head, the way to the other pages, and how it was made."""

from __future__ import annotations

import html
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

STYLE = Path(__file__).with_name("style.css")
PROJECT = "ZeRO replication study"

_SHELL = string.Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="description" content="$description">
<title>$title</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="$style">
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header>
<p>$home</p>
<nav aria-label="Pages">
$navigation
</nav>
</header>
<main id="content">
$body
</main>
<footer>
<details>
<summary>How this page was made</summary>
<p>By <code>$command</code>, from $source
</details>
</footer>
$script</body>
</html>
""")


class Page(NamedTuple):
    file: str
    label: str  # in the navigation
    description: str


class Frame(NamedTuple):
    """What the pages of one folder share: those of a report alone, of a report in a site, or the site's own."""

    command: str  # that made them
    report: str = ""  # its name
    question: str = ""
    of_report: Sequence[Page] = ()
    of_site: Sequence[Page] = ()  # the first leads to all reports
    to_site: str = ""  # from this folder to the site's

    def title(self, page: Page) -> str:
        return f"{page.label}: {self.report}, {PROJECT}" if self.report else f"{page.label}, {PROJECT}"

    def around(self, page: Page, body: str, source: str, script: str = "") -> str:
        """The whole page: a body with its head, the navigation, and at its foot how it was made: what from, as HTML."""
        home = f'<a href="{self.to_site}{self.of_site[0].file}">{PROJECT}</a>' if self.of_site else PROJECT
        if self.report:
            home += f': <a href="{self.of_report[0].file}">{html.escape(self.report)}</a>'
        groups = [group for group in (self._ways(self.of_report), self._ways(self.of_site, self.to_site)) if group]
        return _SHELL.substitute(
            description=html.escape(" ".join(text for text in (self.question, page.description) if text)),
            title=html.escape(self.title(page)),
            style=self.to_site + STYLE.name,
            home=home,
            navigation="\n".join(_navigation(ways, page) for ways in groups),
            body=body,
            command=html.escape(self.command),
            source=source,
            script=f"<script>\n{script}</script>\n" if script else "",
        )

    def other_pages(self, page: Page) -> str:
        """Where to read on: each of the other pages and what it answers."""
        ways = self._ways(self.of_report) | self._ways(self.of_site[1:], self.to_site)
        items = [
            f'<li><a href="{address}">{other.label}</a>: {html.escape(other.description)}</li>'
            for address, other in ways.items()
            if other != page
        ]
        return "\n".join(["<h2>The other pages</h2>", "<ul>", *items, "</ul>"])

    @staticmethod
    def _ways(pages: Sequence[Page], folder: str = "") -> dict[str, Page]:
        return {folder + page.file: page for page in pages}


def _navigation(ways: Mapping[str, Page], current: Page) -> str:
    marks = {address: ' aria-current="page"' if page == current else "" for address, page in ways.items()}
    items = [f'<li><a href="{address}"{marks[address]}>{page.label}</a></li>' for address, page in ways.items()]
    return "\n".join(["<ul>", *items, "</ul>"])
