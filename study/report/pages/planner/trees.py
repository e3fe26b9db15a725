"""What do the published decision trees advise, and what would have come of it? Tables and sentences."""

from __future__ import annotations

import itertools

from study.planner import trees
from study.planner.trees import Grid, Judged, TreeCase
from study.report import markup
from study.report.markup import Html
from study.report.pages.planner.tables import PREDICTED, predicted
from study.report.words import percent
from study.theory import decision_trees
from study.theory.decision_trees import KEEPS_UP

# ---------------------------------------------------------------- what the page says


def trees_in_words(grid: Grid) -> Html:
    """Say what the grid is, and which tree comes off best and worst."""
    fitting = sum(any(fits for fits, _ in case.results.values()) for case in grid.cases)
    least, most = (trees.MODELS[end].removeprefix("mpt-") for end in (0, -1))
    text = (
        f"{len(trees.MODELS)} GPTs of {least} to {most} parameters, {trees.GPU_COUNTS[0]} to {trees.GPU_COUNTS[-1]} "
        f"GPUs ({' or '.join(trees.GPUS)}), linked by NVLink or by PCIe alone, {trees.BATCHES[0]} to "
        f"{trees.BATCHES[-1]} sequences of {trees.SEQUENCE_LENGTH:,} tokens per step: {len(grid.cases):,} cases. "
        f"In {len(grid.cases) - fitting:,} of them nothing fits; the others are put to every tree, for production and "
        "for research, for speed and for capacity. DDP computes under autocast with fp32 parameters, ZeRO's stages "
        "have 16-bit ones with fp32 masters: part of their lead is that."
    )
    shares = {name: decision_trees.summarize(j.outcome for j in judged).shares for name, judged in grid.judged.items()}
    best = max(shares, key=lambda name: shares[name]["agrees"])
    worst = max(shares, key=lambda name: shares[name]["out of memory"])
    text += (
        f" {best} agrees most often, in {percent(shares[best]['agrees'])} of its cases; {worst} advises what does not "
        f"fit most often, in {percent(shares[worst]['out of memory'])}."
    )
    return Html(markup.paragraphs(text))


def published_trees(grid: Grid) -> Html:
    """Tabulate how often each tree agrees, is slower, runs out of memory, or does not answer; and where."""
    groups = [
        (
            source,
            [
                _tree(name.removeprefix(f"{source}-"), judged)
                for name, judged in grid.judged.items()
                if name.startswith(source)
            ],
        )
        for source in trees.SOURCES
    ]
    head = ["decision tree", *trees.JUDGED, "left behind, median", "left behind, worst", "the worst"]
    note = (
        f"Shares of cases. Agrees: fits, and reaches {percent(KEEPS_UP)} of the fastest strategy's tokens per second. "
        "Left behind: share of the fastest one's speed, over the slower cases. A tree that was asked for capacity is "
        f"held against the fastest, too. {PREDICTED}"
    )
    return predicted(markup.table("The published decision trees beside the planner", head, groups, note, ["the worst"]))


def _tree(name: str, judged: list[Judged]) -> list[str | Html]:
    summary = decision_trees.summarize(each.outcome for each in judged)
    shares = [percent(summary.shares[kind]) for kind in trees.JUDGED]
    if summary.median_left_behind is None or summary.worst_left_behind is None:
        return [name, *shares, "", "", ""]
    worst = max(
        (each for each in judged if each.outcome.kind == "slower"), key=lambda each: each.outcome.left_behind or 0.0
    )
    case = worst.case
    place = f"{case.shape.name} on {case.box.num_gpus} x {case.box.gpu.name}{'' if case.has_fast_link else ', PCIe'}"
    advice = Html(f"{worst.outcome.advised} where {worst.outcome.best} is faster:<br>{markup.escape(place)}")
    return [name, *shares, percent(summary.median_left_behind), percent(summary.worst_left_behind), advice]


def fastest(grid: Grid) -> Html:
    """Tabulate which strategy the planner finds fastest, by model and number of GPUs."""
    batch = trees.BATCHES[-1]
    groups = []
    for gpu, has_fast_link in itertools.product(trees.GPUS, (True, False)):
        best = {
            (case.shape.name, case.box.num_gpus): _fastest(case)
            for case in grid.cases
            if (case.box.gpu.name, case.has_fast_link, case.global_batch_size) == (gpu, has_fast_link, batch)
        }
        rows = [[model, *(best[model, count] for count in trees.GPU_COUNTS)] for model in trees.MODELS]
        groups.append((f"{gpu}, {'NVLink' if has_fast_link else 'PCIe alone'}", rows))
    head = ["model", *(f"{count} GPU{'' if count == 1 else 's'}" for count in trees.GPU_COUNTS)]
    note = (
        f"At {batch} sequences of {trees.SEQUENCE_LENGTH:,} tokens per step, of the strategies that the trees know. "
        f"{PREDICTED}"
    )
    return predicted(markup.table("What the planner finds fastest", head, groups, note, head[1:]))


def _fastest(case: TreeCase) -> str | Html:
    speeds = {name: speed for name, (fits, speed) in case.results.items() if fits}
    return max(speeds, key=speeds.__getitem__) if speeds else markup.missing("nothing fits")
