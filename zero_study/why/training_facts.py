"""State what the logged steps of a training show by arithmetic: values that are not finite, jumps, zeros, slow steps.

Nothing here is a guess. Each fact says from how many rows of the log it is computed, and leaves the cause open.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from statistics import median

from zero_study.logs.printed_steps import Line, Row, Steps
from zero_study.why.fact import Fact, Kind

FEW, SEVERAL = 3, 8  # rows that are too few to be checked, and from which values are compared
WINDOW = 20  # rows before and after a jump
RISEN = 1.5  # times the loss before
NOISE = 5.0  # times the usual change between neighbors, over the root of the number of rows that are compared
FALLEN = 0.98  # times the first losses that the last ones are if the loss falls
TAIL = 0.1  # share of the rows from which zeros at the end count
ROUNDED, NEAR_ZERO = 0.01, 1e-3  # a loss below it may become 0 by rounding; a loss of a policy may be as small
EXTREME = 30  # powers of ten of a loss that is no loss
SLOWER = 1.5  # times the seconds of the first half of the rows
WAITING = 0.4  # share of the time of the steps

_NAMES = {"loss": "loss", "norm": "gradient norm", "rate": "learning rate", "scale": "loss scale"}
_PART = re.compile(
    r"""(?i)["']?\b(\w*loss_\w+|\w+_loss)["']?\s*[:=]\s*([-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf))\b"""
)
_FIXED_ZERO = re.compile(r"\b0\.0{4,}\b")  # a learning rate that is written so may be rounded to 0


def facts(steps: Steps, total_steps: int | None = None) -> list[Fact]:
    """Return what the logged steps show. `total_steps` are those of the run. None: a progress bar may state them."""
    rows, bar = steps.rows, steps.step_bar
    found = [*_not_finite(rows, steps)]
    if len(rows) > FEW:
        found += _jump(rows) or _rises(rows)
        found += _zeros(rows, total_steps or (int(bar.total) if bar else None))
    return [*found, *_waiting(steps), *_slower(rows)]


def doubt(steps: Steps) -> str | None:
    """Return what is wrong with the rows, or that they are too few to be checked. None if nothing is wrong."""
    rows, losses = steps.rows, _values(steps.rows, "loss")
    if losses and losses[-1] > RISEN * losses[0] > 0:
        return f"the loss is {losses[0]:.4g} in the first row and {losses[-1]:.4g} in the last one"
    if len(rows) <= FEW:
        return f"{'only ' + _count(rows, 'line') if rows else 'no line'} with a loss or a gradient norm of a step"
    if not losses:
        return "no loss that is a number"
    if len(losses) >= SEVERAL and len(set(losses)) == 1:
        return f"the loss is {losses[0]:.4g} in all rows"
    if 2 * steps.num_overflows > len(rows):
        return f"{steps.num_overflows:,} steps were skipped because of an overflow"
    return None


def _fact(id: str, text: str, rows: Sequence[Row], *evidence: Row | Line, is_note: bool = False) -> Fact:
    lines = tuple(each.line if isinstance(each, Row) else each for each in evidence)
    number = f"{_count(rows, 'logged row')}" if rows else "logged numbers"
    kind: Kind = "slow" if id.startswith("slow") else "wrong"
    return Fact(id, kind, text, "", "computed", number, lines, is_note=is_note)


def _with(rows: Sequence[Row], name: str) -> list[Row]:
    """Return the rows in which a value is stated and finite."""
    return [row for row in rows if math.isfinite(math.nan if getattr(row, name) is None else getattr(row, name))]


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [getattr(row, name) for row in _with(rows, name)]


def _at(row: Row) -> str:
    place = f"line {row.line.number:,}" if row.line.number else row.line.text.partition(":")[0]
    return place if row.step is None or not math.isfinite(row.step) else f"{place} (step {row.step:,.0f})"


def _state(row: Row) -> str:
    """Return the place and the values of a row, such as "line 12 (loss 2.5, gradient norm nan)"."""
    values = {noun: getattr(row, name) for name, noun in _NAMES.items() if getattr(row, name) is not None}
    return f"{_at(row)} with {', '.join(f'{noun} {value:.6g}' for noun, value in values.items())}"


def _is_bad(row: Row) -> bool:
    """Return whether the loss or the norm is not finite. (Such a loss is 0.0 in the log if Trainer replaced it.)"""
    return not math.isfinite(row.loss or 0.0) or not math.isfinite(row.norm or 0.0)


