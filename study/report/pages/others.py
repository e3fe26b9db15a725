"""What did others measure on one GPU and on many? Figures and tables of published rows, beside theory's predictions."""

from __future__ import annotations

from typing import Any

from study.compare.words import three_digits
from study.planner import published_rows
from study.planner.published_rows import PublishedRun
from study.report import markup
from study.report.figures import others as figures
from study.report.figures.drawing import Figure
from study.report.markup import Html
from study.report.pages.opening import lead
from study.report.words import percent, signed_percent


def opening() -> Html:
    """What the rows say together, for who knows none of the words."""
    bert, zero = published_rows.runs("NVIDIA BERT", "bert-large"), published_rows.runs("InternEvo")
    one, many = (
        next(r for r in bert if r.num_gpus == n and r.case.engine.precision == "fp16-autocast") for n in (1, 128)
    )
    whole = [row for row in zero if "within" not in published_rows.engine_words(row.case)]
    few, most = min(whole, key=lambda row: row.num_gpus), max(whole, key=lambda row: row.num_gpus)
    kept, left = (percent(a.published_speed / b.published_speed) for a, b in ((many, one), (most, few)))
    alike = [(times, slow) for fast, slow, times, _ in _slowdowns() if _sequences(fast) == _sequences(slow)]
    least, (longest, unbound) = min(times for times, _ in alike), max(alike, key=lambda pair: pair[0])
    bound = sorted(times for times, slow in alike if slow.case.family == unbound.case.family and slow is not unbound)
    gbps = few.case.box.node_bandwidth * 8e-9
    return lead(
        f"Where others had many GPUs and fast networks, each of {many.num_gpus} kept {kept} of the speed that "
        f"one had alone (BERT-large); on {gbps:.0f} Gbit/s between nodes of eight, with states split over all, each of "
        f"{most.num_gpus} kept {left} of what each of {few.num_gpus} had (a model of 7 billion parameters). States "
        f"moved to the host made a step of as many sequences {least:.1f} to {bound[-1]:.1f} times as long; without "
        f"cores bound to processes, {longest:.1f} times ({' and '.join(f'{times:.1f}' for times in bound)} with them)."
    )


def data_parallel() -> Figure:
    """BERT-large under DDP."""
    rows = [row for row in published_rows.runs("NVIDIA BERT", "bert-large") if row.case.collected_as == "A"]
    series: dict[str, list[PublishedRun]] = {}
    for row in sorted(rows, key=lambda row: row.num_gpus):
        if row.case.box.gpu.name == "a100-80gb":
            series.setdefault(row.case.engine.precision.replace("-autocast", ""), []).append(row)
    return figures.scaling("others-bert", "BERT-large pretraining at 128 tokens on A100, by NVIDIA.", series)


def states_split() -> Figure:
    """ZeRO-1 over all GPUs, and within a node."""
    series = _split()
    what = "A model of 7 billion parameters on A100, four micro steps, 400 Gbit/s between nodes, by InternEvo."
    return figures.scaling("others-zero1", what, series)


def _split() -> dict[str, list[PublishedRun]]:
    """InternEvo's rows of four micro steps, by how far the states are split."""
    series: dict[str, list[PublishedRun]] = {}
    for row in published_rows.runs("InternEvo"):
        if not row.case.job.activation_checkpointing and row.case.job.gradient_accumulation_steps == 4:
            series.setdefault(published_rows.engine_words(row.case), []).append(row)
    return series


def split_over_all() -> Html:
    """Say what theory leaves out where states are split over many GPUs, as far as the rows show it."""
    series = _split()
    whole, within = ({row.num_gpus: row for row in series[name]} for name in ("ZeRO-1", "ZeRO-1 within nodes"))
    few, many = (sorted(count for count in whole if count in within)[at] for at in (0, -1))
    most = max(whole)

    def longer(count: int) -> tuple[float, float]:
        one, other = whole[count], within[count]
        return one.seconds - other.seconds, float(one.predicted.total) - float(other.predicted.total)

    def too_short(row: PublishedRun) -> str:
        return percent(1 - float(row.predicted.total) / row.seconds)

    (seen_few, told_few), (seen_many, told_many) = longer(few), longer(many)
    return Html(
        markup.paragraphs(
            f"Split over all GPUs, a step took {seen_few:.1f} s longer than within nodes on {few} GPUs and "
            f"{seen_many:.1f} s on {many}; predicted are {told_few:.1f} s and {told_many:.1f} s, so that a step is "
            f"predicted {too_short(whole[many])} too short on {many} and {too_short(whole[most])} on {most:,}. "
            "InternEvo's program hands updated parameters back by a broadcast from each rank that owns some, with "
            "nothing beside them; theory counts one all-gather of the same bytes. So what it seems to leave out is the "
            "number of messages, which grows with the GPUs. What one of them costs on that network nobody printed."
        )
    )


def sharded_memory() -> Figure:
    """Peaks of one GPU and of FSDP on two and four."""
    rows = [row for family in ("fms-acceleration", "fms-acceleration liger") for row in published_rows.runs(family)
            if row.case.shape.name in ("mistral-7b", "llama-3-8b")]  # fmt: skip
    return figures.memory("others-fsdp", "Full fine-tuning on A100 with checkpointing, by fms-acceleration.", rows)


