"""Say in words why a strategy is recommended, what the risk is, and why other strategies are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_study.planner import choose, remedies
from zero_study.planner.choose import (
    COMFORTABLY_FREE,
    ENOUGH_FREE,
    EQUALLY_FAST,
    EQUALLY_FAST_IF_ROOMIER,
    FAR_SLOWER,
    VERY_LITTLE_FREE,
    gib,
)
from zero_study.planner.units import unit_of
from zero_study.terminal import GIB, listed, significant
from zero_study.theory import hardware
from zero_study.theory.intervals import GUESSES

if TYPE_CHECKING:
    from zero_study.planner.choose import Advice, Remedy, RemedyKind, StrategyPrediction

# The strategies that people expect an answer about, besides CPU offload.
EXPECTED = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp2")
ENOUGH = f"at least {100 * ENOUGH_FREE:.0f} %"


def answer(advice: Advice) -> str:
    """Return the recommendation in a few sentences: which strategy to use, why, and what the risk is.

    If a change of the request is better, it comes first. If no strategy fits, the sentences say what takes the memory.
    If no change helps either, they begin with the largest known model that fits.
    """
    option, better, nearest = advice.recommended, advice.change, advice.ranked[0]
    missing = f"No strategy fits. {nearest.strategy.name} comes nearest: it {lacks(nearest)}.{_cause(nearest)}"
    if better is not None:
        if better.kind == "adapters":
            nearest = next((other for other in advice.ranked if not other.offloads), nearest)
            missing = (
                f"Full training {'hardly fits' if nearest.fits else 'does not fit'} on {_machine(advice)}"
                f"{' without offload' if option else ''}: it {lacks(nearest)}."
            )
        elif option is not None:
            missing = ""
        parts = [missing, f"{_instruction(better, option)}.", _what_changes(better)]
        if option is not None:
            time = _compared(better.option.total_tokens_per_second / option.total_tokens_per_second)
            host = f" ({_host(advice, option)})" if _depends_on_host(advice, option) else ""
            parts.append(
                f"Without the change, {option.strategy.name} with {_settings(option)} "
                f"{'offloads to the host, ' * option.offloads}leaves {percent(option.free_share)} of each GPU free and "
                f"{time}{host}."
            )
        return " ".join(filter(None, parts))
    if option is None:
        parts = [missing, "No change that this command can predict makes it fit. Use GPUs with more memory."]
        if remedies.is_caused_by_tokens(advice):
            parts.append("Shorter sequences need less memory, too.")
        elif (largest := advice.largest_known) is not None:
            size = f"{significant(largest.num_params / 1e9)} billion parameters"
            parts.insert(0, f"The largest known model that fits {_machine(advice)} is {largest.name} ({size}).")
        return " ".join(parts)
    memory = f"{gib(option.free_bytes)} GiB ({percent(option.free_share)}) of each GPU"
    stays = "stay free" if option.traced_bytes is None else "stay free according to the trace"
    takes = "took" if option.is_measured else "is predicted to take"
    return (
        f"Use {'one process (single)' if option.strategy.name == 'single' else option.strategy.name} with "
        f"{_settings(option)}: a step {takes} "
        f"{significant(option.prediction.step.total)} s, and {memory} {stays}. "
        f"{reason(advice)}"
    )


def better_change(advice: Advice) -> Remedy | None:
    """Return a change of the training that is better than the recommendation without changes. None if no change is.

    Any change is better if nothing fits, or if so little memory stays free that the training may not fit. If a change
    fits only with offload, it is compared with the other changes as a training that offloads without a change is. A
    change is better than one that fits if it computes the same training, or the same with an 8-bit optimizer if the
    alternative is offload. Adapters and pure bf16 are better than an offload that leaves too little of the host's
    memory free, or that needs a host of which nothing is known. A change may be slower only if little memory stays free
    without it.
    """
    changes = advice.remedies
    offload = next((each for each in changes if each.option.offloads), None)
    option = offload.option if offload else advice.recommended
    if option is None:
        return changes[0] if changes else None
    kinds: set[RemedyKind] = {"same"}
    if option.offloads:
        kinds |= {"optimizer"}
    if option.offloads and _depends_on_host(advice, option):
        kinds |= {"precision", "adapters"}
    has_hardly_any = option.scarcest_share < VERY_LITTLE_FREE
    slows_down_little = not has_hardly_any and (option.free_share >= ENOUGH_FREE or option.offloads)
    slowest = option.tokens_per_second * (1 - EQUALLY_FAST_IF_ROOMIER if slows_down_little else 1 / FAR_SLOWER)
    return next(
        (
            each
            for each in changes
            if each.option.tokens_per_second >= slowest
            and not each.option.offloads
            and (each.kind in kinds or (has_hardly_any and each.option.free_share >= COMFORTABLY_FREE))
        ),
        offload,
    )


def _is_host_assumed(advice: Advice) -> bool:
    """Return whether the size of host memory is only assumed: not given, and not known of a typical machine."""
    return hardware.has_assumed_host(advice.box) and "host_memory_bytes" not in advice.box.requested


# What a change of another kind of training costs, besides time.
_LOST_UPDATES = (
    "Pure bf16 keeps no fp32 copy of the weights: a weight has 8 significant bits, so rounding removes every update "
    "below 1/512 of the weight, and the loss may stop falling (arXiv:2010.06192). Compare the loss with "
    "that of a short run with fp32 copies, or use an optimizer with stochastic rounding (torchao.optim.AdamW8bit(..., "
    "bf16_stochastic_round=True)) or with Kahan summation"
)


def _what_changes(change: Remedy) -> str:
    """Return a sentence that says how another training differs. Empty if the change computes the same."""
    return {
        "precision": f"{_LOST_UPDATES}.",
        "optimizer": "The change stores the optimizer states in 8 bits.",
        "adapters": "Only adapters are trained.",
    }.get(change.kind, "")


def _machine(advice: Advice) -> str:
    count = advice.box.num_gpus
    return f"{'one' if count == 1 else f'{count} x'} {advice.box.gpu.name}"


def price_of_changes(advice: Advice) -> list[str]:
    """Describe the loss of accuracy that the suggested changes may cause, unless the answer mentions it already."""
    kinds = {each.kind for each in advice.remedies if each is not advice.change}
    is_said = advice.change is not None and advice.change.kind == "precision"
    return [f"{_LOST_UPDATES}."] if "precision" in kinds and not is_said else []


# Changes of a request in words. "{}" is the new value.
_IN_WORDS = {
    "loss_kernel": "a chunked loss",
    "activation_checkpointing": "activation checkpointing",
    "sync_each_batch": "a reduction of gradients in every micro step",
    "optimizer": "8-bit AdamW",
    "lora_rank": "LoRA",
    "load_in_4bit": "frozen weights in four bits (QLoRA)",
    "precision": "pure bf16",
    "num_gpus": "{} GPUs",
    "context_parallel": "{} GPUs per sequence",
    "sequence_parallel": "{} GPUs per sequence",
    "micro_batch_size": "a micro batch of {}",
    "gradient_accumulation_steps": "{} accumulation steps",
    "global_batch_size": "a global batch of {:,}",
}


def _instruction(change: Remedy, now: StrategyPrediction | None) -> str:
    """Return a sentence that says what to change, and what is predicted then. `now` is recommended without it."""
    option = change.option
    words = listed([_IN_WORDS[name].format(value) for name, value in change.changes.items() if name in _IN_WORDS])
    fits = f"fits {'with' if option.offloads else 'without'} offload, "
    share = f"{percent(option.free_share)} of each GPU) free"
    if not option.has_enough_free:
        share += " (so it may run out of memory)"
    return (
        f"Use {words} ({change.flags}): {option.strategy.name} with {_settings(option)} then "
        f"{fits if now is None or now.offloads else ''}leaves {gib(option.free_bytes)} GiB ({share}, and a step is "
        f"predicted to take {significant(option.prediction.step.total)} s{' (a rough guess)' * option.is_rough}"
    )


def _cause(option: StrategyPrediction) -> str:
    """Return a sentence that says what takes most of the memory of an option that does not fit."""
    name, num_bytes = remedies.cause(option)
    if name == "host memory":
        return ""
    return f" It needs {gib(option.needed_bytes)} GiB, of which {gib(num_bytes)} GiB are {name}."


def _settings(option: StrategyPrediction) -> str:
    job = option.prediction.job
    steps = job.gradient_accumulation_steps
    kind = "activation checkpointing" if job.checkpoints_all else "selective activation checkpointing"
    return listed(
        [
            f"a micro batch of {job.micro_batch_size}",
            *([f"{steps} accumulation steps"] if steps > 1 else []),
            *([kind] if job.activation_checkpointing else []),
        ]
    )


def reason(advice: Advice) -> str:
    """Return sentences on why the recommended strategy is recommended, and what can go wrong."""
    option = advice.recommended
    if option is None:
        return answer(advice)
    return " ".join([f"{_why(advice, option)}.", *(f"{risk[0].upper()}{risk[1:]}." for risk in _risks(advice, option))])


def _why(advice: Advice, option: StrategyPrediction) -> str:
    if len(advice.options) == 1:
        return "No other strategy was requested"
    if option.prediction.engine.kind == "torch":
        return "On one GPU there is nothing to shard, so no engine is needed"
    candidates = choose.preferred(advice.options)
    fastest = fastest_of_preferred(advice) or option
    which = f"leaves {ENOUGH} of the memory free" if option.has_enough_free else "fits"
    strategy = "strategy"
    if not option.offloads and any(other.offloads and other.fits for other in advice.options):
        strategy = "strategy without offload"
    needs_offload = option.offloads and not any(other.fits and not other.offloads for other in advice.options)
    begin = f"No strategy fits without offload. {option.strategy.name} is" if needs_offload else "It is"
    if len(candidates) == 1:
        return f"{begin} the only {strategy} that {which}"
    if fastest is option:
        return f"{begin} the fastest {strategy} that {which}"
    time, seconds = _compared(fastest.seconds / option.seconds), choose.seconds_in_precision_of(fastest, option)
    if seconds != option.seconds:
        time += f" (if both train in the same precision, it {_compared(fastest.seconds / seconds)})"
    return (
        f"{begin} the simplest {strategy} that is fast enough and {which}. {fastest.strategy.name} {time}, "
        f"{_less_simple(fastest, option)}"
    )


def fastest_of_preferred(advice: Advice) -> StrategyPrediction | None:
    """Return the fastest `choose.preferred` option, with which the recommended one is compared, or None."""
    option = advice.recommended
    if option is None or option.prediction.engine.kind == "torch":
        return None
    return min(choose.preferred(advice.options), key=lambda candidate: candidate.seconds, default=None)


def _risks(advice: Advice, option: StrategyPrediction) -> list[str]:
    """Return clauses that say what can go wrong, and how exact the time is."""
    parts = []
    if not option.has_enough_free:
        slower = [other for other in advice.options if other.has_enough_free]
        why = ", but no strategy leaves more free"
        if slower:
            why = f", but all strategies that leave {ENOUGH} free are far slower"
        what = "host memory" if option.free_share >= ENOUGH_FREE else "memory"
        parts.append(f"it may run out of {what}{'' if option.is_measured else why}")
    if _depends_on_host(advice, option):
        parts.append(_host(advice, option))
    if option.is_measured:
        parts.append("you measured this time")
    elif guessed := option.prediction.step.evidence.guessed:
        parts.append(f"the time is a rough guess, {GUESSES[guessed]}")
    else:
        step = option.prediction.step
        parts.append(f"the real time may be between {significant(step.low, 2)} and {significant(step.high, 2)} s")
    return parts


def _depends_on_host(advice: Advice, option: StrategyPrediction) -> bool:
    """Return whether an option needs host memory of which little stays free, or of which the size is only assumed."""
    return bool(option.host_needed_bytes) and (_is_host_assumed(advice) or option.host_free_share < ENOUGH_FREE)


def _host(advice: Advice, option: StrategyPrediction) -> str:
    """Return how much host memory an option needs, and how much of it there is."""
    memory, needed = advice.box.host_memory_bytes, f"{option.host_needed_bytes / GIB:,.0f}"
    why = " to load the weights" if option.loads_on_host else ""
    if memory is None:
        return f"it needs {needed} GiB of host memory on each node{why}"
    if _is_host_assumed(advice):
        return f"it needs {needed} GiB of host memory{why}, and we assume that there are {memory / GIB:,.0f} GiB"
    return f"it needs {needed} of the {memory / GIB:,.0f} GiB of host memory{why}"


# ---------------------------------------------------------------- what would help


def changes(advice: Advice) -> list[tuple[str, str]]:
    """Return the suggested changes as pairs: the options of `advise`, and the prediction with them.

    The recommended change is not among them, because the answer begins with it. The speeds are compared with that of
    the recommended training.
    """
    now = advice.to_start.recommended
    lines = []
    for change in advice.remedies:
        if change is advice.change:
            continue
        option = change.option
        speed = option.total_tokens_per_second
        compared = "" if now is None else f", {_compared(speed / now.total_tokens_per_second, is_speed=True)}"
        is_shared = option.prediction.job.sequence_ranks > advice.request.sequence_ranks
        note = _OTHER_TRAINING["sequence" if is_shared else change.kind]
        lines.append((change.flags, (
            f"{option.strategy.name}: {gib(option.needed_bytes)} GiB per GPU, {percent(option.free_share)} free, "
            f"{speed:,.0f} {unit_of(advice.shape).plural} per second{compared}{note}"
        )))  # fmt: skip
    return lines


_OTHER_TRAINING: dict[RemedyKind, str] = {
    "same": "",
    "sequence": " (GPUs share each sequence, and the time is a rough guess)",
    "optimizer": " (optimizer states in 8 bits)",
    "precision": " (no fp32 copy of the weights)",
    "adapters": " (trains adapters only)",
    "batch": " (a different global batch)",
    "offload": " (offloads to the host)",
    "gpus": "",
}


# ---------------------------------------------------------------- other strategies


def why_not(advice: Advice) -> dict[str, str]:
    """Return, for each strategy that people expect, a phrase that says why it is not recommended."""
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
        changed = chosen and remedies.synchronized(advice, option)
        if chosen is None or changed is None:
            return lacks(option)
        return (
            f"{lacks(option)}, because it keeps unsharded gradients until the last micro step. With --sync-each-batch, "
            f"it {_compared(changed.seconds / chosen.seconds)} and leaves {percent(changed.free_share)} free"
        )
    if chosen is None:
        return ""
    time, is_slower = _compared(option.seconds / chosen.seconds), option.seconds > (1 + EQUALLY_FAST) * chosen.seconds
    if not option.has_enough_free and chosen.has_enough_free:
        return f"{lacks(option)}, {f'and {time}' if is_slower else 'which is too little'}"
    if chosen.prediction.engine.kind == "torch" and not option.offloads:
        return f"{time}, although on one GPU there is nothing to shard"
    if is_slower and choose.complexity(option) < choose.complexity(chosen) and option.has_enough_free:
        return f"is simpler, but {time}"
    return time if is_slower else f"{time}, {_less_simple(option, chosen)}"


def _less_simple(option: StrategyPrediction, chosen: StrategyPrediction) -> str:
    """Return in which respect an option is less simple than the recommended one, as `choose.complexity` orders them."""
    (offload, stage, has_file, _), (offload_of_chosen, stage_of_chosen, file_of_chosen, _) = map(
        choose.complexity, (option, chosen)
    )
    if offload != offload_of_chosen:
        return "but it offloads more" if chosen.offloads else "but it needs host memory"
    if stage > stage_of_chosen:
        return "but it shards more than necessary"
    if stage < stage_of_chosen:
        return "but it leaves less memory free"
    if has_file != file_of_chosen:
        return "but it has buffer sizes that you must choose"
    return "and is as simple, so you can use either"


def lacks(option: StrategyPrediction) -> str:
    """Return which memory an option lacks, and how much of it. If it fits, return how little stays free."""
    prediction = option.prediction
    if option.fits:
        what = "" if option.free_share <= option.host_free_share else "of the host's memory "
        return f"leaves only {percent(option.scarcest_share)} {what}free"
    missing = [f"{gib(-option.free_bytes)} GiB per GPU"] if option.free_bytes < 0 else []
    if option.lacking is None:
        return f"lacks {listed(missing)}"
    needed, there = (
        (prediction.disk_bytes_per_node, prediction.box.disk_bytes)
        if option.lacking == "disk"
        else (option.host_needed_bytes, prediction.box.host_memory_bytes)
    )
    missing.append(f"{(float(needed) - float(there or 0)) / GIB:,.0f} GiB of {option.lacking} per node")
    return f"lacks {listed(missing)}"


def _compared(ratio: float, is_speed: bool = False) -> str:
    """Return in words how long a step takes in comparison, or how fast it is, from the ratio of the two."""
    if abs(ratio - 1) <= EQUALLY_FAST:
        return "as fast" if is_speed else "is as fast"
    if is_speed:
        if ratio >= 1.95:
            return f"{ratio:.1f} times as fast"
        return f"{100 * abs(ratio - 1):.0f} % {'faster' if ratio > 1 else 'slower'}"
    if ratio >= 1.95:
        return f"takes {ratio:.1f} times as long"
    return f"takes {100 * abs(ratio - 1):.0f} % {'longer' if ratio > 1 else 'less time'}"


def percent(share: float) -> str:
    """Return a share in percent, rounded down, so that a printed "10 %" stands for at least 10 %."""
    return f"{int(100 * share)} %"
