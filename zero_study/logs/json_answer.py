"""Make what `zero-study import --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zero_study.answers import envelope
from zero_study.answers.envelope import Answer
from zero_study.logs.imported import Imported
from zero_study.public_runs import folder
from zero_study.public_runs.schema import PublicRun
from zero_study.verdict import Verdict

MARK = "import/odd-log"


def of(found: Sequence[Imported], new: Sequence[PublicRun], output: Path, verdict: Verdict) -> Answer:
    """Return the answer of `import --json`: the runs that were read, and which of them are new in the folder.

    What is unusual in a log is a note.
    """
    written = {run.name for run in new}
    findings = [envelope.Finding(MARK, "note", mark, name=run.name) for run, _ in found for mark in run.marks]
    runs = [
        {
            "name": run.name,
            "file": str(folder.path_of(output, run.name)),
            "is_new": run.name in written,
            "log_format": run.log_format,
            "ending": run.ending,
            "num_logged_steps": 0 if run.training is None else len(run.training),
            "num_evaluations": 0 if run.evaluation is None else len(run.evaluation),
            "setting": run.setting.model_dump(mode="json", exclude_defaults=True),
            "totals": run.totals,
            "not_read": not_read,
        }
        for run, not_read in found
    ]
    return envelope.answer("import", verdict, findings, {"folder": str(output), "runs": runs})
