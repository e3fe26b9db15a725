"""Which times do not count, as those of a run whose machine was busy with something else?"""

from __future__ import annotations

import math

from study.records.find import device_of, rate_of
from study.records.schema import Record

# Of the processor time that a machine had. A box that does nothing else comes to 0.01 or 0.02: the kernel, the runner.
QUIET = 0.05


def share_of_others(r: Record) -> float | None:
    """How much of the processors other processes, and a hypervisor's other guests, took while steps were trained.

    None where it is not known, on a GPU, which they do not slow down, and on several machines, of which the record
    knows the first's alone.
    """
    if r.load is None or device_of(r) != "cpu" or r.other_machines:
        return None
    return (r.load.other_seconds + r.load.stolen_seconds) / (r.load.seconds * r.load.num_processors)


def is_disturbed(share: float | None) -> bool:
    """Whether others took too much; what is not known (None, or NaN in a table) is taken to be quiet."""
    return share is not None and share > QUIET


def why_untimed(r: Record) -> str | None:
    """Say why a run's times are not compared with others'; None where they are."""
    if r.timing is None or r.timing.median_seconds is None:
        return "no step was timed"
    if is_disturbed(share_of_others(r)):
        return f"other programs took more than {100 * QUIET:g} % of the processors"
    if math.isfinite(rate_of(r) or math.inf):
        return "the network had a rate, by which --view network compares them"
    return None
