"""The page of the planner: what each strategy would need and reach, the form, and how far published rows are off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from study.planner import advice_text, choose, published_rows
from study.planner.asked import PLANNED
from study.planner.choose import Advice, Option
from study.planner.published_rows import COMMAND, COMPARED, FOUNDRY, PREDICTORS, SPLITS, Validation
from study.report import markup
from study.report.markup import GIB, Html, batch, gib, number, percent, signed_percent
from study.theory import measured_by_others, model_states, on_box, peaks
from study.theory.intervals import Evidence

PREDICTED = "Predicted, no run of it."  # ends the note of every table
SHOWN_GIB = 0.05  # what one decimal shows

WITHOUT = {"nothing": "in sample: fitted to all of them"} | {split: f"fitted without their {split}" for split in SPLITS}
GRADES = {
    FOUNDRY: f"{FOUNDRY}: FSDP on A100 and H100",
    "A": "other families, all is said",
    "A, all": "the same, with times that the model does not describe",
    "A, all, as collected": "as collected: with those of which theory had to assume something",
    "B": "one thing is assumed",
    "B, all": "the same, with times that the model does not describe",
    "C": "indicative: more is assumed",
}
AIM = 0.2  # at the 90th percentile, of grade A
ENGINES = {"fsdp": "FSDP", "resident": "one process, DDP, DeepSpeed", "offload": "offload"}
DISTANCES = {"known": "as many as rows have", "new count": "other numbers", "new generation": "other generations"}
QUANTITIES = {
    "tokens_per_second_per_gpu": "tokens/s of a GPU",
    "samples_per_second": "samples/s",
    "seconds_per_step": "s per step",
    "tflops_per_gpu": "TFLOP/s per GPU",
    "peak_allocated_bytes": "GB at the peak",
    "peak_unknown_bytes": "GB at the peak, instrument not named",
    "allocated_bytes": "GB between steps",
    "peak_reserved_bytes": "GB reserved",
    "used_bytes": "GB of the card",
    "fits": "fits",
}


def asked(advice: Advice) -> Html:
    """What is asked and assumed, and what to take: the choice's own words."""
    box, shape = advice.box, advice.shape
    sequences = advice.asked.batch()[0] * box.num_gpus
    facts = [
        ("Model", f"{shape.name}, {shape.num_params:,} parameters"),
        ("GPUs", f"{box.num_gpus} x {box.gpu.name}, {box.num_nodes} nodes"),
        ("Batch", f"{sequences:,} sequences of {advice.asked.sequence_length:,} tokens per step"),
        ("Assumed", advice_text.assumed(advice.asked, box)),
        ("Recommended" if advice.recommended else "Nothing to recommend", advice.reason),
        *(("Note", note) for note in advice.notes),
    ]
    return markup.items(markup.led(*fact) for fact in facts)


def form() -> Html:
    """The form that answers without a server, and the place of its answer; hidden where no script runs."""
    networks = [
        ("", "as one rents it") if rate is None else (rate, f"{rate} Gbit/s of a node") for rate in PLANNED.networks
    ]
    fields = [
        ("model", "Model", [(name, name) for name in PLANNED.models], "gpt2-xl"),
        ("gpu", "GPU", [(name, name) for name in PLANNED.gpus], "a100-80gb"),
        ("gpus", "How many", [(count, count) for count in PLANNED.counts], 8),
        ("length", "Tokens a sequence", [(count, f"{count:,}") for count in PLANNED.lengths], PLANNED.lengths[0]),
        ("batch", "Sequences a GPU and step", [(count, count) for count in PLANNED.per_gpu], PLANNED.per_gpu[0]),
        ("network", "Between nodes", networks, ""),
    ]
    return markup.render("planner.html", folder=PLANNED.folder, fields=fields)


# ---------------------------------------------------------------- strategies


