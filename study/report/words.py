"""How do numbers read on pages? Units, shares and batches, in the same words everywhere."""

from __future__ import annotations

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
