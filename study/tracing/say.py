"""What does a second opinion add to an answer of `zero-study advise`: traced, predicted, and where they differ?"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator

from study.errors import Refusal
from study.planner.choose import Advice, Option
from study.planner.say import LINE
from study.theory import peaks
from study.tracing.figure import Difference, Traced, differences

SHOWN = 0.01  # of the traced peak: parts that differ by less are not listed
HEAD = """
Traced, not measured: a step of transformers' own modules over fake tensors, counted by torch's memory tracker.
Predicted: what is expected of the same modules (--kernels transformers). Tensors of one GPU, in GiB."""


def lines(advice: Advice) -> Iterator[str]:
    """Say it, a line for each strategy as it is traced, and which cannot be traced and why."""
    yield HEAD
    not_traced: dict[str, list[str]] = {}
    for option in advice.options:
        try:
            yield _line(advice, option)
        except Refusal as refusal:
            not_traced.setdefault(str(refusal), []).append(option.strategy.name)
    for reason, names in not_traced.items():
        yield textwrap.fill(f"Not traced: {', '.join(names)}: {reason}.", LINE)


def _line(advice: Advice, option: Option) -> str:
    from study.tracing.trace import trace

    engine = option.prediction.engine
    job = dataclasses.replace(option.prediction.job, kernels="transformers", compiled=False, loss_kernel=None)
    traced = trace(advice.shape, engine, job)
    predicted = peaks.peak(advice.shape, engine, job)
    total = float(predicted.total)
    said = (
        f"{option.strategy.name}: traced {_gib(traced.total)}, predicted {_gib(total)}, "
        f"residual {(traced.total - total) / 2**30:+.2f} ({100 * (traced.total / total - 1):+.1f} %)"
    )
    return f"{said}: {_parts(traced, differences(traced, predicted, engine))}; {traced.seconds:.0f} s"


def _parts(traced: Traced, found: list[Difference]) -> str:
    """Name the parts that differ, the largest difference first."""
    differing = [each for each in found if abs(each.num_bytes) >= SHOWN * traced.total]
    if not differing:
        return f"no part differs by {100 * SHOWN:.0f} % of it"
    differing.sort(key=lambda each: -abs(each.num_bytes))
    return ", ".join(
        f"{each.group} {each.num_bytes / 2**30:+.2f} ({_gib(each.traced)} against {_gib(each.predicted)})"
        for each in differing
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"
