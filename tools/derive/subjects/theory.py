"""How far the planner's formulas are from this project's runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

from committed_runs import against_theory, runs
from wording import percent, span, tabulate, too_high_or_low, whole_percent

from study.compare import memory_views, predicted

NEARLY_EXACT = 0.01  # of a peak: more than this is counted too much in runs whose threads were not waited for
EXACT = 1e-5  # relative; nearer a state is not predicted: Adam's step counters are left out


def close(errors: list[float]) -> int:
    """Count the errors of at most 5 %."""
    return sum(abs(error) <= memory_views.TARGET_ERROR for error in errors)


def close_peaks_and_worst(errors: list[memory_views.Error]) -> str:
    """Count the peaks that are predicted within 5 %, and name the run with the worst prediction."""
    worst = max(errors, key=lambda error: abs(error.error))
    num_close = close([error.error for error in errors])
    return f"{num_close} within 5 %; the worst error is {percent(worst.error)} (`{worst.run}`)"


def inexact_states() -> list[memory_views.Error]:
    """Return the runs whose model states are predicted wrongly by more than 0.001 %."""
    return [error for error in against_theory().states if abs(error.error) > EXACT]


def planner_accuracy() -> str:
    """Compare the planner's formulas with the committed runs."""
    sent = [cell for run in runs() if run.world_size > 1 and (cell := predicted.messages(run))]
    inexact = inexact_states()
    errors_text = ", ".join(f"{percent(each.error, 2)} (`{each.run}`)" for each in inexact)
    states = f"{len(runs()) - len(inexact)} within 0.001 %; the other errors are {errors_text}"
    exactly_sent = [cell for cell in sent if cell.error <= EXACT]
    furthest = max(sent, key=lambda cell: cell.error)
    peaks = against_theory().peaks
    exact = [error for error in peaks if error.overcount <= NEARLY_EXACT]
    beyond = [error.beyond for error in peaks]
    furthest_peak = max(beyond, key=abs)
    side = "above" if furthest_peak > 0 else "below"
    inside = f"{close(beyond)} within 5 % of the range; the worst is {percent(abs(furthest_peak))} {side} the range"
    rows = [
        ["model states", f"the sizes of the tensors that the engines hold, in all {len(runs())} runs", states],
        ["bytes communicated per step", f"the recorded collectives, in all {len(sent)} runs of several processes",
         f"{len(exactly_sent)} within 0.001 %; the worst error is {percent(furthest.error)} "
         f"(`{furthest.record.run_id}`)"],
        ["peak of the tensors in a step", f"the measured peak, in all {len(peaks)} runs that measured it",
         close_peaks_and_worst(peaks)],
        ["the same peak", f"the {len(exact)} of these runs whose measurement is at most {percent(NEARLY_EXACT, 0)} too "
         "large", close_peaks_and_worst(exact)],
        ["the same peak", f"all {len(peaks)} runs, with the range of values that the true peak may have", inside],
    ]  # fmt: skip
    return tabulate(["predicted quantity", "compared with", "result"], rows)


def exact_states() -> str:
    """Count the runs whose model states are predicted within 0.001 %."""
    return f"{len(runs()) - len(inexact_states()):,} of {len(runs()):,}"


def number_of_close_peaks() -> str:
    """Count the runs whose peak of tensors is predicted within 5 %."""
    peaks = [error.error for error in against_theory().peaks]
    return f"{close(peaks):,} of {len(peaks):,}"


@cache
def errors_of_real_peaks() -> dict[str, float]:
    """Return the error of the predicted peak of each run of `peaks-real`."""
    peaks = against_theory().peaks
    return {error.run: error.error for error in peaks if error.run.startswith("peaks-real/")}


def real_peaks_in_words() -> str:
    """Say how well the peaks of `peaks-real` are predicted."""
    errors = [abs(error) for error in errors_of_real_peaks().values()]
    return (
        f"The median error is {percent(statistics.median(errors))}. In {close(errors)} of the "
        f"{len(errors)} runs the error is at most 5 %, and the worst error is {whole_percent(max(errors))}."
    )


def worst_real_peak() -> str:
    """Name the run of `peaks-real` whose peak is predicted worst."""
    run, error = max(errors_of_real_peaks().items(), key=lambda item: abs(item[1]))
    return f"{too_high_or_low(error)} (`{run}`)"


def zero2_in_bf16() -> str:
    """Return the errors of the predicted peaks of ZeRO-2 with default buffers in bf16."""
    errors = [error for run, error in errors_of_real_peaks().items() if "-zero2-" in run and run.endswith("-bf16")]
    return f"{span((100 * error for error in errors), 0)} %"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/planner-accuracy.md", "accuracy"): planner_accuracy,
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/memory-and-time.md", "states"): exact_states,
    ("docs/memory-and-time.md", "close_peaks"): number_of_close_peaks,
    ("docs/memory-and-time.md", "real_peaks"): real_peaks_in_words,
    ("reports/memory-and-time.md", "worst_peak"): worst_real_peak,
    ("reports/memory-and-time.md", "zero2_bf16"): zero2_in_bf16,
}
