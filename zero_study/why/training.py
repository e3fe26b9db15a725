"""Find out what is wrong with a training from its losses, gradient norms, learning rates and loss scales."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence

from zero_study.why.cause import Cause, Certainty
from zero_study.why.known import conclude
from zero_study.why.log import Line
from zero_study.why.setting import Setting
from zero_study.why.steps import Row, Steps
from zero_study.why.tensors import shape_of

FEW_SOUND = 5  # rows before a loss that is not finite from which a divergence is likely
FEW_ROWS = 3  # rows of which nothing is concluded
SAME = 1e-6  # relative difference of numbers that are the same as printed
SMALLEST_SCALE = 1.0  # a loss scale that makes fp16 no better than it is
JUMP = 1.5  # times the loss before
STUCK = 0.02  # relative change of a loss that does not move
FALLEN = 0.98  # times the first loss; the training learns if the last one is lower
TOO_LARGE = 1.3  # times the loss of a guess
SEVERAL = 8  # times that a metric is logged with the same value if it stands still
RISEN = 1.5  # times the lowest loss of a third of the steps
EARLY = 0.1  # share of the steps with a learning rate of 0 from which a schedule ended early
LARGEST_CHANCE = math.log(262_144)  # loss of a guess over the largest vocabularies that are usual
SAME_AS_GUESS = 2e-3  # between a loss and the logarithm of a vocabulary: a relative difference of 0.2 % in its size
# Vocabularies of usual language models, with the sizes to which they are padded.
VOCABULARIES = (
    32_000, 32_064, 32_768, 49_152, 50_257, 50_304, 65_024, 100_277, 100_352, 102_400, 128_256, 129_280, 131_072,
    151_552, 151_936, 152_064, 163_840, 200_064, 201_088, 248_320, 256_000, 262_144,
)  # fmt: skip
LARGE_NORM = 100.0  # of gradients, which nearly all trainings of language models stay below
MOST_PARTS = 4  # of a loss that are named
NEAR_ZERO = 1e-3  # of the loss of a policy, which is about the KL divergence times its factor
SETTLED = 20  # rows after which a loss must have moved


# A part of a loss, such as loss_cls: nan.
_PART = re.compile(
    r"""["']?\b(\w*loss_\w+)["']?\s*[:=]\s*([-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf))\b""", re.IGNORECASE
)


# The spread of the rewards within a group, and the divergence from the reference model.
_SPREAD = re.compile(r"""["']?\breward_std["']?\s*[:=]\s*["']?([\d.]+(?:e-?\d+)?)""")
_KL = re.compile(r"""["']?(?<![\w/])kl["']?\s*[:=]\s*["']?([\d.]+(?:e-?\d+)?)""")


def causes(steps: Steps, setting: Setting) -> list[Cause]:
    """Return the causes that the logged steps show."""
    rows = steps.rows
    found = [*_not_finite(rows, setting), *_zero(rows), *_scale(steps), *_ranks(steps)]
    if len(rows) > FEW_ROWS:
        found += [*_norm(rows, setting), *_rate(rows, steps), *_loss(rows, setting)]
    if rows:
        found += _first_losses(rows, setting)
    if len(rows) > 1:
        found += [*_jump(rows, setting)]
    found += _constants(steps)
    if steps.answers is not None and steps.answers[1]:
        found.append(conclude("wrong/answers-masked", (steps.answers[0],)))
    return [*found, *_epoch(steps, setting), *_evaluation(steps, setting)]


def doubt(steps: Steps) -> str | None:
    """Return why the logged numbers do not show a sound training. None if they do."""
    losses = [value for _, value in _with(steps.rows, "loss")]
    few = len(steps.rows) if steps.rows else steps.num_steps  # a log of a progress bar has no rows
    if few <= FEW_ROWS:
        return f"it has only {few} step{'s' * (few != 1)}"
    if losses and losses[-1] > RISEN * losses[0] > 0:
        return f"the loss rises from {losses[0]:.4g} to {losses[-1]:.4g}"
    for name, noun in (("rate", "learning rate"), ("norm", "gradient norm")):
        values = [value for _, value in _with(steps.rows, name)]
        if values and not any(values):
            return f"the {noun} is 0 in every row"
    return None


def _evaluation(steps: Steps, setting: Setting) -> Iterator[Cause]:
    """Yield the cause that the loss of an evaluation is NaN although the training is sound."""
    bad = next((line for line, value in steps.evaluations if not math.isfinite(value)), None)
    losses = [value for _, value in _with(steps.rows, "loss")]
    if bad is not None and losses and all(math.isfinite(value) and value > 0 for value in losses):
        id = "wrong/evaluation-nan-fp16" if "fp16" in setting.features else "wrong/evaluation-nan"
        yield conclude(id, (bad,))


