"""How does a table or a sentence become HTML that a notebook and a page show alike?"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

NUMBER = ' class="number"'
LONG = 160  # characters of a caption behind its first sentence, from which on they are folded


class Html:
    """A piece of a page. Jupyter shows it, and the report takes it as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_html_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<{len(self.text)} characters of HTML>"

    def __str__(self) -> str:
        """Fail: in a text, say in an f-string, the repr would stand in the place of the markup, which is `text`."""
        raise TypeError("a piece of HTML is no text; take its .text, or give it to a function of study/report/markup")


def escape(value: Any) -> str:
    return value.text if isinstance(value, Html) else html.escape(str(value))


def paragraphs(*texts: str | Html, kind: str = "") -> str:
    """One paragraph per text that is not empty."""
    opening = f'<p class="{kind}">' if kind else "<p>"
    return "\n".join(f"{opening}{escape(text)}</p>" for text in texts if text)


def items(texts: Iterable[str | Html]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(text)}</li>" for text in texts) + "\n</ul>"


def led(head: str, text: str) -> Html:
    """A text behind a few strong words."""
    return Html(f"<strong>{html.escape(head)}.</strong> {html.escape(text)}")


def missing(why: str) -> Html:
    """A cell that says why it has no value."""
    return Html(f'<span class="missing">{html.escape(why)}</span>')


def code_block(lines: Iterable[str]) -> str:
    return f'<pre tabindex="0"><code>{html.escape(chr(10).join(lines))}</code></pre>'


def details(summary: str, content: str) -> str:
    return f"<details>\n<summary>{escape(summary)}</summary>\n{content}\n</details>"


def folded(words: str) -> str:
    """Words as HTML: of long ones the first sentence, and the rest a click away, because a phone has no room for it."""
    first, end, rest = words.partition(". ")
    if len(rest) < LONG:
        return html.escape(words, quote=False)
    opening = html.escape(f"{first}{end}".strip(), quote=False)
    return f"{opening} <details><summary>How to read it</summary>{html.escape(rest, quote=False)}</details>"


def table(
    caption: str,
    head: Sequence[str],
    groups: Iterable[tuple[str, Sequence[Sequence[Any]]]],
    note: str = "",
    words: Sequence[str] = (),
) -> str:
    """A table in a container of its own that scrolls: a caption, a head, and groups of rows with a heading each.

    A row's first cell is its heading. Columns are numbers, to the right, but for the first and those named in `words`.
    None is a cell of which nothing is known; a column that has nothing else is left out, and the caption says so.
    """
    groups = list(groups)
    columns = [i for i in range(len(head)) if i == 0 or any(row[i] is not None for _, rows in groups for row in rows)]
    unknown = [title for i, title in enumerate(head) if i not in columns]
    note += f" Not measured here: {', '.join(unknown)}." if unknown else ""
    kinds = ["" if i == 0 or head[i] in words else NUMBER for i in columns]

    label = html.escape(caption)
    lines = [f'<div class="table" role="region" tabindex="0" aria-label="{label}">', "<table>"]
    more = f'<div class="note">{folded(note.strip())}</div>' if note else ""
    lines += [f"<caption><span>{label}</span>{more}</caption>"]
    titles = [f'<th scope="col"{kind}>{escape(head[i])}</th>' for i, kind in zip(columns, kinds, strict=True)]
    lines += [f"<thead><tr>{''.join(titles)}</tr></thead>"]
    for heading, rows in groups:
        lines += ["<tbody>"]
        if heading:
            whole = f'colspan="{len(columns)}" scope="rowgroup"'
            lines += [f'<tr class="group"><th {whole}><span>{escape(heading)}</span></th></tr>']
        lines += [_row([row[i] for i in columns], kinds) for row in rows]
        lines += ["</tbody>"]
    return "\n".join([*lines, "</table>", "</div>"])


def _row(row: Sequence[Any], kinds: Sequence[str]) -> str:
    first, *others = row
    cells = [f'<th scope="row">{escape(first)}</th>']
    cells += [
        f"<td{kind}>{missing('unknown').text if value is None else escape(value)}</td>"
        for value, kind in zip(others, kinds[1:], strict=True)
    ]
    return f"<tr>{''.join(cells)}</tr>"
