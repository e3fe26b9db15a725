"""Say in words why a strategy is recommended, what the risk is, and why other strategies are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from study.errors import Refusal
from study.planner import choose
from study.planner.choose import ENOUGH_FREE, EQUALLY_FAST, gib
from study.terminal import GIB, significant

if TYPE_CHECKING:
    from study.planner.choose import Advice, StrategyPrediction
    from study.planner.request import Request

# The strategies that people expect an answer about, besides CPU offload.
EXPECTED = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp2")
ENOUGH = f"at least {100 * ENOUGH_FREE:.0f} %"


def answer(advice: Advice) -> str:
    """Return the recommendation in two sentences: what to use, then the reason and the risk.

    If no strategy fits, the sentences say what is missing and what would help.
    """
    option = advice.recommended
    if option is None:
        nearest = advice.ranked[0]
        return f"No strategy fits. {nearest.strategy.name} comes nearest: it {lacks(nearest)}. {_remedy(advice)}"
    memory = f"{gib(option.free_bytes)} GiB ({_percent(option.free_share)}) of each GPU"
    if (better := _smaller_batch(advice, option)) is not None and not option.offloads:
        time = _compared(better.option.seconds / option.seconds, "take")
        return (
            f"{option.strategy.name} fits with {_settings(option)}, but leaves only {memory} free, so it may run out "
            f"of memory. Use {better.words} instead: it is predicted to leave {_percent(better.option.free_share)} "
            f"free and to {time}."
        )
    return (
        f"Use {option.strategy.name} with {_settings(option)}: a step is predicted to take "
        f"{significant(option.prediction.step.total)} s, and by the {option.basis} memory {memory} stay free. "
        f"{reason(advice)}"
    )


def _settings(option: StrategyPrediction) -> str:
    job = option.prediction.job
    steps = job.gradient_accumulation_steps
    kind = "activation checkpointing" if job.activation_checkpointing is True else "selective activation checkpointing"
    return _listed(
        [
            f"a micro batch of {job.micro_batch_size}",
            *([f"{steps} accumulation steps"] if steps > 1 else []),
            *([kind] if job.activation_checkpointing else []),
        ]
    )


def reason(advice: Advice) -> str:
    """Return one sentence: why the recommended strategy is recommended, and what can go wrong."""
    option = advice.recommended
    if option is None:
        return f"No strategy fits. {_remedy(advice)}"
    return f"{_why(advice, option)}; {_risk(advice, option)}."


def _why(advice: Advice, option: StrategyPrediction) -> str:
    if len(advice.options) == 1:
        return "No other strategy was requested"
    if option.prediction.engine.kind == "torch":
        return "On one GPU there is nothing to shard, so no engine is needed"
    candidates = choose.preferred(advice.options)
    fastest = min(candidates, key=lambda candidate: candidate.seconds)
    which = f"leave {ENOUGH} free" if option.has_enough_free else "fit"
    if not option.offloads and any(other.offloads and other.fits for other in advice.options):
        which += " without offload"
    needs_offload = option.offloads and not any(other.fits and not other.offloads for other in advice.options)
    begin = "No strategy fits without offload, and this one is" if needs_offload else "It is"
    if len(candidates) == 1:
        only = which.replace("leave", "leaves").replace("fit", "fits", 1)
        return f"{begin} the only strategy that {only}"
    if fastest is option:
        return f"{begin} the fastest of those that {which}"
    return (
        f"{begin} the simplest strategy within {100 * EQUALLY_FAST:.0f} % of the fastest ({fastest.strategy.name}, "
        f"{100 * (1 - fastest.seconds / option.seconds):.1f} % faster), among those that {which}"
    )


def _risk(advice: Advice, option: StrategyPrediction) -> str:
    parts = []
    if not option.has_enough_free:
        slower = [other for other in advice.options if other.has_enough_free]
        why = f"all that leave {ENOUGH} are far slower" if slower else "nothing here leaves more"
        parts.append(f"it may run out of memory, but {why}")
    elif option.offloads and (better := _without_offload(advice, option)) is not None:
        parts.append(better)
    if option.prediction.step.evidence.is_rough:
        parts.append("the time is a rough guess, because no mixture of experts was compared with a measurement")
    elif option.is_short:
        parts.append(
            "so short a step can take several times as long, because launching kernels may take longer than computing"
        )
    else:
        step = option.prediction.step
        parts.append(f"the real time may be anywhere from {significant(step.low, 2)} to {significant(step.high, 2)} s")
    return ", and ".join(parts)


# ---------------------------------------------------------------- what would help


def _remedy(advice: Advice) -> str:
    """Return what to do if no strategy fits: a smaller batch if that helps, otherwise more GPUs."""
    if (better := _smaller_batch(advice, None)) is not None:
        free = _percent(better.option.free_share)
        return f"Use {better.option.strategy.name} with {better.words}: it is predicted to leave {free} free."
    if (more := _more_gpus(advice)) is not None:
        return f"Use at least {more.prediction.box.num_gpus} GPUs: {more.strategy.name} fits there."
    return "Use more GPUs, or GPUs with more memory."


def _without_offload(advice: Advice, option: StrategyPrediction) -> str | None:
    """Return with which smaller batch, or on how many GPUs, a strategy fits without offload.

    None if a strategy without offload fits as it is, or if nothing is found.
    """
    if any(other.fits and not other.offloads for other in advice.options):
        return None
    if (better := _smaller_batch(advice, option)) is not None:
        return f"{better.option.strategy.name} would fit without offload with {better.words}"
    if (more := _more_gpus(advice)) is not None:
        return f"{more.strategy.name} would fit without offload on {more.prediction.box.num_gpus} GPUs"
    return None


class _Smaller(NamedTuple):
    """A smaller batch that leaves enough memory free without offload."""

    option: StrategyPrediction
    words: str  # the settings, such as "a micro batch of 4"


def _smaller_batch(advice: Advice, now: StrategyPrediction | None) -> _Smaller | None:
    """Return a smaller micro batch, or a smaller global batch, that leaves enough memory free without offload.

    It is of the same strategy if that has one and does not offload. None if there is none, or if an option already
    leaves enough memory free without offload.
    """
    if now is not None and now.has_enough_free and not now.offloads:
        return None
    for request in _relaxed(advice):
        found = [option for option in choose.options_of(advice.shape, advice.box, request)[0] if option.has_enough_free]
        found = [option for option in found if not option.offloads]
        same = [option for option in found if now is not None and option.strategy.name == now.strategy.name]
        if (best := choose.recommend(same or found)) is None:
            continue
        if request.batch()[0] == advice.request.batch()[0]:
            same_name = now is None or now.offloads or best.strategy.name == now.strategy.name
            name = "" if same_name else f"{best.strategy.name} with "
            return _Smaller(best, f"{name}{_settings(best)}")
        if now is None or now.offloads:
            return _Smaller(best, f"a global batch of {advice.box.num_gpus} and {_settings(best)}")
    return None


def _relaxed(advice: Advice) -> Iterator[Request]:
    """Yield requests with more freedom than the user's: first any split of the batch, then one sequence per GPU."""
    request = advice.request
    sequences, micro, _ = request.batch()
    free = request.replace(
        global_batch_size=sequences * request.num_gpus,
        micro_batch_size=None,
        gradient_accumulation_steps=None,
    )
    if micro is not None:
        yield free
    if request.activation_checkpointing == "none":
        yield free.replace(activation_checkpointing=None)
    if sequences > 1:
        yield free.replace(global_batch_size=request.num_gpus, activation_checkpointing=None)


