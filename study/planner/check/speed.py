"""Can a row's speed be? Against the card's peak, against the row's own batch and steps, and against the planner."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from study.planner.check import settings
from study.planner.check.known import Reported, billions
from study.planner.check.suspicion import Certainty, Outcome
from study.planner.check.table import Result
from study.theory import flops, step_time
from study.theory.hardware import GPUS, Gpu

# Rates, batches and times of one run, read off at different places: further apart than that they disagree.
DISAGREE, CERTAINLY = 1.15, 1.5
MFU_CONVENTIONS = 1.1  # beyond counts of embeddings and attention that are tried
# Of a model of which only the number of parameters is known: the share that may be embeddings, which nothing is
# multiplied with. 0.63 of gemma-3-270m and 0.36 of distilbert are, 0.13 of llama-3-8b's two.
EMBEDDED = ((1e9, 0.2), (0.0, 0.65))  # from so many parameters on
# The planner's interval is of engines that it knows; networks, data and versions are seldom said. So a speed must be
# as far outside again to be told, and what is slow has more reasons than what is fast.
FAR = {"fast": 1.25, "slow": 3.0}


@dataclass(frozen=True)
class Rate:
    """Tokens a second and GPU, with how they come about."""

    tokens: float
    least: float  # that is printed so
    arithmetic: str
    counts_tokens: bool  # not sequences, which may be shorter than the longest


def tokens_per_step(case: Reported) -> tuple[float, str] | None:
    """Tokens of one optimizer step, all GPUs; None where the row does not say."""
    batch, length = case.row.whole("global_batch"), case.row.whole("seq_len")
    micro, accumulation = case.row.whole("micro_batch"), case.row.whole("gradient_accumulation_steps")
    if length and batch:
        return batch * length, f"{batch:,} x {length:,} tokens"
    if length and micro and accumulation and case.num_gpus and not case.is_split_otherwise:
        parts = (micro, accumulation, case.num_gpus, length)
        return micro * accumulation * case.num_gpus * length, " x ".join(f"{part:,}" for part in parts) + " tokens"
    return None


def rate_of(case: Reported) -> Rate | None:
    """How fast a GPU is by this row; None where it does not say."""
    result, length = case.row.result, case.row.whole("seq_len")
    if result is None or (not result.per_gpu and not case.num_gpus):
        return None
    gpus = 1 if result.per_gpu else case.num_gpus or 1
    by_gpus = f" / {gpus:,} GPUs" if gpus > 1 else ""
    printed = result.printed
    if result.quantity == "tokens":
        return Rate(printed.value / gpus, printed.low / gpus, f"{result.text}{by_gpus}", True)
    if result.quantity == "sequences" and length:
        each = length / gpus
        return Rate(printed.value * each, printed.low * each, f"{result.text} x {length:,} tokens{by_gpus}", False)
    if result.quantity == "step" and case.num_gpus and (step := tokens_per_step(case)):
        tokens, arithmetic = step[0] / case.num_gpus, step[1]
        by_gpus = f" / {case.num_gpus:,} GPUs" if case.num_gpus > 1 else ""
        return Rate(
            tokens / printed.value, tokens / printed.high, f"{arithmetic} / {printed.value:.4g} s{by_gpus}", True
        )
    return None


# ---------------------------------------------------------------- against the card


@dataclass(frozen=True)
class _Work:
    """FLOPs of one token, forward and backward."""

    full: float  # by the usual count
    causal: float  # without what a causal mask leaves out
    least: float  # without attention
    again: float  # the second forward pass of checkpointing, without attention
    arithmetic: str
    is_known: bool


def _work(case: Reported) -> _Work | None:
    shape, length = case.shape, case.row.whole("seq_len") or 0
    if not case.computes_all:
        return None
    if shape is not None:
        tokens = length or shape.positions
        attention = 3 * shape.layers * float(flops.attention_flops_per_sequence(shape, tokens)) / tokens
        least = float(flops.model_flops_per_sequence(shape, tokens)) / tokens - attention
        full = least + (attention if length else 0)
        causal = least + (attention if shape.is_encoder else attention / 2) * bool(length)
        again = 2.0 * shape.layers * flops.block_matrix_elements(shape)
        return _Work(full, causal, least, again, f"{full / 1e9:.3g} GFLOP a token", True)
    if case.num_params is None:
        return None
    share = next(share for least, share in EMBEDDED if case.num_params >= least)
    whole, arithmetic = 6 * case.num_params, f"6 x {billions(case.num_params)} parameters"
    least = (1 - share) * whole
    layers, hidden = _blocks(case)
    attention = 12.0 * layers * hidden * length
    if attention:
        arithmetic = f"({arithmetic} + 12 x {layers} x {hidden:,} x {length:,} of attention)"
    return _Work(whole + attention, least + attention / 2, least, least / 3, arithmetic, False)


def _blocks(case: Reported) -> tuple[int, int]:
    """Layers and hidden size, from their columns or from the model's name, such as h4096 L32; 0 where not said."""
    name = case.row.cells["model"]
    found = (re.search(rf"\b{letter}(\d{{1,5}})\b", name) for letter in "Lh")
    named = [int(match[1]) if match else 0 for match in found]
    layers, hidden = case.row.whole("layers") or named[0], case.row.whole("hidden") or named[1]
    return (layers, hidden) if layers and hidden else (0, 0)