def speed(advice: Advice) -> Html:
    """Tabulate time, throughput, price and what is communicated under each strategy."""
    head = [
        "strategy", "seconds per step", "tokens/s per GPU", "$ per billion tokens", "MFU", "batch", "precision",
        "largest micro batch", "GB communicated per step",
    ]  # fmt: skip
    gpu = advice.box.gpu
    rent = f"${gpu.price_per_hour:.2f} an hour and GPU: {gpu.price_source}, {gpu.price_date}. "
    note = (
        "Below a time its interval: strategies whose intervals overlap are not told apart. Communicated: by one rank, "
        "without a ring's factor (N - 1) / N. MFU: model FLOPs over the dense peak of the type that is multiplied. "
        f"{rent if gpu.price_per_hour else ''}{PREDICTED}"
    )
    rows = [_speed(option) for option in advice.options]
    return markup.predicted(markup.table("Time and price of a step", head, [("", rows)], note, ["precision", "batch"]))


def _speed(option: Option) -> list[Any]:
    prediction = option.prediction
    rest = [
        batch(prediction.job), prediction.engine.precision, option.largest_micro_batch or "none",
        number(float(prediction.communicated_bytes) / 1e9),
    ]  # fmt: skip
    if not prediction.fits:
        return [option.strategy.name, markup.missing("does not fit"), "", "", "", *rest]
    dollars = prediction.dollars_per_billion_tokens
    total, low, high = (
        number(float(end)) for end in (prediction.step.total, prediction.step.low, prediction.step.high)
    )
    return [
        option.strategy.name,
        markup.below(total or "", f"{low} to {'unknown' if option.is_short else high}"),
        number(float(prediction.tokens_per_second_per_gpu)),
        markup.missing("unknown") if dollars is None else f"{dollars:,.0f}",
        percent(float(prediction.mfu)),
        *rest,
    ]


def memory(advice: Advice) -> Html:
    """Tabulate what fills a GPU under each strategy, by part, and what a node's host and disk hold."""
    parts = [part for part in peaks.PARTS if any(option.prediction.peak.parts[part] for option in advice.options)]
    rows = []
    for option in advice.options:
        prediction = option.prediction
        rows.append(
            [
                option.strategy.name,
                batch(prediction.job),
                _free(option),
                *map(_gib, (prediction.needed_bytes, prediction.host_bytes_per_node, prediction.disk_bytes_per_node)),
                *(_gib(prediction.peak.parts[part]) for part in parts),
                peaks.MOMENTS[int(prediction.peak.moment)],
            ]
        )
    note = (
        "GiB. Each strategy at its fastest split of the batch that fits, or the one that misses least (micro "
        "batch x accumulation); c: with activation checkpointing. Needed: all parts, and "
        f"{percent(on_box.ALLOCATOR_SLACK)} that the allocator is assumed to add; a GPU has "
        f"{gib(advice.options[0].prediction.usable_bytes)} to give. Host and disk: of a node. {PREDICTED}"
    )
    head = ["strategy", "batch", "free", "needed", "host", "disk", *(part.replace("_", " ") for part in parts),
            "highest at"]  # fmt: skip
    caption = "Memory of a GPU at its highest moment"
    return markup.predicted(markup.table(caption, head, [("", rows)], note, ["batch", "highest at"]))


def _gib(num_bytes: Any) -> str:
    return gib(float(num_bytes))


def _free(option: Option) -> str:
    """What is left of a GPU, or why the strategy does not fit."""
    free = float(option.prediction.free_bytes)
    if option.prediction.fits:
        return gib(free)
    return markup.missing(f"short of {gib(-free)}" if free < 0 else f"too little {option.prediction.lacking}")


def front(advice: Advice) -> Html:
    """Tabulate the choices that nothing beats in both memory and speed, the fastest first."""
    rows = [
        [
            choice.strategy,
            batch(choice.prediction.job),
            _gib(choice.prediction.needed_bytes),
            number(float(choice.prediction.tokens_per_second_per_gpu)),
            number(float(choice.prediction.step.total)),
        ]
        for choice in reversed(choose.pareto(choose.choices(advice)))
    ]
    head = ["strategy", "batch", "needed, GiB", "tokens/s per GPU", "seconds per step"]
    note = f"Of every split of the batch, what fits and is beaten by nothing in both memory and speed. {PREDICTED}"
    return markup.predicted(markup.table("The front", head, [("", rows)], note, ["batch"]))


