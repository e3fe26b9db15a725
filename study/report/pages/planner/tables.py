"""What would each strategy need and reach, and where do engines depart from the paper? Sentences and tables."""

from __future__ import annotations

from collections import defaultdict

from study.planner import advice_text, choose
from study.planner.choose import Advice, Choice, Option
from study.report import markup
from study.report.markup import Html
from study.report.pages.cells import number
from study.report.words import GIB, batch, gib, listed, percent
from study.theory import model_states, on_box, peaks

PREDICTED = "Predicted, no run of it."  # ends the caption of every table
SHOWN_GIB = 0.05  # what one decimal shows


def in_words(advice: Advice) -> Html:
    """Say what is asked, what to take, and that none of it is measured."""
    asked, box, shape = advice.asked, advice.box, advice.shape
    sequences, _, _ = asked.batch()
    nodes = f" in {box.num_nodes} nodes" if box.num_nodes > 1 else ""
    setting = (
        f"{shape.name}, {shape.num_params:,} parameters, on {box.num_gpus} x {box.gpu.name}{nodes}: "
        f"{sequences * box.num_gpus:,} sequences of {asked.sequence_length:,} tokens per step."
    )
    taken = (
        f"Recommended: {advice.reason}." if advice.recommended else f"{advice.reason[:1].upper()}{advice.reason[1:]}."
    )
    warning = Html(
        "<strong>Nothing on this page is measured</strong>, except what is called published: it is what "
        f"study/theory says, before anybody rents a GPU. Assumed: {markup.escape(advice_text.assumed(asked, box))}."
    )
    notes = [f"Note: {note}." for note in advice.notes]
    return Html(
        "\n".join(
            [
                markup.paragraphs(f"{setting} {taken}", kind="lead"),
                markup.paragraphs(warning),
                markup.paragraphs(*notes, kind="note"),
            ]
        )
    )


# ---------------------------------------------------------------- strategies


def memory(advice: Advice) -> Html:
    """Tabulate what each strategy needs of a GPU and of its node, and what is left of it or missing."""
    rows = [
        [
            option.strategy.name,
            free(option),
            gib(option.prediction.needed_bytes),
            gib(option.prediction.host_bytes_per_node),
            gib(option.prediction.disk_bytes_per_node),
            batch(option.prediction.job),
        ]
        for option in advice.options
    ]
    note = (
        "GiB. Each strategy at its fastest split of the batch that fits, or the one that misses least (micro "
        "batch x accumulation); c: with activation checkpointing. Needed: all parts, and "
        f"{percent(on_box.ALLOCATOR_SLACK)} that the allocator is assumed to add; a GPU has "
        f"{gib(advice.options[0].prediction.usable_bytes)} to give. Host and disk: of a node. {PREDICTED}"
    )
    head = ["strategy", "free", "needed", "host", "disk", "batch"]
    return predicted(markup.table("Memory of a GPU at its highest moment", head, [("", rows)], note, ["batch"]))


def memory_parts(advice: Advice) -> Html:
    """Tabulate what fills a GPU under each strategy, behind a click."""
    parts = [part for part in peaks.PARTS if any(o.prediction.peak.parts[part] for o in advice.options)]
    rows = [
        [
            option.strategy.name,
            *(gib(option.prediction.peak.parts[part]) for part in parts),
            peaks.MOMENTS[option.prediction.peak.moment],
        ]
        for option in advice.options
    ]
    head = ["strategy", *(part.replace("_", " ") for part in parts), "highest at"]
    caption = "Memory of a GPU at its highest moment, by part"
    table = predicted(markup.table(caption, head, [("", rows)], f"GiB. {PREDICTED}", ["highest at"]))
    return Html(markup.details("By part, as drawn above", table.text))


def speed(advice: Advice) -> Html:
    """Tabulate time, throughput, price and what is communicated under each strategy."""
    head = [
        "strategy", "seconds per step", "tokens/s per GPU", "$ per billion tokens", "MFU", "batch", "precision",
        "largest micro batch", "GB communicated per step",
    ]  # fmt: skip
    rows = []
    for option in advice.options:
        prediction = option.prediction
        dollars = prediction.dollars_per_billion_tokens
        price = markup.missing("unknown") if dollars is None else f"{dollars:,.0f}"
        total, low, high = map(number, (prediction.step.total, prediction.step.low, prediction.step.high))
        interval = f"{low} to {'unknown' if option.is_short else high}"
        rows.append(
            [
                option.strategy.name,
                Html(f"{total}<small>{interval}</small>") if prediction.fits else markup.missing("does not fit"),
                number(prediction.tokens_per_second_per_gpu) if prediction.fits else "",
                price if prediction.fits else "",
                percent(prediction.mfu) if prediction.fits else "",
                batch(prediction.job),
                prediction.engine.precision,
                option.largest_micro_batch or "none",
                number(prediction.communicated_bytes / 1e9),
            ]
        )
    gpu = advice.box.gpu
    rent = (
        f"${gpu.price_per_hour:.2f} an hour and GPU: {gpu.price_source}, {gpu.price_date}" if gpu.price_per_hour else ""
    )
    resting = {option.prediction.step.evidence.sentence: None for option in advice.options}
    note = (
        "Below a time its interval: strategies whose intervals overlap are not told apart. Communicated: by one rank, "
        "without a ring's factor (N - 1) / N. MFU: model FLOPs over the dense peak of the type that is multiplied. "
        f"{rent and rent + '. '}{PREDICTED}"
    )
    table = predicted(markup.table("Time and price of a step", head, [("", rows)], note, ["precision", "batch"]))
    said = markup.items(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in resting)
    return Html(f"{table.text}\n{markup.details('What the intervals rest on', said)}")


