"""How far were the predictions from what others published? As study/planner/accuracy.py found it."""

from __future__ import annotations

from typing import Any

from study.planner.accuracy import COMMAND, Validation, evidence
from study.planner.cross_validation import BASELINES, COMPARED, PREDICTORS, SPLITS
from study.report import markup
from study.report.markup import Html
from study.report.pages.cells import number
from study.report.words import listed, percent, signed_percent
from study.theory import measured_by_others, on_box, peaks

WITHOUT = {"nothing": "in sample: fitted to all of them"} | {split: f"fitted without their {split}" for split in SPLITS}
ROWS, NUMBERS = "the rows that constants are fitted to", "single numbers"
KINDS = {ROWS: "FSDP, the rows that constants are fitted to", NUMBERS: "single numbers: DDP, DeepSpeed, offload"}
ENGINES = {
    "fsdp": "FSDP, fused kernels",
    "resident": "DDP, DeepSpeed, other kernels",
    "offload": "offload",
}
DISTANCES = {
    "known": "8 to 512 GPUs",
    "new count": "fewer or more GPUs",
    "new generation": "other generations",
}


def trust_in_words(validation: Validation) -> Html:
    """Say how far the predicted times are off that no constant was fitted to, and where a rule of thumb is nearer."""
    seen, size, generation = (
        validation.summary(split, "planner", "kind", ROWS) for split in ("nothing", "model size", "generation")
    )
    others = validation.summary("model size", "planner", "kind", NUMBERS)
    fitting = sum(bool(on_box.fits(peaks.peak(row.shape, row.engine, row.job), row.box)) for row in validation.rows)
    off = "{} in the median, {} at worst".format
    said = [off(percent(one["median"], 1), percent(abs(one["worst"]))) for one in (size, seen, generation, others)]
    return Html(
        markup.paragraphs(
            f"A step's predicted time was off by {said[0]}, for {size['count']} published trainings under FSDP on A100 "
            f"and H100, each by a fit that had not seen its model size. By the fit to all of them: {said[1]}; by a fit "
            f"without its generation of GPUs: {said[2]}.",
            f"For {others['count']} other published numbers, of DDP, DeepSpeed and offload: {said[3]}, and "
            f"{others['too_fast']} of them took longer than predicted.",
            _nearer(validation),
            f"Of {len(validation.rows)} published rows, all of which ran, {fitting} are predicted to fit.",
        )
    )


def _nearer(validation: Validation) -> str:
    """Name the engines for which a rule of thumb has the smaller median error, of the same times."""
    found: dict[str, list[str]] = {}
    for split in SPLITS:
        for row in validation.content["errors"]:
            if row["left_out"] != split or row["by"] != "engine" or row["predictor"] not in BASELINES:
                continue
            ours = validation.find(split, BASELINES[row["predictor"]], "engine", row["group"])
            if ours and row["median"] < ours["median"]:
                name = f"{row['predictor']} for {row['group']} ({row['count']} times)"
                medians = f"{percent(row['median'], 1)} against {percent(ours['median'], 1)}"
                found.setdefault(name, []).append(f"their {split} ({medians})")
    if not found:
        return "No rule of thumb comes nearer."
    places = "; ".join(f"{name}, without {listed(splits)}" for name, splits in found.items())
    return f"A rule of thumb comes nearer here, by median errors: {places}."


def errors(validation: Validation) -> Html:
    """Tabulate the errors of step times beside two rules of thumb; in a fold, the planner's by group."""
    groups: list[tuple[str, list[list[Any]]]] = []
    for split, title in WITHOUT.items():
        for kind, name in KINDS.items():
            rows = []
            for predictor in (*PREDICTORS, COMPARED):
                found = validation.find(split, predictor, "kind", kind)
                row = _summary(predictor, found) if found else [predictor, 0, *_NO_ERRORS]
                if predictor != COMPARED or 0 < row[1] < rows[0][1]:
                    rows.append(row)
            groups.append((f"{name}; {title}", rows))
    note = (
        "Of predicted over published seconds of a step, less one: its size, and the worst with its sign, too slow if "
        "above 0. Constant share of peak: every GPU reaches the same share. Line per GPU: the logarithm of a token's "
        "seconds is linear in those of its FLOPs, the sequence length, the number of GPUs and the tokens of a micro "
        "step; it says nothing where too few rows of the GPU are left. All three are fitted to the same rows. Rows in "
        f"fp8, which the models do not know, are left out. Found on {validation.content['finished_at'][:10]} by "
        f"{COMMAND}."
    )
    table = markup.table("Errors against published times", HEAD, groups, note)
    folds = [
        markup.details(
            f"The planner's errors by generation, engine, model size and GPU count: {title}",
            markup.table(f"The planner's errors, {title}", HEAD, _by_group(validation, split)),
        )
        for split, title in WITHOUT.items()
    ]
    return Html("\n".join([table, *folds]))


_NO_ERRORS = (markup.missing("cannot predict"), "", "", "")
HEAD = ["predicted by", "times", "median", "90th percentile", "worst", "too slow / too fast"]


def _by_group(validation: Validation, split: str) -> list[tuple[str, list[list[Any]]]]:
    """The planner's rows of the table for one way to leave out, by what they are grouped by."""
    groups: dict[str, list[list[Any]]] = {"generation": [], "engine": [], "model size": [], "GPU count": []}
    for row in validation.content["errors"]:
        if row["left_out"] == split and row["predictor"] == "planner" and row["by"] in groups:
            groups[row["by"]].append(_summary(row["group"], row))
    return list(groups.items())


def _summary(name: str, summary: dict[str, Any]) -> list[Any]:
    worst = f"{signed_percent(summary['worst'])}<small>{markup.escape(summary['worst_case'])}</small>"
    return [
        name,
        summary["count"],
        *(percent(summary[key], 1) for key in ("median", "percentile_90")),
        Html(worst),
        f"{summary['too_slow']} / {summary['too_fast']}",
    ]


def intervals(validation: Validation) -> Html:
    """Tabulate the intervals that times have, by the kind of case, and how often they held."""
    groups: dict[str, list[list[Any]]] = {}
    for found in validation.content["intervals"]:
        rests = evidence(found)
        groups.setdefault(ENGINES[rests.engine], []).append(
            [
                DISTANCES[rests.distance],
                f"{rests.spread:g}",
                rests.cases,
                f"{rests.inside} of {rests.predictions}",
                f"{found['held']} of {found['tried']}",
            ]
        )
    head = ["what is asked", "factor", "times", "held", "held, made without their group"]
    note = (
        "Numbers of GPUs: of A100's and H100's generations. The factor, either way, is such that nine of ten published "
        "times lay in it, each by its worst prediction by a fit without its model size or card, its GPU count, or its "
        "generation; where fewer than nine are known of a kind, all of the engine's are taken, and the factor is the "
        "largest. Held: predictions inside. Made without their group: the same, where the factor too knew nothing of "
        "what was left out with the case."
    )
    return Html(markup.table("The interval that a time has", head, list(groups.items()), note))


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
    head = ["how", "in", "published", "predicted", "error", "inside"]
    note = (
        "As the constants stand; error: of the step's time, above 0 is too slow. * What a thread of the host reaches "
        "was fitted to these, so that they confirm little."
    )
    table = markup.table("Other published numbers", head, list(groups.items()), note, ["in", "inside"])
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