def _peaks(case: Reported) -> list[tuple[float, Gpu, str]]:
    """The highest peak that card and precision may mean; where fp32 may be TF32, that and then fp32's."""
    peaks = [
        (gpu.peak_flops_per_second[kind], gpu, kind)
        for gpu in case.cards
        for kind in case.multiplies_in
        if kind in gpu.peak_flops_per_second
    ]
    highest = max(peaks, key=lambda found: found[0], default=None)
    plain = [found for found in peaks if found[2] == "fp32"] if case.says_fp32 else []
    in_fp32 = max(plain, key=lambda found: found[0], default=None)
    return list(dict.fromkeys(filter(None, (highest, in_fp32))))


def above_the_peak(cases: Sequence[Reported]) -> Outcome:
    """FLOP/s that the card does not have."""
    outcome = Outcome()
    too_fast_for_fp32: dict[str, list[tuple[Reported, str]]] = defaultdict(list)
    for case in cases:
        result, rate, work = case.row.result, rate_of(case), _work(case)
        if result is None or not case.cards:
            continue
        peaks = _peaks(case)
        if not peaks:
            names, kinds = " and ".join(gpu.name for gpu in case.cards), " or ".join(case.multiplies_in)
            outcome.look([case])
            outcome.suspect([case], "likely", f"{names}: no unit for {kinds}, which could only be emulated")
        for number, (peak, gpu, kind) in enumerate(peaks):
            limit = f"the {peak / 1e12:g} of {gpu.name} in {kind}"
            if result.quantity in ("flops", "mfu"):
                found = _printed_flops(case, result, peak, limit)
            elif rate is None or work is None:
                break
            else:
                found = _over(case, rate, work, peak, limit)
            outcome.look([case])
            if found:
                certainty, said = found
                if number:
                    too_fast_for_fp32[gpu.name].append((case, said))
                else:
                    outcome.suspect([case], certainty, said)
                break
    for rows in too_fast_for_fp32.values():
        first = f"row {rows[0][0].row.number}: " if len(rows) > 1 else ""
        unless = "unless fp32 stands for TF32, PyTorch's default until 1.11"
        outcome.suspect([case for case, _ in rows], "likely", f"{first}{rows[0][1]}, {unless}")
    return outcome


def _over(case: Reported, rate: Rate, work: _Work, peak: float, limit: str) -> tuple[Certainty, str] | None:
    """Hold what must be multiplied against a peak, by the least of what is printed."""
    again = work.again if case.checkpointing else 0.0
    if rate.least * (work.causal + again) <= peak:
        return None
    is_certain = work.is_known and rate.counts_tokens and rate.least * work.least > peak
    said = f"{_tera(rate.tokens * work.full)} TFLOP/s a GPU of model FLOPs ({rate.arithmetic} x {work.arithmetic})"
    if rate.least * work.causal <= peak:
        said += f", {_tera(rate.tokens * (work.causal + again))} with checkpointing's second forward pass,"
    elif work.is_known and work.full > work.least:
        said += f", {_tera(rate.tokens * work.least)} of them without attention,"
    said += f" is above {limit}"
    said += "" if rate.counts_tokens else ", if sequences are as long as that"
    said += "" if work.is_known else ", if every parameter is trained and meets every token"
    return "certain" if is_certain else "likely", said


def _tera(per_second: float) -> str:
    return f"{per_second / 1e12:.3g}"


