"""A script of anybody's as one rank of many: what it calls, in order, until it ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import Refusal
from .. import scripts
from . import together
from .watch import Watch


def run(script: Path, arguments: Sequence[str], journals: Path | None = None) -> dict[str, Any]:
    """Run a script to its end as this rank: which collectives it issued, how much it held at most, what it raised.

    `journals`: a folder in which a rank writes its calls as it issues them, because it may not come to its end.
    """
    raised = None
    with ExitStack() as stack:
        rank = scripts.rank()
        watch = Watch(None if journals is None else stack.enter_context(open(together.journal(journals, rank), "w")))
        stack.enter_context(watch)
        try:
            scripts.run(script, arguments)
        except Refusal:
            raise
        except SystemExit as end:
            raised = f"SystemExit: {end.code}" if end.code else None
        except Exception as error:  # the others may wait for this rank: its calls until here say
            raised = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
    return {"calls": [asdict(call) for call in watch.calls], "peak_bytes": watch.peak, "raised": raised}