def _has_rewards(rows: Sequence[Row]) -> bool:
    return any("reward" in row.line.text for row in rows[:FEW])


def _count(counted: Sequence[object], noun: str) -> str:
    return f"{len(counted):,} {noun}{'s' * (len(counted) != 1)}"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}"


# ---------------------------------------------------------------- wrong


def _not_finite(rows: Sequence[Row], steps: Steps) -> Iterator[Fact]:
    """Yield the first value that is not finite, with the values before and after it."""
    bad = [row for row in rows if _is_bad(row)]
    if not bad:
        return
    first, place = bad[0], rows.index(bad[0])
    falls = steps.num_overflows or any(b < a for a, b in itertools.pairwise(_values(rows, "scale")))
    is_only_norm = all(row.loss and math.isfinite(row.loss) for row in bad) and not _is_bad(rows[-1])
    if is_only_norm and (falls or 2 * len(bad) < len(rows)):
        text = f"The gradient norm is not finite in {_count(bad, 'row')}, first in {_state(first)}. All losses are."
        text += " The loss scale falls, as it does if such steps are skipped." if falls else ""
        yield _fact("wrong/not-finite", text, rows, first, is_note=True)
        return
    names = [noun for name, noun in _NAMES.items() if not math.isfinite(getattr(first, name) or 0.0)]
    text = f"The first value that is not finite is the {' and the '.join(names)} in {_state(first)}."
    before = rows[max(0, place - 1) : place]
    text += f" {_count(rows[:place], 'row')} with finite values before it." if place else " No row comes before it."
    text += f" The last one is {_state(before[0])}." if before else ""
    later = [row for row in rows[place + 1 :] if row.loss is not None]
    spoiled = [row for row in later if not math.isfinite(row.loss or 0.0) or (row.loss == 0.0 and _is_bad(row))]
    if later and not spoiled:
        text += (
            f" All later losses ({len(later):,}) are finite, so the weights were not NaN when these losses were "
            "computed."
        )
    elif later:
        text += f" Losses after it that are not finite, or 0.0 in their place: {len(spoiled):,} of {len(later):,}."
    if any(row.loss == 0.0 for row in bad) and "'grad_norm'" in first.line.text:
        text += " Trainer prints a loss of 0.0 instead of NaN (logging_nan_inf_filter)."
    yield _fact("wrong/not-finite", text, rows, *before, first, *spoiled[:1])
    parts = _PART.findall(first.line.text)
    of_nan = [name for name, value in parts if not math.isfinite(float(value))]
    if 0 < len(of_nan) < len(parts):
        text = f"{len(of_nan)} of {len(parts)} terms of the loss in {_at(first)} are not finite: {', '.join(of_nan)}."
        yield _fact("wrong/parts-of-loss", text, [first], first)


def _positive(rows: Sequence[Row]) -> tuple[list[Row], list[float]]:
    """Return the rows with losses above 0, and these losses. Empty if losses may be negative or are of a policy."""
    positive = [row for row in _with(rows, "loss") if row.loss and abs(math.log10(abs(row.loss))) < EXTREME]
    values = _values(positive, "loss")
    return ([], []) if _has_rewards(rows) or min(values, default=0) < 0 else (positive, values)


