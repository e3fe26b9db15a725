"""Make the answers of `zero-study plan --json` and `zero-study predict --json`, which have no verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study.running.plan import Plan
from zero_study.answers import envelope
from zero_study.answers.envelope import Answer


def of_plan(plan: Plan) -> Answer:
    """Return the plan of a study as a JSON answer."""
    runs: list[dict[str, Any]] = []
    for planned in plan.runs:
        estimate = plan.estimate(planned) if planned.to_run else None
        runs.append(
            {
                "run": planned.run.run_id,
                "strategy": planned.run.strategy.name,
                "num_ranks": planned.run.world_size,
                "action": "run" if planned.to_run else "keep" if planned.kept else "skip",
                "reason": planned.kept or planned.skipped,
                "estimated_seconds": None if estimate is None else estimate.seconds,
                "num_earlier_runs": None if estimate is None else estimate.num_earlier_runs,
            }
        )
    counts = {action: sum(run["action"] == action for run in runs) for action in ("run", "keep", "skip")}
    return envelope.answer(
        "plan",
        None,
        (),
        {
            "study": plan.study.name,
            "question": plan.study.question,
            "folder": str(plan.folder),
            "machine": str(plan.box),
            "timeout_seconds": plan.timeout_seconds,
            "estimated_seconds": sum(run["estimated_seconds"] or 0.0 for run in runs),
            "num_to_run": counts["run"],
            "num_kept": counts["keep"],
            "num_skipped": counts["skip"],
            "is_completely_checked": plan.checked,
            "runs": runs,
            "slurm_script": None,
        },
    )


def of_script(study: str, script: str) -> Answer:
    """Return as a JSON answer the shell script that --slurm makes."""
    return envelope.answer("plan", None, (), {"study": study, "slurm_script": script})


def of_predictions(paths: Sequence[Path]) -> Answer:
    """Return the content of files of predictions, with their paths, as a JSON answer."""
    studies = [json.loads(path.read_text()) for path in paths]
    return envelope.answer("predict", None, (), {"written": list(map(str, paths)), "studies": studies})
