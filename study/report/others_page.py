"""The page of published rows: what others measured on one GPU and on many, beside theory's predictions."""

from __future__ import annotations

from collections.abc import Sequence

from study.compare.words import three_digits
from study.planner import published_rows
from study.planner.published_rows import PublishedRun
from study.report import figures, markup
from study.report.drawing import Figure
from study.report.markup import Html, percent, signed_percent

FAMILIES = ("NVIDIA BERT", "InternEvo", "fms-acceleration", "fms-acceleration liger", "LLaMA on A800",
            "DeepSpeed core binding", "BigScience GPT")  # fmt: skip
# One kind of training with states on the GPU, and with them on the host: family, engine words of both.
OFFLOADED = (
    ("LLaMA on A800", "ZeRO-2", "ZeRO-2, optimizer on the host"),
    ("LLaMA on A800", "ZeRO-3", "ZeRO-3, optimizer on the host"),
    ("LLaMA on A800", "ZeRO-3", "ZeRO-3, optimizer and parameters on the host"),
    ("DeepSpeed core binding", "ZeRO-2", "ZeRO-2, optimizer on the host"),
    ("BigScience GPT", "ZeRO-3", "ZeRO-3, optimizer on the host"),
    ("BigScience GPT", "ZeRO-3", "ZeRO-3, optimizer and parameters on the host"),
)


def data_parallel() -> Figure:
    """BERT-large under DDP."""
    series: dict[str, list[PublishedRun]] = {}
    for row in sorted(published_rows.runs("NVIDIA BERT", "bert-large"), key=lambda row: row.num_gpus):
        if (row.case.collected_as, row.case.box.gpu.name) == ("A", "a100-80gb"):
            series.setdefault(row.case.engine.precision.replace("-autocast", ""), []).append(row)
    title = "Published by NVIDIA: BERT-large pretraining at 128 tokens on A100"
    return figures.published_scaling("others-bert", title, series)


def states_split() -> Figure:
    """ZeRO-1 over all GPUs, and within a node."""
    series: dict[str, list[PublishedRun]] = {}
    for row in published_rows.runs("InternEvo"):
        if not row.case.job.activation_checkpointing and row.case.job.gradient_accumulation_steps == 4:
            series.setdefault(published_rows.engine_words(row.case), []).append(row)
    title = "Published by InternEvo: 7 billion parameters on A100, four micro steps, 400 Gbit/s between nodes"
    return figures.published_scaling("others-zero1", title, series)


def _slowdowns() -> list[tuple[PublishedRun, PublishedRun, float, float]]:
    """Pairs of one family: resident, offloaded, how many times as long a token takes, and as predicted."""
    found = []
    for family, resident, offloaded in OFFLOADED:
        rows = published_rows.runs(family)
        for slow in (row for row in rows if published_rows.engine_words(row.case) == offloaded):
            alike = [row for row in rows if published_rows.engine_words(row.case) == resident
                     and row.case.shape == slow.case.shape
                     and row.case.job.activation_checkpointing == slow.case.job.activation_checkpointing]  # fmt: skip
            if alike:
                fast = max(alike, key=lambda row: row.published_speed)
                predicted = fast.predicted_speed / slow.predicted_speed
                found.append((fast, slow, fast.published_speed / slow.published_speed, predicted))
    return found


def offloaded() -> Html:
    """Tabulate how much longer a token took with states on the host."""
    rows = [
        [
            f"{slow.case.shape.name}, {slow.num_gpus} x {slow.case.box.gpu.name}",
            published_rows.engine_words(slow.case),
            slow.case.grade,
            f"{markup.batch(fast.case.job)} / {markup.batch(slow.case.job)}",
            three_digits(times),
            Html("<em>{}</em>").format(three_digits(predicted)),
        ]
        for fast, slow, times, predicted in _slowdowns()
    ]
    head = ["what", "offloaded", "grade", "batch: on the GPU / offloaded", "times as long", "predicted"]
    note = "Of a token, against the fastest row of the same source, model and checkpointing with states on the GPU."
    caption = "Offload against states on the GPU, measured by others"
    return markup.table(caption, head, [("", rows)], note, head[1:4])


def checked(families: Sequence[str] = FAMILIES) -> Html:
    """Tabulate what can be checked of every row: is it possible, does it fit, how far is theory from it?"""
    groups = []
    for family in families:
        published = published_rows.runs(family)
        groups.append((f"{family}: {published[0].case.source}", [_checked(row) for row in published]))
    head = ["what", "grade", "tokens/s a GPU", "of the peak", "bytes a parameter", "fits", "predicted", "time off by",
            "peak, GB", "predicted peak"]  # fmt: skip
    note = (
        "Of the peak: model FLOPs over the card's dense peak in that precision; above 100 % sequences are shorter than "
        "is said. Bytes a parameter: of states, where nothing is split. Fits: predicted; all of them trained. Time off "
        "by: predicted over published, less one; the constants were fitted to many of these rows."
    )
    return markup.table("Rows that others published", head, groups, note, ["grade", head[4], "fits"])


def _checked(row: PublishedRun) -> list[str | None]:
    known = row.peak_bytes is not None
    return [
        row.case.name,
        row.case.grade,
        three_digits(row.published_speed),
        percent(row.share_of_peak),
        published_rows.states_in_words(row.case),
        "yes" if row.fits else "no",
        Html("<em>{}</em>").format(three_digits(row.predicted_speed)),
        signed_percent(float(row.predicted.total) / row.seconds - 1),
        three_digits((row.peak_bytes or 0) / 1e9) if known else "",
        Html("<em>{}</em>").format(three_digits(row.predicted_peak_bytes / 1e9)) if known else "",
    ]
