"""How far were the predictions from what others published? As study/planner/accuracy.py found it."""

from __future__ import annotations

from typing import Any

from study.planner.accuracy import COMMAND, Validation
from study.report import markup
from study.report.markup import Html
from study.report.pages.cells import number
from study.report.words import percent, signed_percent
from study.theory import measured_by_others, on_box, peaks

LEFT_OUT = {"model_size": "a model size", "folds": "a fifth of the rows"}  # by a fit, and then judged


def trust_in_words(validation: Validation) -> Html:
    """Say how large the errors are, on rows that a fit has seen and has not, and whether what ran is said to fit."""
    fitted, target = validation.content["as_they_stand"], validation.content["target"]
    fitting = sum(bool(on_box.fits(peaks.peak(row.shape, row.engine, row.job), row.box)) for row in validation.rows)
    unseen = [summary for fit in validation.content["fit"].values() for key, summary in fit.items() if key in LEFT_OUT]
    median, ninth = (percent(max(summary[key] for summary in unseen), 1) for key in ("median", "percentile_90"))
    return Html(
        markup.paragraphs(
            f"Of {len(validation.rows)} published rows of MPT training (LLM Foundry, FSDP), all of which ran, "
            f"{fitting} are predicted to fit. On the {fitted['count']} that are not in fp8, tokens/s per GPU are off "
            f"by {percent(fitted['median'], 1)} in the median, and in nine of ten by at most "
            f"{percent(fitted['percentile_90'], 1)}. By constants fitted without the rows that they are judged by, the "
            f"medians are at most {median} and the 90th percentiles at most {ninth}; aimed at were "
            f"{percent(target['median'])} and {percent(target['percentile_90'])}.",
            "These are GPTs on A100 and H100, sharded by FSDP. What others published of DeepSpeed, of offload and of "
            "older GPUs is further off: the second table.",
        )
    )


def errors(validation: Validation) -> Html:
    """Tabulate the errors of tokens per second: seen, unseen, and of another device."""
    groups = [
        ("the constants as they stand, fitted to these rows", [_summary("all", validation.content["as_they_stand"])])
    ]
    groups.append(
        (
            "fitted to the other rows of the generation, judged by what was left out",
            [
                _summary(f"{generation}, {LEFT_OUT[key]}", summary)
                for generation, fit in validation.content["fit"].items()
                for key, summary in fit.items()
                if key in LEFT_OUT
            ],
        )
    )
    other = [_summary(name, summary) for name, summary in validation.content["other_device"].items()]
    groups.append(("one device's rows by constants fitted to another", other))
    head = ["rows", "count", "median", "90th percentile", "worst", "bias"]
    note = (
        f"Absolute relative errors of predicted tokens/s per GPU; bias: median with its sign. Rows in fp8, which the "
        f"models do not know, are left out. Found on {validation.content['finished_at'][:10]} by {COMMAND}."
    )
    return Html(markup.table("Errors against published throughput", head, groups, note))


def _summary(name: str, summary: dict[str, float]) -> list[Any]:
    return [
        name,
        summary["count"],
        *(percent(summary[key], 1) for key in ("median", "percentile_90", "maximum")),
        signed_percent(summary["median_signed"], 1),
    ]


QUANTITIES = {
    "samples_per_second": "samples/s",
    "seconds_per_step": "s per step",
    "tflops_per_gpu": "TFLOP/s per GPU",
}


def cases(validation: Validation) -> Html:
    """Tabulate other published numbers, predicted beside published, and list what is known of each."""
    groups: dict[str, list[list[Any]]] = {}
    described = []
    for case in validation.content["cases"]:
        model, box, *how = case["name"].split(", ")
        mark = " *" if case["calibrates"] else ""
        groups.setdefault(f"{model}, {box}", []).append(
            [
                Html(",<br>".join(map(markup.escape, how)) + mark),
                QUANTITIES[case["quantity"]],
                number(case["published"]),
                Html(f"<em>{number(case['predicted'])}</em>"),
                signed_percent(case["error"]),
                "yes" if case["inside_interval"] else "no",
            ]
        )
        described.append(markup.led(case["name"], f"{case['conditions']}. {case['source']}."))
    head = ["how", "in", "published", "predicted", "error", "inside the interval"]
    note = "* A constant of the models was set by it, so it confirms nothing."
    table = markup.table("Other published numbers", head, list(groups.items()), note, ["in", "inside the interval"])
    return Html(f"{table}\n{markup.details('Conditions and sources', markup.items(described))}")


AMOUNTS = {"peak_gibibytes": "GiB at the peak", "allocated_gibibytes": "GiB between steps", "fits": "fits"}


def memory_cases() -> Html:
    """Tabulate published memory, predicted beside published, and list what is known of each."""
    groups: dict[str, list[list[Any]]] = {}
    described = []
    for case in measured_by_others.cases("memory"):
        model, box, *how = case.name.split(", ")
        predicted = on_box.predicted_memory(case)
        if case.quantity == "fits":
            cells = [_yes(case.published), Html(f"<em>{_yes(predicted)}</em>")]
            error = "agrees" if predicted == case.published else "differs"
        else:
            cells = [number(case.published), Html(f"<em>{number(predicted)}</em>")]
            error = signed_percent(predicted / case.published - 1)
        row = [Html(",<br>".join(map(markup.escape, how))), AMOUNTS[case.quantity], *cells, error]
        groups.setdefault(f"{model}, {box}", []).append(row)
        described.append(markup.led(case.name, f"{case.conditions}. {case.source}."))
    head = ["how", "in", "published", "predicted", "error"]
    table = markup.table("Published memory of a GPU", head, list(groups.items()), "", ["in", "error"])
    return Html(f"{table}\n{markup.details('Conditions and sources', markup.items(described))}")


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"