def _printed_flops(case: Reported, result: Result, peak: float, limit: str) -> tuple[Certainty, str] | None:
    """A printed rate of FLOPs, or MFU; counts with what a causal mask leaves out are up to twice what is multiplied."""
    gpus = 1 if result.per_gpu or result.quantity == "mfu" else case.num_gpus or 1
    share = result.printed.low / gpus / (1.0 if result.quantity == "mfu" else peak)
    if share <= 1:
        return None
    certainty: Certainty = "certain" if share > 2 else "likely"
    by_gpus = f" / {case.num_gpus:,} GPUs" if result.quantity == "flops" and gpus > 1 else ""
    counted = "however FLOPs are counted" if share > 2 else "unless much attention is counted that a mask leaves out"
    above = "more than a whole peak" if result.quantity == "mfu" else f"above {limit}"
    return certainty, f"{result.text}{by_gpus} is {above}, {counted}"


# ---------------------------------------------------------------- against itself


def disagreeing(cases: Sequence[Reported]) -> Outcome:
    """Batches, tokens, steps and times that are of one run and do not agree."""
    outcome = Outcome()
    runs: dict[tuple[str, ...], list[Reported]] = defaultdict(list)
    for case in cases:
        runs[case.row.key].append(case)
    for run in runs.values():
        _batch(run, outcome)
        measured: dict[tuple[str, bool], list[Reported]] = defaultdict(list)
        for case in run:
            if case.row.result:
                measured[case.row.result.quantity, case.row.result.per_gpu].append(case)
        # Two of a kind are of two runs, or of two moments.
        once = {key: found[0] for key, found in measured.items() if len(found) == 1}
        for first, second, ours, theirs, what in _pairs(once):
            outcome.look([first, second])
            ratio = max(ours / theirs, theirs / ours)
            if ratio > DISAGREE:
                certainty: Certainty = "certain" if ratio > CERTAINLY else "likely"
                outcome.suspect([first, second], certainty, f"{what}: a factor of {ratio:.3g}{_hint(first, ratio)}")
        _utilization(once, outcome)
    return outcome


def _batch(run: list[Reported], outcome: Outcome) -> None:
    """Micro batch, accumulation and GPUs against the global batch."""
    case = run[0]
    micro, batch, gpus = case.row.whole("micro_batch"), case.row.whole("global_batch"), case.num_gpus
    accumulation = case.row.whole("gradient_accumulation_steps")
    if not (micro and batch and gpus) or case.sharding is None or case.is_split_otherwise:
        return
    outcome.look(run)
    if accumulation and micro * accumulation * gpus != batch:
        made = micro * accumulation * gpus
        text = (
            f"micro batch {micro:,} x accumulation {accumulation:,} x {gpus:,} GPUs = {made:,} sequences, not {batch:,}"
        )
        outcome.suspect(run, "certain", text)
    elif batch % (micro * gpus):
        steps = batch / (micro * gpus)
        text = f"a global batch of {batch:,} is {steps:.4g} times micro batch {micro:,} x {gpus:,} GPUs, not whole"
        outcome.suspect(run, "likely", text)


def _pairs(once: dict[tuple[str, bool], Reported]) -> Iterator[tuple[Reported, Reported, float, float, str]]:
    """Two rows of one run, the same quantity by each, and how it comes about."""

    def found(quantity: str, per_gpu: bool) -> tuple[Reported, Result, int] | None:
        case = once.get((quantity, per_gpu))
        if case is None or case.row.result is None or case.num_gpus is None:
            return None
        return case, case.row.result, 1 if not per_gpu else case.num_gpus

    each, whole = found("tokens", True), found("tokens", False)
    if each and whole:
        (first, a, gpus), (second, b, _) = each, whole
        yield first, second, a.printed.value * gpus, b.printed.value, f"{a.text} x {gpus:,} GPUs is not {b.text}"
    step, sequences = found("step", False), found("sequences", False)
    if step and (per_step := tokens_per_step(step[0])):
        first, a, _ = step
        tokens, arithmetic = per_step
        made = tokens / a.printed.value
        for other in (each, whole):
            if other:
                second, b, gpus = other
                times = f" x {gpus:,} GPUs" if b.per_gpu else ""
                text = f"{arithmetic} / {a.printed.value:.4g} s a step = {made:,.0f} tokens/s is not {b.text}{times}"
                yield first, second, made, b.printed.value * gpus, text
                break
    if step and sequences and (batch := step[0].row.whole("global_batch")):
        (first, a, _), (second, b, _) = step, sequences
        made = batch / a.printed.value
        text = f"{batch:,} sequences / {a.printed.value:.4g} s a step = {made:,.4g} sequences/s is not {b.text}"
        yield first, second, made, b.printed.value, text


