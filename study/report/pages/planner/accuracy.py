"""How far were the predictions from what others published? As tools/planner_accuracy.py found it."""

from __future__ import annotations

from typing import Any

from study.planner import published_rows
from study.planner.published_rows import BASELINES, COMMAND, COMPARED, FOUNDRY, PREDICTORS, SPLITS, Validation
from study.report import markup
from study.report.markup import Html
from study.report.pages.cells import number
from study.report.words import listed, percent, signed_percent
from study.theory import measured_by_others, on_box, peaks
from study.theory.intervals import Evidence

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


def trust_in_words(validation: Validation) -> Html:
    """Say how far the predicted times are off that no constant was fitted to, and where a rule of thumb is nearer."""
    found = [
        validation.summary(split, "planner", "grade", grade)
        for split, grade in (("family", "A"), ("family", "B"), ("model size", FOUNDRY), ("nothing", FOUNDRY))
    ]
    every = validation.summary("family", "planner", "grade", "A, all")
    off = [f"{percent(one['median'], 1)} in the median, {percent(abs(one['worst']))} at worst" for one in found]
    fitting = sum(bool(on_box.fits(peaks.peak(row.shape, row.engine, row.job), row.box)) for row in validation.rows)
    held = [row for row in published_rows.memory() if row["by"] == "metric" and row["predictor"] == "planner"]
    amounts = "; ".join(
        f"{row['group']}: {percent(row['median'], 1)} in the median and {percent(abs(row['worst']))} at worst of "
        f"{row['count']}"
        for row in held
    )
    verdicts = published_rows.fits_verdicts()
    refused = sum(one.trained and not one.predicted for one in verdicts)
    promised = sum(one.predicted and not one.trained for one in verdicts)
    trained = sum(one.trained for one in verdicts)
    return Html(
        markup.paragraphs(
            f"A step's predicted time was off by {off[0]}, for {found[0]['count']} published times of which all is "
            "said, each by a fit that had not seen its family, that is who measured it; by "
            f"{off[1]}, for {found[1]['count']} of which one thing had to be assumed. For {found[2]['count']} of LLM "
            f"Foundry, by fits without their model size: {off[2]}; by the fit to all: {off[3]}.",
            f"With the {every['count'] - found[0]['count']} that the model says it does not describe, small steps, "
            f"grade A is off by {percent(every['median'], 1)} in the median and {percent(every['percentile_90'])} at "
            f"the 90th percentile: the aim of {percent(AIM)} there is {_met(every)} with them, and {_met(found[0])} "
            f"without ({percent(found[0]['percentile_90'], 1)}).",
            f"Published memory: {amounts}. Nothing is fitted to it.",
            _nearer(validation),
            f"Of {len(validation.rows)} rows of LLM Foundry, all of which ran, {fitting} are predicted to fit. Of "
            f"{trained} other configurations that trained, {refused} are predicted not to fit; of "
            f"{len(verdicts) - trained} that ran out of memory, {promised} are predicted to fit.",
        )
    )


def _met(summary: dict[str, Any]) -> str:
    return "met" if summary["percentile_90"] <= AIM else "not met"


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
    """Tabulate the errors of step times beside two rules of thumb; in folds, the planner's by family and group."""
    groups: list[tuple[str, list[list[Any]]]] = []
    for split, title in WITHOUT.items():
        for grade, name in GRADES.items():
            if (split, grade) == ("family", FOUNDRY):
                continue
            rows = []
            for predictor in (*PREDICTORS, COMPARED):
                found = validation.find(split, predictor, "grade", grade)
                row = _summary(predictor, found) if found else [predictor, 0, *_NO_ERRORS]
                if predictor != COMPARED or 0 < row[1] < rows[0][1]:
                    rows.append(row)
            groups.append((f"{name}; {title}", rows))
    note = (
        "Of predicted over published seconds of a step, less one: its size, and the worst with its sign, too slow if "
        "above 0. Constant share of peak: every GPU reaches the same share. Line per GPU: the logarithm of a token's "
        "seconds is linear in those of its FLOPs, the sequence length, the number of GPUs and the tokens of a micro "
        "step; it says nothing where too few rows of the GPU are left. All three are fitted to the same rows. LLM "
        "Foundry's rows in fp8 are left out. Found on "
        f"{validation.content['finished_at'][:10]} by {COMMAND}."
    )
    table = markup.table("Errors against published times", HEAD, groups, note)
    families = [_summary(row["group"], row) for row in validation.content["errors"]
                if (row["left_out"], row["predictor"], row["by"]) == ("family", "planner", "family")]  # fmt: skip
    folds = [
        markup.details(
            "By family, each by a fit without it; the letter is its grade",
            markup.table("The planner's errors by family", HEAD, [("", families)]),
        )
    ]
    folds += [
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
        "such that nine of ten published times of grades A and B that the model describes, and all of offload, lay in "
        "it, each by its worst prediction by a fit without its family, model size or card; its GPU count; or its "
        "generation. Inside: of the predictions that "
        "gave the factor. Held: where the factor, too, knew nothing of what was left out with the case; that is what "
        "to expect. All: with the times of these grades that the model does not describe."
    )
    return Html(markup.table("The interval that a time has", head, list(groups.items()), note))


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


