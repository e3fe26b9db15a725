"""Does a run that finished also exit with status 0, every time?

    python tools/soak_exits.py [--launches 50] [--bare] [--output FILE]

With --bare, two processes train a linear model under DDP with gloo and just return: where that fails and the study's
runs do not, the check can fail, and the study's way of ending (`train.main`) is why it does not. Exit status 1 if any
launch failed.
"""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import pairs

from study import files
from study.errors import RunFailed
from study.records import schema
from study.records.machine import header
from study.run import Run

FLAGS: dict[str, Any] = {
    "size": "tiny",
    "num_train_examples": 24,
    "num_eval_examples": 8,
    "max_steps": 3,
    "learning_rate": 1e-3,
}

# It ends as training scripts do, with a loss averaged over the ranks: a gloo thread may then still hold a tensor of
# Python's when the interpreter finalises, and aborts the process (pytorch #190489).
BARE = """\
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(20):
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
losses = [torch.zeros(()) for _ in range(2)]
dist.all_gather(losses, loss.detach())
print("done", flush=True)
"""
BARE_TIMEOUT_SECONDS = 120


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--launches", type=click.IntRange(min=1), default=50, help="runs, one after another")
@click.option("--bare", is_flag=True, help="launch a bare DDP script, which just returns")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write")
def main(launches: int, bare: bool, output: Path | None) -> None:
    pairs.share_cores(num_processes=2)
    work = None if bare else pairs.plan("ddp", FLAGS)
    started = time.monotonic()
    done = []
    for number in range(1, launches + 1):
        done.append(launch_bare() if work is None else launch_ours(work))
        seconds = time.monotonic() - started
        print(f"{number}/{launches}: {done[-1]['ended']} ({seconds:.0f} s so far)", flush=True)
    result = tally(done)
    counts = "{launches} launches, {failed} failed, {finished_work} finished their work".format(**result)
    print(f"{counts}; ended: {result['ended']}")
    if output:
        command = f"python tools/soak_exits.py --launches {launches}{' --bare' if bare else ''}"
        files.write_json(output, {**header("exits", command), **result})
    sys.exit(1 if result["failed"] else 0)


def tally(done: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the ways in which launches ended; one has failed unless its work is finished and it ended ok."""
    return {
        "launches": len(done),
        "failed": sum(not (launch["finished"] and launch["ended"] == "ok") for launch in done),
        "finished_work": sum(launch["finished"] for launch in done),
        "ended": dict(collections.Counter(launch["ended"] for launch in done)),
    }


def launch_ours(work: Run) -> dict[str, Any]:
    """One tiny run through the launcher; `launch` calls it ok only with exit status 0 and a complete record."""
    try:
        with pairs.finished(work) as done:
            took_all = len(schema.read_steps(done.folder)) == work.config.num_steps
            return {"ended": "ok", "finished": took_all and schema.read(done.folder).status == "ok"}
    except RunFailed as failure:
        return {"ended": str(failure).splitlines()[0], "finished": False}


def launch_bare() -> dict[str, Any]:
    """One pair of bare processes; finished when both have said that they are done."""
    with tempfile.TemporaryDirectory(prefix="zero-study-benchmark-") as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE)
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(Path(folder) / "store"), str(rank)],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=BARE_TIMEOUT_SECONDS)[0] for process in processes]
        except subprocess.TimeoutExpired:
            return {"ended": "timed out", "finished": False}
        finally:
            for process in processes:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGKILL)
                    process.wait()
    statuses = [process.returncode for process in processes]
    bad = [signal.Signals(-s).name if s < 0 else f"exit status {s}" for s in statuses if s]
    return {"ended": ", ".join(bad) or "ok", "finished": all("done" in text for text in said)}


if __name__ == "__main__":
    main()