def _hint(case: Reported, ratio: float) -> str:
    """Say where the factor is the number of GPUs, which is the commonest slip."""
    gpus = case.num_gpus or 1
    return " (the number of GPUs: is one of them of one GPU?)" if gpus > 1 and abs(ratio / gpus - 1) < 0.05 else ""


def _utilization(once: dict[tuple[str, bool], Reported], outcome: Outcome) -> None:
    """MFU, or FLOP/s, against tokens a second: under every usual way to count."""
    printed = next((once[key] for key in (("mfu", False), ("flops", True)) if key in once), None)
    timed = next((once[key] for key in (("tokens", True), ("tokens", False), ("step", False)) if key in once), None)
    if printed is None or timed is None or printed.row.result is None:
        return
    rate, work, peaks = rate_of(timed), _work(timed), _family_peaks(timed)
    if rate is None or work is None or not peaks:
        return
    outcome.look([printed, timed])
    result = printed.row.result
    reached = [result.printed.value * peak for peak in peaks] if result.quantity == "mfu" else [result.printed.value]
    # By matrix products or by parameters, with attention or without, and with what is computed twice.
    counts = [work.least, work.full, 6 * (timed.num_params or 0) or work.least]
    least, most = rate.tokens * min(counts), rate.tokens * max(max(counts), work.full)
    most += rate.tokens * work.full / 3 * (timed.checkpointing is not False)
    if not any(least / MFU_CONVENTIONS <= ours <= most * MFU_CONVENTIONS for ours in reached):
        of_peak = f" of {peaks[0] / 1e12:g}" if result.quantity == "mfu" else ""
        text = f"{result.text}{of_peak} is {_tera(reached[0])} TFLOP/s a GPU; {rate.arithmetic} x {work.arithmetic} is "
        text += f"{_tera(rate.tokens * work.full)}, and no usual count gives the other"
        outcome.suspect([printed, timed], "likely", text)


def _family_peaks(case: Reported) -> list[float]:
    """Every peak that an MFU may be of: of the card's sisters too, and in bf16 where some products are in fp8."""
    kinds = (*case.multiplies_in, "bf16") if "fp8" in case.multiplies_in else case.multiplies_in
    families = {gpu.name.partition("-")[0] for gpu in case.cards}
    sisters = [gpu for name, gpu in GPUS.items() if name.partition("-")[0] in families]
    found = {gpu.peak_flops_per_second[kind] for gpu in sisters for kind in kinds if kind in gpu.peak_flops_per_second}
    return sorted(found, reverse=True)


# ---------------------------------------------------------------- against the planner


def _is_of_one_gpu(case: Reported) -> bool:
    result = case.row.result
    return result is not None and (result.per_gpu or result.quantity == "step")


def far_from_the_planner(cases: Sequence[Reported]) -> Outcome:
    """Speeds far outside the planner's interval."""
    outcome = Outcome()
    for case in cases:
        rate = rate_of(case)
        if rate is None or not rate.counts_tokens:
            continue
        predicted = [
            (float(step_time.tokens_per_second_per_gpu(job, time.total)), time.evidence)
            for job, time in settings.predicted_times(case)
        ]
        if not predicted:
            continue
        outcome.look([case])
        fastest, slowest = max(predicted, key=lambda p: p[0]), min(predicted, key=lambda p: p[0])
        high, low = fastest[0] * fastest[1].spread, slowest[0] / slowest[1].spread
        said = f"{rate.tokens:,.0f} tokens/s a GPU ({rate.arithmetic}) is far "
        if rate.least > high * FAR["fast"]:
            text = f"above the planner's {high:,.0f} at most ({fastest[0]:,.0f} x {fastest[1].spread:g})"
        # "tok/s" may be of one GPU.
        elif rate.tokens < low / FAR["slow"] and (case.num_gpus == 1 or _is_of_one_gpu(case)):
            text = f"below the planner's {low:,.0f} at least ({slowest[0]:,.0f} / {slowest[1].spread:g})"
        else:
            continue
        outcome.suspect([case], "unexpected", f"{said}{text}; the planner may be wrong")
    return outcome