def differences(advice: Advice) -> Html:
    """Tabulate model states by the paper and as the engines hold them, with the name of each difference."""
    rows, names = [], set()
    for option in advice.options:
        paper = float(model_states.paper_bytes(option.prediction.engine, advice.shape.num_params, "stepping").total)
        named = _differences(advice, option)
        names |= set(named)
        shown = [f"{reason} {_signed(size)}" for reason, size in named.items() if abs(size) >= SHOWN_GIB * GIB]
        held = paper + sum(named.values())
        rows.append([option.strategy.name, gib(paper), gib(held), _signed(held - paper), Html("<br>").join(shown)])
    head = ["strategy", "by the paper", "as held", "difference", "of which"]
    note = (
        f"GiB of rank 0, wherever they are, as the optimizer is about to step; differences above {SHOWN_GIB}; "
        f"arXiv:1910.02054, sec. 3.1 and 5, against DeepSpeed 0.19.8, DistributedDataParallel and FSDP2. {PREDICTED}"
    )
    table = markup.table("Model states by the paper and as engines hold them", head, [("", rows)], note, ["of which"])
    texts = [markup.led(name, text.replace("`", "")) for name, text in model_states.REASONS.items() if name in names]
    return markup.lines(markup.predicted(table), markup.details("What the names mean", markup.items(texts)))


def _differences(advice: Advice, option: Option) -> dict[str, float]:
    """Bytes by reason, the largest first."""
    sums: dict[str, float] = defaultdict(float)
    engine, accumulates = option.prediction.engine, bool(option.prediction.job.gradient_accumulation_steps > 1)
    sizes = advice.shape.parameters
    for difference in model_states.engine_differences(engine, sizes, 0, "stepping", accumulates):
        sums[difference.reason] += float(difference.num_bytes)
    return dict(sorted(sums.items(), key=lambda item: -abs(item[1])))


def _signed(num_bytes: float) -> str:
    return f"{num_bytes / GIB:+,.1f}".replace("-", "\N{MINUS SIGN}") if abs(num_bytes) >= SHOWN_GIB * GIB else "0"


# ---------------------------------------------------------------- how far published rows are off

HEAD = ["predicted by", "times", "median", "90th percentile", "worst", "too slow / too fast"]


def errors(validation: Validation) -> Html:
    """Tabulate the errors of step times beside two rules of thumb; in folds, the planner's by family and group."""
    groups = []
    for split, title in WITHOUT.items():
        for grade, name in GRADES.items():
            found = (validation.find(split, predictor, "grade", grade) for predictor in (*PREDICTORS, COMPARED))
            rows = [_summary(row["predictor"], row) for row in found if row]
            groups.append((f"{name}; {title}", rows))
    note = (
        "Of predicted over published seconds of a step, less one: its size, and the worst with its sign, too slow if "
        "above 0. Constant share of peak: every GPU reaches the same share. Line per GPU: the logarithm of a token's "
        "seconds is linear in those of its FLOPs, the sequence length, the number of GPUs and the tokens of a micro "
        "step. All are fitted to the same rows; LLM Foundry's in fp8 are left out. Found on "
        f"{validation.content['finished_at'][:10]} by {COMMAND}."
    )
    folds = [
        markup.details(
            f"The planner's errors by family, generation, engine, model size and GPU count: {title}",
            markup.table(f"The planner's errors, {title}", HEAD, _by_group(validation, split)),
        )
        for split, title in WITHOUT.items()
    ]
    table = markup.table("Errors against published times", HEAD, [group for group in groups if group[1]], note)
    return markup.lines(table, *folds)


def _by_group(validation: Validation, split: str) -> list[tuple[str, list[list[Any]]]]:
    """The planner's rows of the table for one way to leave out, by what they are grouped by."""
    groups: dict[str, list[list[Any]]] = {}
    for row in validation.content["errors"]:
        if row["left_out"] == split and row["predictor"] == "planner" and row["by"] != "grade":
            groups.setdefault(row["by"], []).append(_summary(row["group"], row))
    return list(groups.items())


def _summary(name: str, summary: dict[str, Any]) -> list[Any]:
    return [
        name,
        summary["count"],
        *(percent(summary[key], 1) for key in ("median", "percentile_90")),
        markup.below(signed_percent(summary["worst"]), summary["worst_case"]),
        f"{summary['too_slow']} / {summary['too_fast']}",
    ]


