"""The form of the planner's page that answers without a server; tools/planned_answers.py makes the answers."""

from __future__ import annotations

from collections.abc import Iterable

from study.files import ROOT
from study.report import markup
from study.report.build import PLANNED
from study.report.markup import Html

MODELS = ("bert-large", "gpt2", "gpt2-xl", "qwen2.5-1.5b", "gpt-j-6b", "llama-3-8b", "llama-2-13b", "llama-3-70b")
GPUS = ("t4", "v100-32gb", "l4", "a100-40gb", "a100-80gb", "h100-sxm", "h200", "b200")
COUNTS = (1, 2, 4, 8, 16, 64)
LENGTHS = (512, 2048)
PER_GPU = (8, 32)  # sequences of the global batch
NETWORKS = (None, 100)  # Gbit/s of a node: as one rents it, and a slow one


def played() -> Html:
    """The form and the place of its answer; hidden where no script runs."""
    sizes = [path.stat().st_size for path in (ROOT / "reports" / PLANNED).glob("*.js")]
    size = f" A model's answers are a file of at most {max(sizes, default=0) / 1000:.0f} kB, loaded when it is chosen."
    networks = [("" if rate is None else rate, _network(rate)) for rate in NETWORKS]
    fields = [
        _field("model", "Model", ((name, name) for name in MODELS), "gpt2-xl"),
        _field("gpu", "GPU", ((name, name) for name in GPUS), "a100-80gb"),
        _field("gpus", "How many", ((count, f"{count}") for count in COUNTS), 8),
        _field("length", "Tokens a sequence", ((count, f"{count:,}") for count in LENGTHS), LENGTHS[0]),
        _field("batch", "Sequences a GPU and step", ((count, f"{count}") for count in PER_GPU), PER_GPU[0]),
        _field("network", "Between nodes", networks, ""),
    ]
    return Html(
        f'<form id="asked" class="filters" data-folder="{PLANNED}" hidden>\n'
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
