"""Compare runs that were resumed with another number of ranks or strategy with runs that used these from the start.

    python tools/measure/soak_other_ranks.py [--only zero3] [--output FILE]

Each case has three runs of the same training without dropout. The first run writes checkpoints. The second run uses
other ranks or another strategy, and is not interrupted. The third run resumes from the first run's checkpoint with the
ranks and strategy of the second. The result is the largest relative difference of loss and gradient norm between the
second and the third run over the resumed steps, or the message that refuses to resume.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import pairs
import soak

from study import terminal
from study.records.steps import read_steps
from study.run import as_words

FLAGS: dict[str, Any] = {**soak.SHORT, "max_steps": 14, "keep": 9, "dropout": 0}
FROM_STEP = 5
CASES = [  # strategy and processes of the first, strategy and processes of the second
    ("single", 1, "ddp", 2), ("ddp", 2, "ddp", 1), ("ddp", 2, "ddp", 4),
    ("fsdp2", 2, "fsdp2", 1), ("fsdp2", 2, "fsdp2", 4), ("fsdp2", 2, "fsdp2_no_reshard", 2),
    ("zero0", 2, "zero0", 1), ("zero1", 2, "zero2", 2), ("zero2", 2, "zero2", 1), ("zero2", 2, "zero2", 4),
    ("zero2_cpu_offload", 2, "zero2_cpu_offload", 1), ("zero3", 2, "zero3", 1), ("zero3", 2, "zero3", 4),
    ("zero3_cpu_offload", 2, "zero3_cpu_offload", 1), ("zero2", 2, "zero3", 2), ("zero3", 2, "zero2", 2),
    ("zero2", 2, "zero2_cpu_offload", 2), ("ddp", 2, "zero2", 2), ("fsdp2", 2, "ddp", 2),
]  # fmt: skip


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--only", default="", metavar="TEXT", help="only strategies whose name contains this")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write, and to go on with")
def main(only: str, output: Path | None) -> None:
    pairs.share_cores(num_processes=2)
    finished: list[dict[str, Any]] = soak.kept(output, "cases")
    with tempfile.TemporaryDirectory(prefix="zero-study-ranks-") as folder:
        for case in CASES:
            has_finished = any((*case_done["from"], *case_done["to"]) == case for case_done in finished)
            if only in case[0] and not has_finished:
                finished.append(try_case(*case, Path(folder)))
                soak.keep(output, "other ranks", "python tools/measure/soak_other_ranks.py", cases=finished)


def try_case(first: str, first_ranks: int, second: str, second_ranks: int, folder: Path) -> dict[str, Any]:
    checkpoint = run(first, first_ranks, folder) / f"checkpoints/step-{FROM_STEP:08d}"
    own = run(second, second_ranks, folder)
    target = folder / f"{first}-{first_ranks}-to-{second}-{second_ranks}"
    refused = launch(second, second_ranks, target, resume=checkpoint)
    case: dict[str, Any] = {"from": [first, first_ranks], "to": [second, second_ranks], "refused": refused}
    if refused is None:
        pairs_of_steps = list(zip(read_steps(target), read_steps(own), strict=True))[FROM_STEP:]
        for name in ("loss", "grad_norm"):
            case[name] = max(abs(mine[name] - theirs[name]) / abs(theirs[name]) for mine, theirs in pairs_of_steps)
    else:
        case["refused"] = refused.partition(": ")[2].partition(": ")[2]  # without the folder
    print(json.dumps(case), flush=True)
    return case


def run(strategy: str, ranks: int, folder: Path) -> Path:
    """Return the folder of a run with checkpoints. The run is started only once."""
    target = folder / f"{strategy}-{ranks}"
    if not target.exists() and (refused := launch(strategy, ranks, target)):
        raise SystemExit(refused)
    return target


def launch(strategy: str, ranks: int, target: Path, **flags: Any) -> str | None:
    """Run to the end. Return the message of a refusal, or None if the run is ok."""
    words = as_words({**FLAGS, **flags, "output_dir": target})
    command = [sys.executable, "-m", "study", "train", "--strategy", strategy, "--num-processes", str(ranks)]
    process = subprocess.run([*command, *words], capture_output=True, text=True)
    if process.returncode == 2:
        return terminal.last_error(process.stderr)
    if process.returncode:
        raise SystemExit(
            f"{strategy} x{ranks}: status {process.returncode}\n{process.stdout[-800:]}\n{process.stderr[-800:]}"
        )
    return None


if __name__ == "__main__":
    main()
