"""A script of anybody's as one rank of many: what it calls, in order, until it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from study.engines import scripts
from study.engines.dry_run.watch import Watch


def run(script: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a script to its end as this rank, and say which collectives it issued and how much it held at most."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    watch = Watch()
    with watch:
        scripts.run(script)
    peak = now = 0
    for _, num_bytes in watch.changes:
        now += num_bytes
        peak = max(peak, now)
    return {"calls": [asdict(call) for call in watch.calls], "peak_bytes": peak}
