"""The notebook `bits`: which strategies end with weights that equal those of DDP in every bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from IPython.display import Markdown
from matplotlib.figure import Figure

from study.compare import bits
from study.report import captions, plots, sentences, tables
from study.report.pages.shown import markdown

TITLES = "Unmodified engines", "Engines with a fixed order"


class Bits:
    """Runs compared with DDP in the same setting, by the digests of their weights."""

    def __init__(self, records: str | Sequence[str]) -> None:
        self.folders = tables.folders(records)
        self.runs = tables.runs(records)
        self.settings = bits.settings(self.folders)

    def what_was_run(self) -> Markdown:
        """Describe the runs that the page shows."""
        return markdown(f"**What was run.** {captions.scope(self.runs)} {captions.MEASURED}")

    def figures(self, is_fixed: bool) -> Iterator[Figure]:
        """Yield one figure for each model, for unmodified engines or for engines with a fixed order of additions."""
        for heading, kinds in self.settings.items():
            if cells := kinds[is_fixed]:
                grid = bits.grid(cells)
                reference = "ddp" if "ddp" in grid else "fsdp2"
                title = f"{TITLES[is_fixed]}: same bits as {reference}?"
                head = captions.Head(title, captions.MEASURED, captions.readable(heading))
                yield plots.bits(grid, bits.column_headings(cells), head, reference)

    def in_words(self, has_explanation: bool = True) -> Markdown:
        """Return all comparisons as text, with or without an explanation of its terms."""
        text = sentences.page_body(bits.BITS.page(self.folders))
        return markdown(text if has_explanation else text.replace(bits.EXPLANATION, "").strip())