def _more_gpus(advice: Advice) -> StrategyPrediction | None:
    """Return a strategy that fits without offload on the smallest larger number of GPUs. None if none is found."""
    request = advice.request.replace(global_batch_size=None, micro_batch_size=None, gradient_accumulation_steps=None)
    for count in choose.GPU_COUNTS:
        if count <= advice.box.num_gpus or not request.could_run(count):
            continue
        if not choose.could_leave_enough_free(advice.shape, request, count):
            continue
        try:
            found = choose.options_of(advice.shape, request.box(count), request.replace(num_gpus=count))[0]
        except Refusal:
            continue
        if best := choose.recommend([option for option in found if option.has_enough_free and not option.offloads]):
            return best
    return None


# ---------------------------------------------------------------- other strategies


def why_not(advice: Advice) -> dict[str, str]:
    """Return one phrase by strategy that people expect: why it is not recommended."""
    chosen = advice.recommended
    by_name = {option.strategy.name: option for option in advice.options}
    offloading = [option for option in advice.options if option.offloads and option is not chosen]
    offload = min(offloading, key=lambda o: (not o.fits, o.seconds if o.fits else o.missing_bytes), default=None)
    names = [name for name in EXPECTED if name in by_name or name in advice.left_out]
    if offload is not None:
        names.append(offload.strategy.name)
    phrases = {
        name: advice.left_out[name] if name in advice.left_out else _why_not(advice, by_name[name])
        for name in names
        if chosen is None or name != chosen.strategy.name
    }
    return phrases


