"""What does a proof cost a training? Stretches with and without it, and the counted step beside its neighbours.

    python tests/soak/prove.py [--pairs 5] [--steps 100] [--output FILE]

Two processes train a small Transformer under DDP with gloo, started once by torchrun: a stretch of steps within which
`prove.watch` is called, one without, in alternating order. What it prints and writes is within the time. Only ratios
within a pair or a stretch are told: a machine that others use has its own times.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from study import files
from study.benchmarks import pairs
from study.records.results import header

NEIGHBOURS = 10  # plain steps before the watched ones, and as many after the counted one
SCRIPT = """\
import json
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

num_steps, begin, *arms = sys.argv[1:]
num_steps, begin = int(num_steps), int(begin)
dist.init_process_group("gloo")
layer = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
model = DistributedDataParallel(torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(8, 32, 128)
began = time.perf_counter()
from study.engines import prove

import_seconds, stretches = time.perf_counter() - began, []
for arm in ["without", *arms]:  # the first, to warm up, is left out
    dist.barrier()
    ends = [time.perf_counter()]
    for step in range(num_steps):
        if arm == "with" and step == begin:
            prove.watch(model, optimizer)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    stretches.append(ends)
if dist.get_rank() == 0:
    with open("ends.json", "w") as file:
        json.dump({"import_seconds": import_seconds, "stretches": stretches[1:]}, file)
dist.destroy_process_group()
"""


def run(orders: list[list[str]], num_steps: int, begin: int) -> dict[str, Any]:
    """Train on two processes, each pair of stretches in its order; watched from step `begin` on. Raises if it fails."""
    arms = [arm for order in orders for arm in order]
    with tempfile.TemporaryDirectory(prefix="zero-study-benchmark-") as folder:
        Path(folder, "script.py").write_text(SCRIPT)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        environment = {**os.environ, "PYTHONPATH": str(files.ROOT)}
        words = [*launcher, "script.py", str(num_steps), str(begin), *arms]
        done = subprocess.run(words, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(Path(folder, "ends.json").read_text())
    assert done.stdout.count("proof  held") == arms.count("with"), "a step was not counted"
    facts = [
        {
            "seconds": ends[-1] - ends[0],
            "step_seconds": [after - before for before, after in itertools.pairwise(ends)],
        }
        for ends in found["stretches"]
    ]
    each = iter(facts)
    return {
        "import_seconds": found["import_seconds"],
        "pairs": [{"order": order, **{arm: next(each) for arm in order}} for order in orders],
    }


def beside_neighbours(step_seconds: list[float], begin: int) -> float:
    """The third step from `begin` on, as a multiple of the median of the plain steps around."""
    counted = begin + 2
    around = [*step_seconds[begin - NEIGHBOURS : begin], *step_seconds[counted + 1 : counted + 1 + NEIGHBOURS]]
    return step_seconds[counted] / statistics.median(around)


def summarize(done: list[dict[str, Any]], begin: int) -> dict[str, Any]:
    """Ratios: of whole stretches, of the counted step, and of the same step where nothing is counted."""
    return {
        "run_ratio": pairs.summarize([pair["with"]["seconds"] / pair["without"]["seconds"] for pair in done]),
        "added_steps": pairs.summarize(
            [
                (pair["with"]["seconds"] - pair["without"]["seconds"])
                / statistics.median(pair["without"]["step_seconds"])
                for pair in done
            ]
        ),
        "counted_step_ratio": pairs.summarize(
            [beside_neighbours(pair["with"]["step_seconds"], begin) for pair in done]
        ),
        "plain_step_ratio": pairs.summarize(
            [beside_neighbours(pair["without"]["step_seconds"], begin) for pair in done]
        ),
    }


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--pairs", "num_pairs", type=click.IntRange(min=1), default=5, help="stretches of each arm")
@click.option("--steps", type=click.IntRange(min=60), default=100, help="optimizer steps of a stretch")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write")
def main(num_pairs: int, steps: int, output: Path | None) -> None:
    pairs.share_cores(num_processes=2)
    begin = steps // 5
    orders = [["with", "without"] if number % 2 else ["without", "with"] for number in range(num_pairs)]
    done = run(orders, steps, begin)
    summary = summarize(done["pairs"], begin)
    for name, values in summary.items():
        print(f"{name}: {pairs.show(values)}")
    if output:
        command = f"python tests/soak/prove.py --pairs {num_pairs} --steps {steps}"
        files.write_json(output, {**header("prove", command), **summary, "begin": begin, **done})


if __name__ == "__main__":
    main()