def front(advice: Advice) -> Html:
    """Tabulate the choices that nothing beats in both memory and speed, the fastest first."""
    choices = choose.pareto(choose.choices(advice))
    if not choices:
        return Html(markup.paragraphs("No strategy fits at any split of the batch.", kind="note"))
    rows = [_choice(choice) for choice in reversed(choices)]
    head = ["strategy", "batch", "needed, GiB", "tokens/s per GPU", "seconds per step"]
    note = (
        f"What fits, and is beaten by nothing in both memory and speed. c: with activation checkpointing. {PREDICTED}"
    )
    return predicted(markup.table("The front", head, [("", rows)], note, ["batch"]))


def _choice(choice: Choice) -> list[str]:
    prediction = choice.prediction
    return [
        choice.strategy,
        batch(prediction.job),
        gib(prediction.needed_bytes),
        number(prediction.tokens_per_second_per_gpu),
        number(prediction.step.total),
    ]


def predicted(table: str) -> Html:
    """Give a table the look of what is not measured."""
    return Html(f'<div class="predicted">\n{table}\n</div>')


def free(option: Option) -> Html | str:
    """What is left of a GPU, or why the strategy does not fit."""
    prediction = option.prediction
    if prediction.fits:
        return gib(prediction.free_bytes)
    if prediction.free_bytes < 0:
        return markup.missing(f"short of {gib(-prediction.free_bytes)}")
    return markup.missing(f"too little {prediction.lacking}")


# ---------------------------------------------------------------- the paper and the engines


def differences(advice: Advice) -> Html:
    """Tabulate model states by the paper and as the engines hold them, with the name of each difference."""
    rows = []
    for option in advice.options:
        engine = option.prediction.engine
        paper = model_states.paper_bytes(engine, advice.shape.num_params, "stepping").total
        named = _differences(advice, option)
        held = paper + sum(named.values())
        reasons_shown = [f"{reason} {_signed(size)}" for reason, size in named.items() if _is_shown(size)]
        small = [reason for reason, size in named.items() if not _is_shown(size)]
        reasons_shown += [f"{listed(small)} below {SHOWN_GIB}"] if small else []
        rows.append(
            [
                option.strategy.name,
                gib(paper),
                gib(held),
                _signed(held - paper),
                Html("<br>".join(map(markup.escape, reasons_shown or ["none known"]))),
            ]
        )
    head = ["strategy", "by the paper", "as held", "difference", "of which"]
    note = (
        "GiB of rank 0, wherever they are, as the optimizer is about to step; arXiv:1910.02054, sec. 3.1 and 5, "
        f"against DeepSpeed 0.19.8, DistributedDataParallel and FSDP2. {PREDICTED}"
    )
    return predicted(
        markup.table("Model states by the paper and as engines hold them", head, [("", rows)], note, ["of which"])
    )


def reasons(advice: Advice) -> Html:
    """Say what the names of the differences mean."""
    there = {reason for option in advice.options for reason in _differences(advice, option)}
    texts = [markup.led(name, text.replace("`", "")) for name, text in model_states.REASONS.items() if name in there]
    return Html(markup.details("What the names mean", markup.items(texts)))


def _differences(advice: Advice, option: Option) -> dict[str, float]:
    """Bytes by reason, the largest first."""
    sums: dict[str, float] = defaultdict(float)
    engine, accumulates = option.prediction.engine, option.prediction.job.gradient_accumulation_steps > 1
    sizes = advice.shape.parameters
    for difference in model_states.engine_differences(engine, sizes, 0, "stepping", accumulates):
        sums[difference.reason] += difference.num_bytes
    return dict(sorted(sums.items(), key=lambda item: -abs(item[1])))


def _is_shown(num_bytes: float) -> bool:
    return abs(num_bytes) >= SHOWN_GIB * GIB


def _signed(num_bytes: float) -> str:
    return f"{num_bytes / GIB:+,.1f}".replace("-", "\N{MINUS SIGN}") if _is_shown(num_bytes) else "0"
