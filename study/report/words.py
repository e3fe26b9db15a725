"""How do numbers read on pages? Units, shares, amounts and lists, in the same words everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from study.compare.words import Unit
from study.theory.case import Job

GIB = 2**30


def gib(num_bytes: float) -> str:
    """One decimal; nothing where there is nothing."""
    return f"{num_bytes / GIB:,.1f}" if num_bytes else ""


def percent(share: float, decimals: int = 0) -> str:
    """The space before the sign is one that does not break."""
    return f"{100 * share:.{decimals}f}\N{NO-BREAK SPACE}%"


def signed_percent(share: float, decimals: int = 0) -> str:
    rounded = round(100 * share, decimals) + 0.0  # not minus nothing
    return f"{rounded:+.{decimals}f}\N{NO-BREAK SPACE}%".replace("-", "\N{MINUS SIGN}")


def batch(job: Job) -> str:
    """Micro batch x accumulation, on one line of a narrow page."""
    checkpointed = " c" if job.activation_checkpointing else ""
    return f"{job.micro_batch_size} x {job.gradient_accumulation_steps}{checkpointed}".replace(
        " ", "\N{NO-BREAK SPACE}"
    )


def seconds_unit(largest: float) -> Unit:
    return Unit("s", 1.0) if largest >= 1 else Unit("ms", 1e-3)


def count(amount: int, one: str, several: str = "") -> str:
    """An amount with its noun: 1 run, 2 runs."""
    return f"{amount:,} {one if amount == 1 else several or one + 's'}"


def counted(counts: Iterable[int], noun: str) -> str:
    """n as a caption gives it: `n = 3 seeds`, `n = 1 to 3 seeds`."""
    least, most = min(counts := list(counts)), max(counts)
    many = noun if most == 1 else f"{noun}s"
    return f"n = {least} {many}" if least == most else f"n = {least} to {most} {many}"


def verdict_word(metric: str, verdict: str) -> str:
    """A verdict as it is said of times: of those a higher one is slower."""
    return {"higher": "slower", "lower": "faster"}.get(verdict, verdict) if metric == "seconds_per_step" else verdict


def listed(words: Sequence[Any]) -> str:
    words = [str(word) for word in words]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
