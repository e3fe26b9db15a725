"""HTML of tables, lists and folds, which a notebook and a page show alike, and how numbers read in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from study.compare.words import Unit, three_digits
from study.theory.case import Job

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)
GIB = 2**30
MEMORY_KINDS = ("peak_allocated_bytes", "peak_tensor_bytes")  # of a GPU; of a CPU


class Html(Markup):
    """A piece of a page, which Jupyter and the templates take as it is; `format` escapes what is put into it."""

    def _repr_html_(self) -> str:
        return str(self)


def render(template: str, **values: Any) -> Html:
    """Fill a template of this folder; what is not Html is escaped."""
    return Html(TEMPLATES.get_template(template).render(values))


def lines(*pieces: str) -> Html:
    """Pieces of a page one below the other, escaped where they are text; empty ones are left out."""
    return Html("\n").join(escape(piece) for piece in pieces if piece)


def note(text: str) -> Html:
    return Html('<p class="note">{}</p>').format(text)


def items(texts: Iterable[str]) -> Html:
    return lines("", Html("<ul>"), *(Html("<li>{}</li>").format(text) for text in texts), Html("</ul>"))


def led(head: str, text: str) -> Html:
    """A text behind a few strong words."""
    return Html("<strong>{}.</strong> {}").format(head, text)


def below(first: str, *rest: str) -> Html:
    """A cell with small lines under its value."""
    return Html("{}{}").format(first, Html("").join(Html("<small>{}</small>").format(line) for line in rest if line))


def missing(why: str) -> Html:
    """A cell that says why it has no value."""
    return Html('<span class="missing">{}</span>').format(why)


def code_block(text: str) -> Html:
    return Html('<pre tabindex="0"><code>{}</code></pre>').format(text)


def details(summary: str, content: str) -> Html:
    return Html("<details>\n<summary>{}</summary>\n{}\n</details>").format(summary, content)


def predicted(content: str) -> Html:
    """Give a table the look of what is not measured."""
    return Html('<div class="predicted">\n{}\n</div>').format(content)


def table(
    caption: str,
    head: Sequence[str],
    groups: Iterable[tuple[str, Sequence[Sequence[Any]]]],
    note: str = "",
    words: Iterable[str] = (),
) -> Html:
    """A table that scrolls in a container of its own: a caption, a head, and groups of rows with a heading each.

    A row's first cell is its heading. Columns are numbers, to the right, but for the first and those named in `words`.
    None is a cell of which nothing is known; a column that has nothing else is left out, and the note says so.
    """
    groups, words = list(groups), list(words)
    known = [i for i in range(len(head)) if i == 0 or any(row[i] is not None for _, rows in groups for row in rows)]
    unknown = [title for i, title in enumerate(head) if i not in known]
    return render(
        "table.html",
        caption=caption,
        head=[(head[i], i > 0 and head[i] not in words) for i in known],
        groups=[(heading, [[row[i] for i in known] for row in rows]) for heading, rows in groups],
        note=f"{note} Not measured here: {', '.join(unknown)}.".strip() if unknown else note,
    )


# ---------------------------------------------------------------- numbers and words


def number(value: float) -> str | None:
    """Three digits, so that a column reads evenly; None where it is not known."""
    if math.isnan(value):
        return None
    return f"{value:#.3g}".rstrip(".") if 1e-3 <= abs(value) < 999.5 else three_digits(value)


def fixed(value: float, decimals: int) -> str | None:
    return None if math.isnan(value) else f"{value:,.{decimals}f}"


def gib(num_bytes: float) -> str:
    """One decimal; nothing where there is nothing."""
    return f"{num_bytes / GIB:,.1f}" if num_bytes else ""


def percent(share: float, decimals: int = 0) -> str:
    """The space before the sign is one that does not break."""
    return f"{100 * share:.{decimals}f}\N{NO-BREAK SPACE}%"


def signed_percent(share: float, decimals: int = 0) -> str:
    rounded = round(100 * share, decimals) + 0.0  # not minus nothing
    return f"{rounded:+.{decimals}f}\N{NO-BREAK SPACE}%".replace("-", "\N{MINUS SIGN}")


def relative(value: float) -> str:
    """A relative difference with its sign, in per cent unless it is so small that its power of ten reads better."""
    plus = "+" if value > 0 else ""
    in_percent = abs(value) >= 1e-3 or value == 0
    return f"{plus}{three_digits(100 * value)} %" if in_percent else f"{plus}{three_digits(value)}"


def batch(job: Job) -> str:
    """Micro batch x accumulation, on one line of a narrow page."""
    checkpointed = " c" if job.activation_checkpointing else ""
    words = f"{job.micro_batch_size} x {job.gradient_accumulation_steps}{checkpointed}"
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def seconds_unit(largest: float) -> Unit:
    return Unit("s", 1.0) if largest >= 1 else Unit("ms", 1e-3)


def count(amount: int, one: str, several: str = "") -> str:
    """An amount with its noun: 1 run, 2 runs."""
    return f"{amount:,} {one if amount == 1 else several or one + 's'}"


def listed(words: Iterable[Any]) -> str:
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last