def _with(rows: Sequence[Row], name: str) -> list[tuple[Row, float]]:
    return [(row, value) for row in rows if (value := getattr(row, name)) is not None]


def _step(row: Row, rows: Sequence[Row]) -> str:
    """Return the name of a row's step, such as "step 12" or "logged step 3"."""
    if row.step is not None:
        return f"step {row.step:,.0f}"
    return f"logged step {rows.index(row) + 1:,}"


def _not_finite(rows: Sequence[Row], setting: Setting) -> Iterator[Cause]:
    """Yield the cause that a loss or a gradient norm is NaN or infinite, or is 0 because NaN was replaced.

    Trainer logs a loss of 0.0 in place of NaN (logging_nan_inf_filter).
    """
    bad_norm = next((row for row, value in _with(rows, "norm") if not math.isfinite(value)), None)
    bad_loss = next(
        (row for row, value in _with(rows, "loss")
         if not math.isfinite(value) or (value == 0.0 and row.norm is not None and not math.isfinite(row.norm))),
        None,
    )  # fmt: skip
    first = min((row for row in (bad_loss, bad_norm) if row is not None), key=lambda row: row.line.number, default=None)
    if first is None:
        return
    sound = [
        row for row in rows if row.line.number < first.line.number and row.loss is not None
        and math.isfinite(row.loss) and (row.norm is None or math.isfinite(row.norm))
    ]  # fmt: skip
    is_forward_sound = first.loss is not None and math.isfinite(first.loss) and first.loss != 0.0
    if bad_loss is None and _is_skipped(rows):
        return
    where = _step(first, rows)
    if (cause := _by_setting(first, where, sound, setting)) is not None:
        yield cause
    after = f", after {len(sound):,} sound steps" if sound else ", the first logged step"
    if is_forward_sound and not sound:
        later = [row for row in rows if row.line.number > first.line.number and row.loss is not None]
        spoiled = next((row for row in later if not math.isfinite(row.loss or 0.0) or row.loss == 0.0), None)
        id = "wrong/gradients-nan-zero2" if setting.strategy in ("zero1", "zero2") else "wrong/gradients-nan"
        yield conclude(
            id, (first.line,) if spoiled is None else (first.line, spoiled.line), norm=str(first.norm), where=where,
            after=after, loss=f"{first.loss:.4g}", then=_then(later, spoiled),
            rate=" The learning rate is 0 in this step, so it is not the reason." if first.rate == 0.0 else "",
        )  # fmt: skip
    elif sound:
        loss = f"{sound[-1].loss:.4g}"
        certainty: Certainty = "likely" if len(sound) >= FEW_SOUND else "possible"
        yield conclude("wrong/diverged", (first.line,), certainty, where=where, after=after, loss=loss)
    elif first.step is not None and first.step <= 1:
        yield conclude("wrong/nan-from-the-start", (first.line,), where=where, after=after)
    else:
        yield conclude("wrong/nan-when-log-begins", (first.line,), where=where, parts=_parts_of_loss(first.line))


def _then(later: Sequence[Row], spoiled: Row | None) -> str:
    """Return a sentence on whether the losses after a gradient of NaN are NaN, too. Empty if no losses follow."""
    if spoiled is not None:
        shown = " (Trainer prints 0.0 instead of NaN)" if spoiled.loss == 0.0 else ""
        return f" Later losses are {spoiled.loss:g}{shown}, so that the NaN is in the weights, too."
    if later:
        return " Later losses are finite, so that the weights contain no NaN."
    return ""


def _parts_of_loss(line: Line) -> str:
    """Return a sentence that names the terms of a loss that are not finite. Empty if all or none of them are finite."""
    values = {name: float(value) for name, value in _PART.findall(line.text)}
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if not bad or len(bad) == len(values):
        return ""
    more = f" and {len(bad) - MOST_PARTS} more" if len(bad) > MOST_PARTS else ""
    names = ", ".join(bad[:MOST_PARTS])
    return f" Of {len(values)} parts of the loss in this line, {len(bad)} are not finite: {names}{more}."


def _by_setting(first: Row, where: str, sound: Sequence[Row], setting: Setting) -> Cause | None:
    """Return the usual cause of NaN for the logged model and data types. None if no cause is known."""
    model = (setting.model or "").lower()
    if ("gemma-2" in model or "gemma2" in model) and not sound:
        return conclude("wrong/nan-softcap", (first.line,), where=where)
    if "fp16" in setting.features:
        return conclude("wrong/nan-fp16", (first.line,), where=where)
    return None


