"""The notebooks `gpus` and `gpus-tables`: trainings on A100 and H100 that others measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from IPython.display import Markdown

from study.compare import public_cards, public_comparisons, public_pairs, public_table
from study.compare.public_comparisons import Evaluations
from study.compare.public_pairs import Pair, PairedComparison
from study.public_runs import archive
from study.report import public_answers, public_figures, sentences
from study.report.pages.shown import markdown, show
from zero_study.files import require_clone
from zero_study.public_runs.quantities import QUANTITIES
from zero_study.public_runs.schema import PublicRun

LOGS = "The imported logs, which this notebook compares,"
PAIRS_OF_CARDS = ("llm-foundry", "megatron")  # sources with many pairs of A100 and H100


def show_answer() -> None:
    """Display what public runs answer. Raises Refusal if this is not a clone."""
    require_clone(LOGS)
    show(markdown("**Answer** (measured by others):", sentences.bullets(public_answers.answers())))


def show_overview() -> None:
    """Display A100 compared with H100, and the most important comparisons of pairs, as two figures."""
    show(public_figures.cards([row for row in public_cards.rows() if not row.is_registered]))
    show(public_figures.ratios(_pairs(lambda each: each.in_overview)))


def show_strategies(checkpointing: bool) -> None:
    """Display the strategies of Lightning's comparison, with or without activation checkpointing."""
    runs = [
        run for run in archive.source(public_answers.LIGHTNING) if run.setting.activation_checkpointing == checkpointing
    ]
    table = public_figures.strategies(runs).drop(columns="activation checkpointing")
    show(table.style.hide(axis="index"), markdown(public_answers.more_about_lightning()))


def show_pairs_of_cards() -> None:
    """Display the table of pairs that ran on A100 and on H100, and of two clusters with H100."""
    chosen = _pairs(lambda each: each.source in PAIRS_OF_CARDS and (bool(each.baseline) or each.in_overview))
    table = public_figures.table_of_pairs(chosen).drop(columns="largest difference of the loss")
    show(table.style.hide(axis="index"))


def show_losses() -> None:
    """Display the loss curves of one program on one and on eight GPUs, and how losses differ by number of GPUs."""
    runs = public_comparisons.groups(public_answers.result(public_answers.MORE_GPUS).comparison)
    title = "modded-nanogpt on one and on eight H100"
    show(public_figures.curves(runs, "evaluation_loss", ("step",), title, start=250))
    show(pd.DataFrame(public_answers.losses()).style.hide(axis="index"), markdown(public_figures.MLPERF_FOOTNOTE))


class PublicRuns:
    """The comparisons of public runs that have these `names`, or all comparisons if `names` is empty.

    Raises Refusal if this is not a clone.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        require_clone(LOGS)
        self.results = {
            comparison.name: public_comparisons.answer(comparison) for comparison in public_comparisons.comparisons()
        }
        self.shown = [name for name in self.results if not names or name in names]

    def answer(self) -> Markdown:
        """Return how many comparisons of how many runs the page has."""
        runs = sum(len(archive.source(source)) for source in archive.sources())
        return markdown(
            f"**Answer:** {len(self.results)} comparisons of repeated trainings and {len(public_comparisons.paired())} "
            f"comparisons of pairs of single trainings, from {runs:,} runs of {len(archive.sources())} sources. All "
            "were measured by others."
        )

    def compare(self, names: Iterable[str]) -> None:
        """Display the tables of these comparisons, and list the other settings in which their runs differ."""
        for name in names:
            if name in self.shown:
                result = self.results[name]
                show(markdown(f"**{result.comparison.question}**"))
                show(public_figures.table(result).style.hide(axis="index"))
                show(markdown(sentences.bullets(public_figures.other_differences(result))))

    def where(self, condition: Callable[[public_comparisons.Comparison], bool]) -> list[str]:
        """Return the names of the comparisons that meet a condition."""
        return [name for name, result in self.results.items() if condition(result.comparison)]

    def runs(self, *names: str) -> Mapping[str, Sequence[PublicRun]]:
        """Return the runs of these comparisons by the name of their group."""
        groups: dict[str, Sequence[PublicRun]] = {}
        for name in names:
            groups |= public_comparisons.groups(self.results[name].comparison)
        return groups


def of_repeats() -> Markdown:
    """Return how often the rule for equal trainings calls repeats of one program, and two programs, different."""
    last = public_comparisons.of_repeats("last evaluation loss", QUANTITIES["last evaluation loss"])
    ((name, early),) = Evaluations(column="evaluation_loss", by="step", positions=[250]).quantities().items()
    earlier = public_comparisons.of_repeats(name, early, splits=0)
    halves, pairs, early_pairs = (
        f"{100 * public_comparisons.share_detected(verdicts):.1f} % of {sum(verdicts.values()):,}"
        for verdicts in (last.halves, last.programs, earlier.programs)
    )
    return markdown(
        f"We tested the rule on {last.num_programs} programs of modded-nanogpt with ten or more repeats "
        f"({last.num_runs} runs). Random halves of the repeats of one program are called different in {halves} cases, "
        f"and 5 % are expected. Two programs are called different in {pairs} pairs by the last held-out loss, and in "
        f"{early_pairs} pairs by the loss at step 250. All programs aim at a last loss of 3.28."
    )


def show_cards() -> None:
    """Display the figure, the table and the caveats of all public trainings that ran on A100 and on H100."""
    rows = public_cards.rows()
    show(public_figures.cards(rows))
    show(public_figures.table_of_cards(rows).style.hide(axis="index"))
    chosen = [row.comparison for row in rows if isinstance(row.comparison, PairedComparison)]
    notes = [public_answers.more_about_cards(), *public_figures.caveats_of_pairs(chosen)]
    show(markdown(sentences.bullets(notes)))


def show_pairs(*sources: str) -> None:
    """Display the table, figure and caveats of the pairs of public runs that come from these sources."""
    pairs = _pairs(lambda each: each.source in sources)
    show(public_figures.table_of_pairs(pairs).style.hide(axis="index"))
    show(public_figures.ratios(pairs))
    show(markdown(sentences.bullets(public_figures.caveats_of_pairs([comparison for comparison, _ in pairs]))))


def _pairs(condition: Callable[[PairedComparison], bool]) -> list[tuple[PairedComparison, list[Pair]]]:
    """Return the comparisons of pairs that meet a condition, with their pairs."""
    return [
        (comparison, public_pairs.pairs_of(comparison, archive.source(comparison.source)))
        for comparison in public_comparisons.paired()
        if condition(comparison)
    ]


def show_own(records: Sequence[str]) -> None:
    """Display the runs that `zero-study import` wrote to these folders."""
    own = archive.read(archive.find(map(Path, records)))
    show(markdown(public_table.page(own) if own else "No folder was given."))
    if own:
        kind = "Measured by others or by you. Each line is one run."
        show(public_figures.curves({run.name: [run] for run in own}, "loss", ("step",), "your imported runs", kind))


def table(source: str, by_strategy: bool = False) -> pd.io.formats.style.Styler:
    """Return a table of one source's runs: by strategy and model size, or with one row per training."""
    runs = archive.source(source)
    rows = public_figures.by_strategy(runs) if by_strategy else public_figures.strategies(runs)
    return rows.style.hide(axis="index")
