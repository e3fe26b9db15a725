"""Show texts, tables and figures in a notebook."""

from __future__ import annotations

from typing import Any

from IPython.display import Markdown, display


def markdown(*paragraphs: str) -> Markdown:
    """Return paragraphs as the output of a notebook cell. Empty paragraphs are left out."""
    return Markdown("\n\n".join(filter(None, paragraphs)))  # type: ignore[no-untyped-call]


def show(*outputs: Any) -> None:
    """Show tables and figures as the output of a notebook cell."""
    for output in outputs:
        display(output)  # type: ignore[no-untyped-call]
