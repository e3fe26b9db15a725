"""How large may a study get? Seconds and memory of plan, collect, compare and report, over made-up runs.

    python tools/soak_scale.py [--runs 1000 --runs 10000] [--output FILE]

The runs are written as runs write theirs, by ten strategies from many seeds; each command is one process. Exit status 1
where one fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import synthetic

from study import files
from study.records.machine import header

STRATEGIES = [
    "single",
    "ddp",
    "zero0",
    "zero1",
    "zero2",
    "zero2_tuned",
    "zero3",
    "zero3_tuned",
    "fsdp2",
    "zero2_cpu_offload",
]
NUM_STEPS = 20


def measured(words: list[str], folder: Path) -> dict[str, Any]:
    """Run one command of the program; its seconds, and the most memory that it held."""
    began = time.perf_counter()
    with open(folder / "said.log", "w") as log:
        process = subprocess.Popen([sys.executable, "-m", "study", *words], stdout=log, stderr=log, cwd=files.ROOT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        print((folder / "said.log").read_text()[-2000:])
    return {
        "command": words[0],
        "seconds": round(time.perf_counter() - began, 1),
        "mebibytes": usage.ru_maxrss // 1024,
        "status": os.waitstatus_to_exitcode(status),
    }


def commands(num_runs: int, folder: Path) -> list[dict[str, Any]]:
    """Write a study and its runs, and let each command go over all of them."""
    seeds = range(num_runs // len(STRATEGIES))
    study, runs, collected = folder / "scale.yaml", folder / "runs" / "scale", folder / "records"
    part = {"strategies": STRATEGIES, "seeds": list(seeds), "flags": {"max_steps": NUM_STEPS}}
    study.write_text(yaml.safe_dump({"question": "How large may a study get?", "parts": [part]}))
    for seed in seeds:
        for strategy in STRATEGIES:
            world_size = 1 if strategy == "single" else 2
            synthetic.write_run(
                runs, strategy=strategy, world_size=world_size, seed=seed, num_steps=NUM_STEPS, study="scale"
            )
    site = ["--records", str(collected), "--output", str(folder / "pages")]
    return [
        measured(["plan", str(study), "--runs-dir", str(folder / "none")], folder),
        measured(["collect", str(runs), str(collected)], folder),
        measured(["compare", str(collected)], folder),
        measured(["report", str(study), *site], folder),
    ]


@click.command(help=__doc__)
@click.option("--runs", "sizes", type=int, multiple=True, default=[100, 1000, 10_000], help="runs of the study")
@click.option("--output", type=click.Path(path_type=Path), help="write the table here as JSON")
def main(sizes: list[int], output: Path | None) -> None:
    rows = []
    for num_runs in sizes:
        with tempfile.TemporaryDirectory(prefix="scale-") as folder:
            for row in commands(num_runs, Path(folder)):
                rows.append({"runs": num_runs, **row})
                print("  ".join(str(value) for value in rows[-1].values()), flush=True)
    if output:
        files.write_json(output, {**header("scale", "python tools/soak_scale.py"), "rows": rows})
    sys.exit(any(row["status"] for row in rows))


if __name__ == "__main__":
    main()