def _why_not(advice: Advice, option: StrategyPrediction) -> str:
    chosen = advice.recommended
    if not option.fits:
        return lacks(option)
    if chosen is None:
        return ""
    free = f"leaves only {_percent(option.free_share)} free"
    time = _compared(option.seconds / chosen.seconds)
    if not option.has_enough_free and chosen.has_enough_free:
        return f"{free}, and {time}" if option.seconds > (1 + EQUALLY_FAST) * chosen.seconds else f"{free}: too little"
    if chosen.prediction.engine.kind == "torch" and not option.offloads:
        return f"nothing to shard on one GPU; {time}"
    if option in choose.equally_fast(choose.preferred(advice.options)):
        return f"as fast, but {_less_simple(option, chosen)}"
    if option.offloads and not chosen.offloads and option.seconds <= chosen.seconds:
        return f"{time}, less than the error of the prediction, but it needs host memory"
    within = option.seconds <= chosen.slowest_seconds and not chosen.is_rough and option.seconds > chosen.seconds
    return f"{time}{', less than the error of the prediction' if within else ''}"


def _less_simple(option: StrategyPrediction, chosen: StrategyPrediction) -> str:
    """Return in which respect an option is less simple than the recommended one, as `choose.complexity` orders them."""
    (offload, stage, has_file, _), (offload_of_chosen, stage_of_chosen, file_of_chosen, _) = map(
        choose.complexity, (option, chosen)
    )
    if offload != offload_of_chosen:
        return "it offloads more" if chosen.offloads else "it needs host memory"
    if stage != stage_of_chosen:
        return "it shards more than is needed"
    if has_file != file_of_chosen:
        return "it has buffer sizes to set"
    return f"no simpler than {chosen.strategy.name}: either is fine"


def lacks(option: StrategyPrediction) -> str:
    """Return which memory an option lacks, and how much of it."""
    prediction = option.prediction
    if option.free_bytes < 0:
        return f"lacks {gib(-option.free_bytes)} GiB per GPU"
    needed, there = (
        (prediction.disk_bytes_per_node, prediction.box.disk_bytes)
        if prediction.lacking == "disk"
        else (prediction.host_bytes_per_node, prediction.box.host_memory_bytes)
    )
    return f"lacks {(float(needed) - float(there or 0)) / GIB:,.0f} GiB of {prediction.lacking} per node"


def _compared(ratio: float, verb: str = "takes") -> str:
    """Return how long a step takes in comparison, from the ratio of the times."""
    if ratio >= 1.95:
        return f"{verb} {ratio:.1f} times as long"
    if abs(ratio - 1) < 0.005:
        return f"{verb} as long"
    return f"{verb} {100 * abs(ratio - 1):.0f} % {'longer' if ratio > 1 else 'less time'}"


def _percent(share: float) -> str:
    """Return a share in percent, rounded down, so that "10 %" is never less."""
    return f"{int(100 * share)} %"


def _listed(words: list[str]) -> str:
    return " and ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])} and {words[-1]}"
