"""How far the planner is from published trainings of adapters."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from wording import errors_in_short, tabulate, whole_percent

from study.accuracy import published_rows
from study.claims import ledger, verdicts
from zero_study.theory import measured_by_others, prediction

OF_ADAPTERS = {  # quantities of published rows with adapters, as a reader names them
    "peak_allocated_bytes": "peak of tensors",
    "peak_reserved_bytes": "peak reserved by PyTorch's allocator",
    "used_bytes": "memory used on the whole card",
    "peak_unknown_bytes": "peak, without the name of the measuring tool",
    "allocated_bytes": "tensors between two steps",
    "seconds_per_step": "seconds per step",
    "tokens_per_second_per_gpu": "seconds per step, from tokens per second",
}


def adapters_table() -> str:
    """Tabulate the errors of memory and times of adapters by what was measured and by source.

    FSDP1 is separate, because the planner predicts FSDP2.
    """
    groups: dict[tuple[str, str], list[published_rows.AdapterError]] = {}
    for each in published_rows.adapter_errors():
        family = each.case.family.replace(" adapters", "")
        family += ", FSDP1 on 2 GPUs" if family.startswith("fms") and each.case.box.num_gpus > 1 else ""
        groups.setdefault((each.case.quantity, family), []).append(each)
    rows = []
    for quantity, words in OF_ADAPTERS.items():
        for (of_group, family), errors in groups.items():
            if of_group == quantity:
                printed = [each.printed_error for each in errors if each.printed_error is not None]
                cells = [errors_in_short(each.error for each in errors), errors_in_short(printed) if printed else ""]
                rows.append([words, family, str(len(errors)), *cells])
    column = "error of the prediction: median / 90th percentile / worst"
    return tabulate(["what was measured", "source", "values", column, "error of the value that `advise` prints"], rows)


def predicted_to_fit(trained: bool) -> list[bool]:
    """Return what is predicted for the published configurations with adapters that trained, or that did not."""
    cases = [case for case in measured_by_others.cases_of("adapters") if case.quantity == "fits"]
    return [bool(prediction.predicted_memory(case)) for case in cases if bool(case.published) == trained]


def adapters_that_fit() -> str:
    """Tabulate how many published configurations with adapters trained, and how many are predicted to fit."""
    rows = []
    for trained, words in ((True, "trained"), (False, "ran out of memory")):
        predicted = predicted_to_fit(trained)
        rows.append([words, *map(str, (len(predicted), predicted.count(True), predicted.count(False)))])
    return tabulate(["published", "configurations", "predicted to fit", "predicted not to fit"], rows)


def adapters_that_trained() -> str:
    """Say how many published configurations with adapters that trained are predicted to fit."""
    predicted = predicted_to_fit(trained=True)
    right = predicted.count(True)
    share = "All" if right == len(predicted) else f"{right} of"
    return f"{share} {len(predicted)} published configurations that trained"


def adapter_peaks() -> str:
    """Say how far predicted peaks of tensors of trainings with adapters are from published ones."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for each in published_rows.adapter_errors():
        if each.case.quantity == "peak_allocated_bytes":
            errors[each.case.box.num_gpus == 1].append(abs(each.error))
    return (
        f"a median error of about {whole_percent(statistics.median(errors[True]))}, and those of FSDP1 with an error "
        f"of up to {whole_percent(max(errors[False]))}"
    )


def adapter_reserved() -> str:
    """Say how far reserved memory with adapters is from published values to which no constant was fitted."""
    errors = [each.error for each in published_rows.adapter_errors()
              if (each.case.quantity, each.case.allocator) == ("peak_reserved_bytes", "varying lengths")]  # fmt: skip
    others = [abs(error) for error in errors[1::2]]  # `RESERVED_IF_LENGTHS_VARY` is fitted to every second value
    return f"a median error of about {whole_percent(statistics.median(others))}"


def adapter_times() -> str:
    """Say how far predicted times of trainings with adapters are from published ones."""
    quantities = "seconds_per_step", "tokens_per_second_per_gpu"
    errors = [abs(each.error) for each in published_rows.adapter_errors() if each.case.quantity in quantities]
    return f"For {len(errors)} published times, the median error is about {whole_percent(statistics.median(errors))}"


def against_llama_factory() -> str:
    """Compare the predicted peaks with LLaMA-Factory's table."""
    (source,) = (each for each in ledger.read() if each.source == "llama-factory")
    by_claim = verdicts.read()
    claims = [claim for claim in source.claims if by_claim[claim.id].by == "theory"]
    errors = [by_claim[claim.id].observed.value / claim.expected.value - 1 for claim in claims]
    return (
        f"the {len(errors)} predicted peaks of full training, LoRA and QLoRA lie between {whole_percent(-min(errors))} "
        f"below and {whole_percent(max(errors))} above"
    )


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/planner-accuracy.md", "adapters"): adapters_table,
    ("reports/planner-accuracy.md", "fitting_adapters"): adapters_that_fit,
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/planner-options.md", "adapters_trained"): adapters_that_trained,
    ("docs/planner-options.md", "adapter_peaks"): adapter_peaks,
    ("reports/planner-accuracy.md", "adapter_reserved"): adapter_reserved,
    ("reports/planner-accuracy.md", "adapter_times"): adapter_times,
    ("reports/memory-and-time.md", "llama_factory"): against_llama_factory,
}