# One kind of training with states on the GPU, and with them on the host: family, engine words of both.
_OFFLOADED = (
    ("LLaMA on A800", "ZeRO-2", "ZeRO-2, optimizer on the host"),
    ("LLaMA on A800", "ZeRO-3", "ZeRO-3, optimizer on the host"),
    ("LLaMA on A800", "ZeRO-3", "ZeRO-3, optimizer and parameters on the host"),
    ("DeepSpeed core binding", "ZeRO-2", "ZeRO-2, optimizer on the host"),
    ("BigScience GPT", "ZeRO-3", "ZeRO-3, optimizer on the host"),
    ("BigScience GPT", "ZeRO-3", "ZeRO-3, optimizer and parameters on the host"),
)


def _slowdowns() -> list[tuple[PublishedRun, PublishedRun, float, float]]:
    """Pairs of one family: resident, offloaded, how many times as long a token takes, and as predicted."""
    found = []
    for family, resident, offloaded in _OFFLOADED:
        rows = published_rows.runs(family)
        for slow in (row for row in rows if published_rows.engine_words(row.case) == offloaded):
            alike = [row for row in rows if published_rows.engine_words(row.case) == resident
                     and row.case.shape == slow.case.shape
                     and row.case.job.activation_checkpointing == slow.case.job.activation_checkpointing]  # fmt: skip
            if not alike:
                continue
            fast = max(alike, key=lambda row: row.published_speed)
            predicted = fast.predicted_speed / slow.predicted_speed
            found.append((fast, slow, fast.published_speed / slow.published_speed, predicted))
    return found


def offloaded() -> Html:
    """Tabulate how much longer a token took with states on the host."""
    rows = []
    for fast, slow, times, predicted in _slowdowns():
        rows.append(
            [
                f"{slow.case.shape.name}, {slow.num_gpus} x {slow.case.box.gpu.name}",
                published_rows.engine_words(slow.case),
                slow.case.grade,
                f"{_batch(fast)} / {_batch(slow)}",
                three_digits(times),
                Html(f"<em>{three_digits(predicted)}</em>"),
            ]
        )
    head = ["what", "offloaded", "grade", "batch: on the GPU / offloaded", "times as long", "predicted"]
    note = (
        "Of a token, against the fastest row of the same source, model and checkpointing with states on the GPU. "
        "Batches differ, as offload leaves room for larger ones: micro batch x accumulation."
    )
    words = head[1:4]
    return Html(markup.table("Offload against states on the GPU, measured by others", head, [("", rows)], note, words))


def _sequences(row: PublishedRun) -> int:
    """Sequences of a GPU and step."""
    return int(row.case.job.micro_batch_size * row.case.job.gradient_accumulation_steps)


def _batch(row: PublishedRun) -> str:
    return f"{row.case.job.micro_batch_size} x {row.case.job.gradient_accumulation_steps}"


def checked() -> Html:
    """Tabulate what can be checked of every row: is it possible, does it fit, how far is theory from it?"""
    groups: dict[str, list[list[Any]]] = {}
    for family in ("NVIDIA BERT", "InternEvo", "fms-acceleration", "fms-acceleration liger", "LLaMA on A800",
                   "DeepSpeed core binding", "BigScience GPT"):  # fmt: skip
        for row in published_rows.runs(family):
            total = float(row.predicted.total)
            groups.setdefault(f"{family}: {row.case.source}", []).append(
                [
                    row.case.name,
                    row.case.grade,
                    three_digits(row.published_speed),
                    percent(row.share_of_peak) if row.share_of_peak <= 1 else _above_peak(row),
                    published_rows.states_in_words(row.case),
                    "yes" if row.fits else Html("no<small>it trained</small>"),
                    Html(f"<em>{three_digits(row.predicted_speed)}</em>"),
                    signed_percent(total / row.seconds - 1),
                ]
            )
    head = ["what", "grade", "tokens/s a GPU", "of the peak", "bytes a parameter", "fits", "predicted", "time off by"]
    note = (
        "Of the peak: model FLOPs, nothing that is recomputed, over the card's dense peak in that precision; above "
        "100 % a row could not be, unless its sequences are shorter than is said. Bytes a parameter: of states, where "
        "nothing is split; rows of different classes are "
        "not to be compared as scaling. Fits: predicted; all of them trained. Time off by: predicted over "
        "published, less one; the "
        "constants were fitted to many of these rows (the planner's page has errors without them)."
    )
    table = markup.table("Rows that others published", head, list(groups.items()), note, ["grade", head[4], "fits"])
    return Html(markup.details(f"All {sum(map(len, groups.values()))} rows, and what can be checked of them", table))


def _above_peak(row: PublishedRun) -> Html:
    """Why a row is above the card's peak: its source bins sequences by length, so that most have fewer tokens."""
    assert (row.case.family, row.case.job.sequence_length) == ("NVIDIA BERT", 512), row.case.name
    return Html(f"{percent(row.share_of_peak)}<small>sequences binned by length: shorter than 512</small>")


def follows() -> Html:
    """What a reader may take from it for a choice."""
    return Html(
        markup.paragraphs(
            "Scaling is a matter of the network and of the work per step: before GPUs are added, ask what is sent in a "
            "step and how long that takes. A column that compares one GPU with several compares two precision classes "
            "where the library casts parameters up: look at the bytes that a parameter takes."
        )
    )
