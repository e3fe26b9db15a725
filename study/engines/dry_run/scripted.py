"""A script of anybody's as one rank of many: what it calls, in order, until it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from study.engines import scripts
from study.engines.dry_run.watch import Watch
from study.errors import Refusal


def run(script: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a script to its end as this rank: which collectives it issued, how much it held at most, what it raised."""
    watch = Watch()
    raised = None
    with watch:
        try:
            scripts.run(script, arguments)
        except Refusal:
            raise
        except SystemExit as end:
            raised = f"SystemExit: {end.code}" if end.code else None
        except Exception as error:  # the others may wait for this rank: its calls until here say
            raised = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
    return {"calls": [asdict(call) for call in watch.calls], "peak_bytes": watch.peak, "raised": raised}
