"""The form of the planner's page that answers without a server; tools/planned_answers.py makes the answers."""

from __future__ import annotations

from collections.abc import Iterable

from study.files import ROOT
from study.planner.asked import PLANNED
from study.report import markup
from study.report.markup import Html


def played() -> Html:
    """The form and the place of its answer; hidden where no script runs."""
    sizes = [path.stat().st_size for path in (ROOT / "reports" / PLANNED.folder).glob("*.js")]
    size = f" A model's answers are a file of at most {max(sizes, default=0) / 1000:.0f} kB, loaded when it is chosen."
    networks = [("" if rate is None else rate, _network(rate)) for rate in PLANNED.networks]
    fields = [
        _field("model", "Model", ((name, name) for name in PLANNED.models), "gpt2-xl"),
        _field("gpu", "GPU", ((name, name) for name in PLANNED.gpus), "a100-80gb"),
        _field("gpus", "How many", ((count, f"{count}") for count in PLANNED.counts), 8),
        _field(
            "length",
            "Tokens a sequence",
            ((count, f"{count:,}") for count in PLANNED.lengths),
            PLANNED.lengths[0],
        ),
        _field(
            "batch",
            "Sequences a GPU and step",
            ((count, f"{count}") for count in PLANNED.per_gpu),
            PLANNED.per_gpu[0],
        ),
        _field("network", "Between nodes", networks, ""),
    ]
    return Html(
        f'<form id="asked" class="filters" data-folder="{PLANNED.folder}" hidden>\n'
        + "\n".join(fields)
        + "\n<button>Answer</button>\n</form>\n"
        '<div id="answered" aria-live="polite"></div>\n'
        + markup.paragraphs(
            Html(
                "Other models, GPUs and options, and without JavaScript: <code>zero-study advise</code>, whose numbers "
                f"these are.{size}"
            ),
            kind="note",
        )
    )


def _network(rate: int | None) -> str:
    return "as one rents it" if rate is None else f"{rate} Gbit/s of a node"


def _field(name: str, label: str, options: Iterable[tuple[object, str]], chosen: object) -> str:
    said = "".join(
        f'<option value="{markup.escape(value)}"{" selected" * (value == chosen)}>{markup.escape(text)}</option>'
        for value, text in options
    )
    return f'<label>{markup.escape(label)} <select name="{name}">{said}</select></label>'