def _is_skipped(rows: Sequence[Row]) -> bool:
    """Return whether norms are only infinite or NaN in steps that the fp16 loss scale skipped, which is usual."""
    norms = [value for _, value in _with(rows, "norm")]
    return sum(map(math.isfinite, norms)) > len(norms) // 2


def _zero(rows: Sequence[Row]) -> Iterator[Cause]:
    losses = _with(rows, "loss")
    zero = [row for row, value in losses if value == 0.0 and not (row.norm is not None and not math.isfinite(row.norm))]
    values = [value for _, value in losses]
    drops = len(zero) > 1 and values[0] > 0.1 and not any(values[values.index(0.0) :])  # it stays exactly 0
    many = len(zero) > max(2, len(losses) // 2) or drops
    if (of_policy := _of_policy(losses)) is not None:
        yield of_policy
    elif many and "reward" in zero[0].line.text:
        if not any(row.norm for row in zero):
            yield conclude(
                "wrong/rewards-equal", (zero[0].line,), zeros=f"{len(zero):,}", rows=f"{len(losses):,}"
            )  # fmt: skip
    elif many and not any(row.norm for row in zero):
        yield conclude("wrong/loss-zero", (zero[0].line,), zeros=f"{len(zero):,}", rows=f"{len(losses):,}")


def _of_policy(losses: Sequence[tuple[Row, float]]) -> Cause | None:
    """Return a note on losses near 0 in a training with rewards, if gradients and rewards show that it learns.

    A policy loss is near 0 by construction, which a user may take for an error.
    """
    rows = [(row, value) for row, value in losses if "reward" in row.line.text]
    near = [row for row, value in rows if abs(value) <= NEAR_ZERO]
    norms = [row.norm for row in near if row.norm is not None]
    if not near or 2 * len(near) <= len(losses) or not all(map(math.isfinite, norms)) or not any(norms):
        return None
    spreads, divergences = (
        [float(match[1]) for row in near if (match := pattern.search(row.line.text))] for pattern in (_SPREAD, _KL)
    )
    if spreads and not any(spreads):
        return None  # all answers of a group got the same reward
    largest = max(abs(row.loss or 0.0) for row in near)
    learns = [f"a gradient norm of {_range([norm for norm in norms if norm])}"]
    if spreads:
        learns.append(f"rewards that differ within a group (reward_std {_range(spreads)})")
    text = f"{' and '.join(learns)} show that it learns"
    if divergences:
        text += f"; the KL divergence of {_range(divergences)}, times its small factor, is what is left of the loss"
    return conclude(
        "wrong/loss-zero-of-policy", (near[0].line,), zeros=f"{len(near):,}", rows=f"{len(losses):,}",
        loss=f"at most {largest:.1g} in size" if largest else "0.0", learns=text,
    )  # fmt: skip


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2g}", f"{max(values):.2g}"
    return least if least == most else f"{least} to {most}"


def _scale(steps: Steps) -> Iterator[Cause]:
    scales = [value for _, value in steps.overflows] or [value for _, value in _with(steps.rows, "scale")]
    if not scales:
        return
    smallest, count = min(scales), steps.num_overflows
    fell = smallest <= SMALLEST_SCALE < max(scales)  # in bf16, some programs log a scale of 1
    if fell and (count > 8 or not steps.overflows):
        line = next(
            (line for line, value in steps.overflows if value <= SMALLEST_SCALE),
            steps.overflows[0][0] if steps.overflows else steps.rows[0].line,
        )
        skipped = f" in {count:,} skipped steps" if count else ""
        yield conclude(
            "wrong/loss-scale", (line,), largest=f"{max(scales):,.0f}", smallest=f"{smallest:g}", skipped=skipped
        )