def _jump(rows: Sequence[Row]) -> list[Fact]:
    """Return the largest jump after which the loss stays high: nearly all values after it are above all before it."""
    losses, values = _positive(rows)
    found: list[tuple[float, int, float, float]] = []
    for place in range(SEVERAL, len(values) - FEW + 1):
        before, after = values[max(0, place - WINDOW) : place], sorted(values[place : place + WINDOW])
        factor, low = values[place] / values[place - 1], median(before)
        stays = after[len(after) // 4] > max(before) and median(after) > RISEN * low
        if factor > RISEN and stays and (high := median(values[place:])) > RISEN * low:
            found.append((factor, place, low, high))
    if not found:
        return []
    factor, place, low, high = max(found)
    before_it, after_it = losses[place - 1 : place + 1]
    text = (
        f"The loss jumps by a factor of {factor:.3g}, from {_state(before_it)} to {_state(after_it)}, and stays high: "
        f"its median is {low:.4g} before the jump and {high:.4g} after it."
    )
    return [_fact("wrong/jump", text, rows, before_it, after_it)]


def _rises(rows: Sequence[Row]) -> list[Fact]:
    """Return that the loss at the end is above its lowest smoothed value by more than its noise."""
    losses, values = _positive(rows)
    if len(values) <= FEW:
        return []
    width = max(min(4, len(values) // 2), len(values) // 10)
    starts = range(0, len(values) - width + 1, 1 + width // 8)
    smooth = [median(values[start : start + width]) for start in starts]
    noise = median(abs(math.log(after / before)) for before, after in itertools.pairwise(values))
    lowest, end = min(smooth), median(values[-width:])
    if len(values) < SEVERAL:  # too few to estimate the noise
        noise = 0.0 if min(values[-width:]) >= max(values[:width]) else math.inf
    if math.log(end / lowest) < max(math.log(RISEN), NOISE * noise / math.sqrt(width)):
        return []
    place, last = losses[starts[smooth.index(lowest)]], losses[-1]
    text = (
        f"The loss rises to {end:.4g} at the end (median of {width:,} rows). It is {smooth[0]:.4g} at the beginning, "
        f"and {lowest:.4g} at its lowest, around {_state(place)}. The last loss is that of {_state(last)}."
    )
    return [_fact("wrong/loss-rises", text, rows, place, last)]


def _zeros(rows: Sequence[Row], total: int | None) -> Iterator[Fact]:
    """Yield the values that are 0 in all rows, or from one row to the end."""
    losses, norms = _values(rows, "loss"), _values(rows, "norm")
    near = [row for row in _with(rows, "loss") if abs(row.loss or 0.0) <= NEAR_ZERO]
    if is_policy := _has_rewards(rows) and 2 * len(near) > len(losses) and any(norms):
        text = f"The loss is at most {NEAR_ZERO:g} in size in {_count(near, 'row')}, as is usual for a policy."
        yield _fact("wrong/loss-zero", f"{text} Its gradient norm is {_range(norms)}.", rows, near[0], is_note=True)
    for name in ("rate", "norm", "loss"):
        values = _values(rows, name)
        zeros = list(itertools.takewhile(lambda value: not value, reversed(values)))
        if len(zeros) <= max(FEW, TAIL * len(values)):
            continue
        row, before = _with(rows, name)[-len(zeros)], values[: -len(zeros)][-5:]
        third, falls = max(1, len(losses) // 3), not losses
        text = f"The {_NAMES[name]} is 0 in all {len(zeros):,} rows"
        if before:
            text += f" from {_at(row)} to the end. Before, it is {before[-1]:.4g}"
        text += "."
        if name == "rate":
            end = total or max(_values(rows, "step"), default=0)
            if (before and (row.step or 0) > (1 - TAIL) * end > 0) or _FIXED_ZERO.search(row.line.text):
                continue
        elif name == "loss":
            if is_policy or _is_bad(row) or (before and median(before) < ROUNDED):
                continue
            text += f" The gradient norm is {_range(norms)}." if norms else ""
        elif losses:
            begin, end = median(losses[:third]), median(losses[-third:])
            falls = end < FALLEN * begin
            text += f" The loss is {begin:.4g} at the beginning and {end:.4g} at the end."
        yield _fact(f"wrong/{name}-zero", text, rows, row, is_note=name == "norm" and falls)


# ---------------------------------------------------------------- slow


def _waiting(steps: Steps) -> Iterator[Fact]:
    waiting = steps.waiting
    if waiting is not None and waiting.count > FEW and waiting.share >= WAITING:
        text = (
            f"The log states that {100 * waiting.share:.0f} % of the time of {waiting.count:,} steps is waiting for "
            f"data. The longest wait is {waiting.longest:,.4g} s."
        )
        yield _fact("slow/waiting-for-data", text, [], waiting.line)


def _slower(rows: Sequence[Row]) -> Iterator[Fact]:
    """Yield that all steps of the last quarter take longer than those of the first half."""
    for name, unit in (("seconds", "s per step"), ("speed", "samples or tokens per second")):
        timed = [row for row in _with(rows, name) if getattr(row, name) > 0]
        values = _values(timed, name)
        half, rest = values[: len(values) // 2], values[-len(values) // 4 :]
        if len(values) < SEVERAL:
            continue
        before, after = median(half), median(rest)
        is_apart = min(rest) > max(half) if name == "seconds" else max(rest) < min(half)
        if is_apart and max(before / after, after / before) > SLOWER:
            bad = [row for row in timed if getattr(row, name) > max(half) or getattr(row, name) < min(half)]
            text = (
                f"The steps become slower: {before:,.4g} {unit} in the first half of the rows, and {after:,.4g} in the "
            )
            yield _fact("slow/slower", f"{text}last quarter, from {_at(bad[0])} on.", rows, bad[0], timed[-1])
            return