def cases(validation: Validation) -> Html:
    """Tabulate other published times, predicted beside published, by who measured them, with what is known of each."""
    rows = {}
    for case in validation.content["cases"]:
        mark = (" *" if case["calibrates"] else "") + (" †" if case["outside"] else "")
        predicted = Html(f"<em>{number(case['predicted'])}</em>")
        row = [
            f"{case['name']}{mark}", case["grade"], QUANTITIES[case["quantity"]], number(case["published"]), predicted,
            signed_percent(case["error"]), "yes" if case["inside_interval"] else "no",
        ]  # fmt: skip
        rows.setdefault(case["family"], []).append(row)
    head = ["what", "grade", "in", "published", "predicted", "error", "inside"]
    note = (
        "As the constants stand; error: of the step's time, above 0 is too slow. * The constants, or of offload what a "
        "thread of the host reaches, were fitted to these, so that they confirm little. † Outside what "
        "the model describes, by family: "
        f"{'; '.join(f'{family}: {why}' for family, why in _outside(validation).items())}."
    )
    return _by_family("Times that others published", head, rows, note)


def _outside(validation: Validation) -> dict[str, str]:
    return {case["family"]: case["outside"] for case in validation.content["cases"] if case["outside"]}


def memory_cases() -> Html:
    """Tabulate published memory, predicted beside published, by who measured it, and the errors beside estimators'."""
    rows: dict[str, list[list[Any]]] = {}
    for case in measured_by_others.cases("memory"):
        predicted = on_box.predicted_memory(case)
        if case.quantity == "fits":
            cells = [_yes(bool(case.published)), Html(f"<em>{_yes(bool(predicted))}</em>")]
            error = "agrees" if predicted == case.published else "differs"
        else:
            cells = [number(case.published / 1e9), Html(f"<em>{number(predicted / 1e9)}</em>")]
            error = signed_percent(predicted / case.published - 1)
        rows.setdefault(case.family, []).append([case.name, case.grade, QUANTITIES[case.quantity], *cells, error])
    errors: dict[str, list[list[Any]]] = {}
    for row in published_rows.memory():
        errors.setdefault(row["group"], []).append(_summary(row["predictor"], row))
    note = (
        "Predicted over published, less one; what a source measured alike twice counts once. Nothing is fitted to "
        "them. Estimators reckon peaks of tensors."
    )
    table = markup.table("Errors of predicted memory", ["predicted by", *HEAD[1:-1], "too much / too little"],
                         list(errors.items()), note)  # fmt: skip
    head = ["what", "grade", "in", "published", "predicted", "error"]
    return Html(f"{table}\n{_by_family('Memory that others published', head, rows, '').text}")


def _by_family(title: str, head: list[str], rows: dict[str, list[list[Any]]], note: str) -> Html:
    """A folded table, and what is known of each family."""
    known = {case.family: case for kind in ("times", "memory") for case in measured_by_others.cases(kind)}
    described = []
    for family in rows:
        case = known[family]
        source = f'<a href="{markup.escape(case.url)}">{markup.escape(case.source)}</a>'
        described.append(Html(f"<b>{markup.escape(family)}.</b> {markup.escape(case.conditions)} {source}."))
    table = markup.table(title, head, list(rows.items()), note)
    return Html(
        f"{markup.details(f'{title}: {sum(map(len, rows.values()))} numbers', table)}\n"
        f"{markup.details('Conditions and sources', markup.items(described))}"
    )


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"