def _norm(rows: Sequence[Row], setting: Setting) -> Iterator[Cause]:
    norms = _with(rows, "norm")
    values = [value for _, value in norms if math.isfinite(value)]
    if len(values) < 5:
        return
    first = norms[0][0]
    if not any(values):
        losses = [value for _, value in _with(rows, "loss") if math.isfinite(value)]
        if not any(losses) or min(losses) < FALLEN * losses[0]:
            return  # if the loss falls, or is not logged, the norm may only not be logged
        vocabulary = _vocabulary_of_guess(losses, setting)
        if vocabulary is not None:
            yield conclude(
                "wrong/output-uniform", (first.line,), value=f"{losses[0]:g}", values=f"{len(losses):,}",
                vocabulary=f"{vocabulary:,}",
            )  # fmt: skip
            return
        yield conclude("wrong/norm-zero", (first.line,), values=f"{len(values):,}")
        return
    spread = (max(values) - min(values)) / max(map(abs, values))
    if spread <= SAME and len(values) >= 8:
        value = values[0]
        if setting.clipping is not None and math.isclose(value, setting.clipping, rel_tol=1e-3):
            clipping = f"{setting.clipping:g}"
            yield conclude(
                "wrong/norm-is-clipping",
                (first.line,),
                value=f"{value:g}",
                values=f"{len(values):,}",
                clipping=clipping,
            )
        else:
            yield conclude("wrong/norm-constant", (first.line,), value=f"{value:g}", values=f"{len(values):,}")


def _vocabulary_of_guess(losses: Sequence[float], setting: Setting) -> int | None:
    """Return the vocabulary size whose logarithm all losses equal, as for a uniform output. None if none fits."""
    shape = shape_of(setting.model)
    stated = shape.vocabulary if shape is not None and shape.vocabulary else setting.vocabulary
    for vocabulary in VOCABULARIES if stated is None else (stated,):
        if all(math.isclose(loss, math.log(vocabulary), abs_tol=SAME_AS_GUESS) for loss in losses):
            return vocabulary
    return None


def _constants(steps: Steps) -> Iterator[Cause]:
    """Yield the cause that a norm or a ratio is equal in all steps. Integers are left out, as they may be settings."""
    for name, constant in steps.constants.items():
        is_constant = constant.count >= SEVERAL and not constant.differs and math.isfinite(constant.value)
        if is_constant and constant.value != int(constant.value):
            value = f"{constant.value:.8g}"
            yield conclude(
                "wrong/metric-stands-still", (constant.line,), name=name, value=value, values=f"{constant.count:,}"
            )
            return


def _rate(rows: Sequence[Row], steps: Steps) -> Iterator[Cause]:
    rates = _with(rows, "rate")
    if len(rates) < 5:
        return
    values = [value for _, value in rates]
    zeros = [row for row, value in rates if value == 0.0]
    if len(zeros) == len(values):
        yield conclude("wrong/rate-zero", (zeros[0].line,), values=f"{len(values):,}")  # fmt: skip
    elif zeros and values[-1] == 0.0 and len(zeros) > max(3, EARLY * len(values)) and max(values) > 0:
        last = next(row for row, value in reversed(rates) if value > 0)
        begin, end = _first_after(rates, last), rates[-1][0].step
        if begin is not None and end is not None and begin > (1 - EARLY) * end:
            return  # only the last steps, whose rate is too small for the digits that are logged
        yield conclude(
            "wrong/schedule-too-fast", (zeros[-1].line,), last=_step(last, rows), zeros=f"{len(zeros):,}",
            values=f"{len(values):,}",
        )  # fmt: skip


def _first_after(rates: Sequence[tuple[Row, float]], last: Row) -> float | None:
    """Return the step of the next row."""
    rows = [row for row, _ in rates]
    place = rows.index(last) + 1
    return rows[place].step if place < len(rows) else None


def _loss(rows: Sequence[Row], setting: Setting) -> Iterator[Cause]:
    losses = [(row, value) for row, value in _with(rows, "loss") if math.isfinite(value)]
    values = [value for _, value in losses]
    if len(values) < SETTLED or not any(values):
        return
    first = losses[0][0]
    third = len(values) // 3
    begin, end = statistics.median(values[:third]), statistics.median(values[-third:])
    if max(values) - min(values) <= SAME * abs(max(values)):
        yield conclude("wrong/loss-constant", (first.line,), value=f"{values[0]:g}", values=f"{len(values):,}")
        return
    lowest = min(statistics.median(values[place : place + third]) for place in range(0, len(values) - third, third))
    is_of_policy = "reward" in first.line.text or min(values) <= 0
    if not is_of_policy and end > RISEN * lowest and end > 1.0:
        yield conclude(
            "wrong/loss-rises", (first.line, losses[-1][0].line), lowest=f"{lowest:.4g}", end=f"{end:.4g}",
            values=f"{len(values):,}",
        )  # fmt: skip
    shape = shape_of(setting.model)
    uniform = math.log(shape.vocabulary) if shape is not None else None
    is_random = begin > 7.5 if uniform is None else math.isclose(begin, uniform, rel_tol=0.06)
    if abs(end - begin) <= STUCK * abs(begin) and is_random:
        known = f", as ln({shape.vocabulary:,}) = {uniform:.2f}" if shape is not None and uniform is not None else ""
        certainty: Certainty = "likely" if uniform is not None else "possible"
        yield conclude(
            "wrong/loss-of-chance", (first.line, losses[-1][0].line), certainty, end=f"{end:.2f}",
            values=f"{len(values):,}", known=known,
        )  # fmt: skip