def intervals(validation: Validation) -> Html:
    """Tabulate the intervals that times have, by the kind of case, and how often they held."""
    groups: dict[str, list[list[Any]]] = {}
    for found in validation.content["intervals"]:
        rests = Evidence.of(found)
        groups.setdefault(ENGINES[rests.engine], []).append(
            [
                DISTANCES[rests.distance],
                f"{rests.spread:g}",
                rests.cases,
                f"{rests.inside} of {rests.predictions}",
                f"{found['held']} of {found['tried']}",
                f"{found['held_all']} of {found['tried_all']}",
            ]
        )
    head = ["what is asked", "factor", "times", "inside", "held", "held, all"]
    note = (
        "Numbers of GPUs: under that engine, on the generations of A100, H100 and V100. The factor, either way, is "
        "such that nine of ten published times lay in it, each by its worst prediction by a fit without what is named. "
        "Inside: of the predictions that gave the factor. Held: where the factor, too, knew nothing of what was left "
        "out with the case; that is what to expect. All: with times that the model does not describe."
    )
    return markup.table("The interval that a time has", head, list(groups.items()), note)


def cases(validation: Validation) -> Html:
    """Tabulate other published times, predicted beside published, by who measured them, with what is known of each."""
    rows: dict[str, list[list[Any]]] = {}
    for case in validation.content["cases"]:
        mark = (" *" if case["calibrates"] else "") + (" †" if case["outside"] else "")
        row = [
            f"{case['name']}{mark}", case["grade"], QUANTITIES[case["quantity"]], number(case["published"]),
            Html("<em>{}</em>").format(number(case["predicted"])), signed_percent(case["error"]),
            "yes" if case["inside_interval"] else "no",
        ]  # fmt: skip
        rows.setdefault(case["family"], []).append(row)
    head = ["what", "grade", "in", "published", "predicted", "error", "inside"]
    note = (
        "As the constants stand; error: of the step's time, above 0 is too slow. * The constants were fitted to these, "
        "so that they confirm little. † Outside what the model describes."
    )
    return _by_family("Times that others published", head, rows, note)


def memory_cases() -> Html:
    """Tabulate published memory, predicted beside published, by who measured it, and the errors beside estimators'."""
    rows: dict[str, list[list[Any]]] = {}
    for case in measured_by_others.cases("memory"):
        predicted = float(on_box.predicted_memory(case))
        if case.quantity == "fits":
            cells = ["yes" if fits else "no" for fits in (case.published, predicted)]
            error = "agrees" if predicted == case.published else "differs"
        else:
            cells = [number(num_bytes / 1e9) or "" for num_bytes in (case.published, predicted)]
            error = signed_percent(predicted / case.published - 1)
        published, ours = cells
        row = [case.name, case.grade, QUANTITIES[case.quantity], published, Html("<em>{}</em>").format(ours), error]
        rows.setdefault(case.family, []).append(row)
    groups: dict[str, list[list[Any]]] = {}
    for summary in published_rows.memory():
        groups.setdefault(summary["group"], []).append(_summary(summary["predictor"], summary))
    note = (
        "Predicted over published, less one; what a source measured alike twice counts once. Nothing is fitted to it."
    )
    head = ["predicted by", "amounts", *HEAD[2:-1], "too much / too little"]
    table = markup.table("Errors of predicted memory", head, list(groups.items()), note)
    head = ["what", "grade", "in", "published", "predicted", "error"]
    return markup.lines(table, _by_family("Memory that others published", head, rows, ""))


def _by_family(title: str, head: list[str], rows: dict[str, list[list[Any]]], note: str) -> Html:
    """A folded table, and what is known of each family."""
    known = {case.family: case for kind in ("times", "memory") for case in measured_by_others.cases(kind)}
    described: Iterable[str] = (
        Html('<b>{}.</b> {} <a href="{}">{}</a>.').format(name, of.conditions, of.url, of.source)
        for name, of in known.items()
        if name in rows
    )
    table = markup.table(title, head, list(rows.items()), note)
    return markup.lines(
        markup.details(f"{title}: {sum(map(len, rows.values()))} numbers", table),
        markup.details("Conditions and sources", markup.items(described)),
    )
