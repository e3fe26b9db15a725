"""Trace the peak memory of strategies, and compare it with the predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zero_study import terminal
from zero_study.dryrun.traced import Part, Traced
from zero_study.errors import Refusal, RunFailed
from zero_study.planner.advice_text import MARKS
from zero_study.planner.choose import ENOUGH_FREE, StrategyPrediction, best_option, option_of, splits
from zero_study.planner.request import Request
from zero_study.terminal import gib
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.peaks import PEAK_MOMENTS, Peak, PeakPart
from zero_study.theory.shapes import ModelShape

# Groups of memory parts, with their names in a trace and in a prediction. A trace counts logits as activations.
GROUPS: dict[str, tuple[tuple[Part, ...], tuple[PeakPart, ...]]] = {
    "parameters": (("parameters", "buffers"), ("parameters", "gathered_parameters")),
    "gradients and their buckets": (("gradients", "communication_buffers"),) * 2,
    "optimizer states": (("optimizer_states",),) * 2,
    "activations, temporaries": (("activations", "temporary_buffers"), ("activations", "logits", "temporary_buffers")),
}
# A function such as zero_study.dryrun.trace.trace, which needs torch.
Tracer = Callable[[ModelShape, Engine, StepConfig], Traced]
SHOWN = 0.01  # share of the traced peak below which differences are not listed
HEAD = """\
Traced, not measured: one step of the model of transformers with fake tensors, on one rank.
Predicted: the same model without a trace (--kernels transformers). All sizes are tensors of one GPU, in GiB.
"""


def trace_options(
    tracer: Tracer, shape: ModelShape, request: Request, options: Sequence[StrategyPrediction]
) -> list[StrategyPrediction]:
    """Return the options, with the traced peak memory of those that can be traced.

    Prints one line per trace, and the reason why an option could not be traced.
    """
    print(terminal.wrap(HEAD))
    by_name = {option.strategy.name: option for option in options}
    not_traced: dict[str, list[str]] = {}
    # DeepSpeed comes first: its ranks are forked processes, and a process in which a backward pass has started threads
    # must not be forked.
    for option in sorted(options, key=lambda option: option.prediction.engine.kind != "deepspeed"):
        name = option.strategy.name
        try:
            by_name[name] = _trace(tracer, shape, request, option)
        except (Refusal, RunFailed) as stopped:  # an engine that fails for one strategy may work for the others
            not_traced.setdefault(str(stopped), []).append(name)
    for reason, names in not_traced.items():
        print(terminal.wrap(f"Not traced, only predicted: {', '.join(names)}. Reason: {reason}"))
    print()
    return list(by_name.values())


def _trace(tracer: Tracer, shape: ModelShape, request: Request, option: StrategyPrediction) -> StrategyPrediction:
    """Trace an option, and other splits of the batch if the traced memory leaves too little free.

    A slower split is traced next if it should leave enough free (`ENOUGH_FREE`), or fit if the last one did not.
    Its predicted peak, multiplied by the ratio of the last trace to its prediction, decides that.
    """
    chosen = option.prediction
    slower, tried = list(splits(shape, request, chosen.engine, chosen.box)), list[StrategyPrediction]()
    while True:
        traced = tracer(shape, chosen.engine, chosen.job)
        option = option_of(shape, option.strategy, chosen, traced)
        print(terminal.wrap(_line(option, traced), later_indent="  "), flush=True)
        tried.append(option)
        slower = [split for split in slower if option.seconds < split.step.total]
        ratio = traced.total / chosen.peak.total
        room = {id(split): 1 - float(split.needed_bytes * ratio / split.usable_bytes) for split in slower}
        next_ones = [split for split in slower if room[id(split)] >= ENOUGH_FREE]
        if option.fits:
            next_ones = [split for split in next_ones if split.step.total <= option.slowest_seconds]
        else:
            next_ones = next_ones or [split for split in slower if room[id(split)] >= 0]
        if option.has_enough_free or not next_ones:
            return best_option(tried)
        chosen = min(next_ones, key=lambda split: split.step.total)


def _line(option: StrategyPrediction, traced: Traced) -> str:
    job, predicted = option.prediction.job, option.prediction.peak
    total = float(predicted.total)
    reserved = "" if traced.reserved_bytes is None else f"reserved {gib(traced.reserved_bytes)}; "
    differences = "parts unknown"
    if traced.parts:
        differences = _differences(traced, predicted, option.prediction.engine)
    collectives = ", ".join(f"{each['count']} {each['kind']} ({gib(each['bytes'])})" for each in traced.collectives)
    sent = f"sends {collectives}; " if collectives else ""
    return (
        f"{option.strategy.name}, {job.micro_batch_size} x {job.gradient_accumulation_steps}"
        f"{MARKS[job.activation_checkpointing]}: traced {gib(traced.total)}, predicted {gib(total)}, "
        f"residual {(traced.total - total) / 2**30:+.2f} ({100 * (traced.total / total - 1):+.1f} %): {reserved}"
        f"{differences}; {sent}"
        f"{'fits' if option.fits else 'does not fit'} according to the trace; {traced.seconds:.0f} s"
    )


def _differences(traced: Traced, predicted: Peak, engine: Engine) -> str:
    """Return the kinds of memory in which trace and prediction differ, the largest difference first.

    Groups that differ by less than `SHOWN` of the traced peak are left out.
    """
    expected_parts = dict(predicted.parts)
    if engine.kind == "fsdp" and PEAK_MOMENTS[int(predicted.moment)] == "end of backward":
        # At this moment, the flat buffer of a unit's gradients counts as temporary in the prediction. At all other
        # moments it counts as a gradient buffer.
        expected_parts["gradients"] += expected_parts["temporary_buffers"]
        expected_parts["temporary_buffers"] = 0.0
    differences: list[tuple[float, str]] = []
    for group, (traced_names, predicted_names) in GROUPS.items():
        actual = sum(traced.parts[part] for part in traced_names)
        expected = float(sum(expected_parts[part] for part in predicted_names))
        if (size := abs(actual - expected)) >= SHOWN * traced.total:
            both = f"(traced {gib(actual)}, predicted {gib(expected)})"
            differences.append((size, f"{group} {(actual - expected) / 2**30:+.2f} {both}"))
    differences.sort(reverse=True)
    return (
        ", ".join(words for _, words in differences) or f"no part differs by more than {100 * SHOWN:.0f} % of the peak"
    )