def _first_losses(rows: Sequence[Row], setting: Setting) -> Iterator[Cause]:
    """Yield the cause that the first losses of a language model are far above the loss of a random guess."""
    losses = [value for _, value in _with(rows[:5], "loss") if math.isfinite(value)]
    shape = shape_of(setting.model)
    if not losses:
        return
    if shape is None or not shape.vocabulary:
        norms = [value for _, value in _with(rows, "norm") if math.isfinite(value)]
        first, norm = statistics.median(losses), statistics.median(norms) if norms else 0.0
        if first > LARGEST_CHANCE and norm > LARGE_NORM:
            yield conclude(
                "wrong/loss-and-norm-large", (rows[0].line,), loss=f"{first:.4g}", norm=f"{norm:,.4g}",
                largest=f"{max(norms):,.4g}", chance=f"{LARGEST_CHANCE:.3g}",
            )  # fmt: skip
        return
    chance, first = math.log(shape.vocabulary), statistics.median(losses)
    if first > TOO_LARGE * chance:
        words = f"the {shape.vocabulary:,} tokens of the vocabulary"
        yield conclude(
            "wrong/loss-too-large", (rows[0].line,), loss=f"{first:.4g}", words=words, chance=f"{chance:.3g}"
        )


def _jump(rows: Sequence[Row], setting: Setting) -> Iterator[Cause]:
    """Yield the cause that the loss jumped when the training was resumed."""
    steps = [row for row in rows if row.loss is not None and math.isfinite(row.loss)]
    if not setting.is_resumed or len(steps) < 2:
        return
    # The place of the resumption is where the step number falls back, or the first row after the message.
    for place, (before, after) in enumerate(itertools.pairwise(steps), start=1):
        fell_back = before.step is not None and after.step is not None and after.step <= before.step
        if fell_back and after.loss is not None and before.loss is not None and after.loss > JUMP * before.loss > 0:
            yield conclude(
                "wrong/jump-after-resuming", (before.line, after.line), after=f"{after.loss:.4g}",
                before=f"{before.loss:.4g}", step=_step(steps[place], rows),
            )  # fmt: skip
            return


def _ranks(steps: Steps) -> Iterator[Cause]:
    """Yield the cause that the ranks report different gradient norms. In a sound training, they are the same."""
    series = {rank: each.rows for rank, each in steps.by_rank.items() if rank is not None and each.count > FEW_ROWS}
    if len(series) < 2:
        return
    norms = {
        rank: {
            row.step: row.norm
            for row in rows
            if row.step is not None and row.norm is not None and math.isfinite(row.norm)
        }
        for rank, rows in series.items()
    }
    first, *others = sorted(norms)
    shared = [step for step in norms[first] if all(step in norms[rank] for rank in others)]
    different = [
        step for step in shared
        if any(not math.isclose(norms[first][step] or 0.0, norms[rank][step] or 0.0, rel_tol=1e-3) for rank in others)
    ]  # fmt: skip
    if len(different) > max(2, len(shared) // 2):
        lines = tuple(rows[0].line for rows in series.values())[:3]
        yield conclude("wrong/ranks-apart", lines, different=f"{len(different):,}", shared=f"{len(shared):,}")


def _epoch(steps: Steps, setting: Setting) -> Iterator[Cause]:
    """Yield the cause that the number of steps does not fit the number of examples and the batch size."""
    batch = (setting.micro_batch_size or 0) * (setting.num_gpus or 0) * (setting.gradient_accumulation_steps or 1)
    bar = steps.step_bar
    total = setting.total_steps or (int(bar.total) if bar is not None else None)
    if not (batch and setting.num_examples and setting.num_epochs and total):
        return
    expected = setting.num_examples * setting.num_epochs / batch
    factor = expected / total
    if setting.num_gpus and setting.num_gpus > 1 and math.isclose(factor, setting.num_gpus, rel_tol=0.1):
        yield conclude(
            "wrong/short-epoch", (bar.line,) if bar is not None else (), total=f"{total:,}",
            num_examples=f"{setting.num_examples:,}", num_epochs=f"{setting.num_epochs:g}", batch=f"{batch:,}",
            expected=f"{expected:,.0f}", factor=f"{factor:.2g}",
        )  # fmt: skip
