"""Run a user's script as one rank, and record its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zero_study.dryrun import real_ranks
from zero_study.dryrun.tracker import TensorTracker
from zero_study.engines import scripts
from zero_study.errors import Refusal


def run(script: Path, arguments: Sequence[str], journals: Path | None = None) -> dict[str, Any]:
    """Run a script to its end on this rank, and return its collectives, its peak memory and its error.

    The result has the collectives (`calls`), the peak of the tensors in bytes (`peak_bytes`), and the error of the
    script or None (`raised`). `journals` is a folder in which the rank also writes each call as it issues it, because a
    rank that hangs never returns.
    """
    raised = None
    with ExitStack() as stack:
        rank = scripts.rank()
        journal = None if journals is None else stack.enter_context(open(real_ranks.journal(journals, rank), "w"))
        tracker = stack.enter_context(TensorTracker(journal))
        try:
            scripts.run(script, arguments)
        except Refusal:
            raise
        except SystemExit as end:
            raised = f"SystemExit: {end.code}" if end.code else None
        except Exception as error:  # other ranks may wait for this one, and its calls so far show that
            lines = str(error).strip().splitlines()  # gloo's messages begin with an empty line
            raised = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return {"calls": [asdict(call) for call in tracker.calls], "peak_bytes": tracker.peak, "raised": raised}
