"""Measure what the watch of `prove` costs per optimizer step, with and without it in turns within one training.

    torchrun --standalone --nproc-per-node 2 tools/measure/watch_overhead.py 124m --output FILE

Both ranks train the same GPT with DDP on random tokens. Steps come in pairs, one with the watch and one without, in an
order that changes from pair to pair. The result is the ratio of the medians with its 95 % interval (bootstrap over
pairs), the difference per step, the bytes that are read, the messages, and the peak of resident memory (Linux) of the
steps with the watch divided by that of the steps without.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from zero_study.engines.hooks import before_updates
from zero_study.prove.every_step import Start, Watch
from zero_study.prove.ranks import Ranks
from zero_study.prove.watching import Loaders

SHAPES = {  # layers, width, heads, vocabulary, sequences per rank, tokens
    "tiny": (4, 128, 4, 6400, 4, 64),
    "124m": (12, 768, 12, 50257, 2, 256),
}
WARM_UP = 3


def build(name: str) -> tuple[Any, torch.optim.Optimizer]:
    layers, width, heads, vocabulary, _, tokens = SHAPES[name]
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=tokens)
    model = DistributedDataParallel(GPT2LMHeadModel(config).train())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def interval(pairs: list[tuple[float, float]]) -> list[float]:
    draws = random.Random(0)
    ratios = []
    for _ in range(2000):
        sample = [draws.choice(pairs) for _ in pairs]
        ratios.append(statistics.median(a for a, _ in sample) / statistics.median(b for _, b in sample))
    ratios.sort()
    return [ratios[50], ratios[1949]]


def restart_peak() -> None:
    """Let the kernel count the peak of this process's resident memory from now on (see proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(list(SHAPES)))
@click.option("--pairs", default=30, show_default=True)
@click.option("--output", type=Path, required=True)
def main(name: str, pairs: int, output: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model, optimizer = build(name)
    _, _, _, vocabulary, rows, tokens = SHAPES[name]
    names = [each for each, _ in model.named_parameters()]
    watch: Watch | None = None

    def on_update(which: torch.optim.Optimizer) -> None:
        if is_on and watch is not None:
            watch.begin_update()
            watch.before_update(which)

    before_updates(on_update)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    peaks: dict[bool, list[int]] = {True: [], False: []}
    is_on = False
    for step in range(WARM_UP + 2 * pairs):
        pair, position = divmod(step - WARM_UP, 2)
        is_on = step >= WARM_UP and (position == 0) == (pair % 2 == 0)
        inputs = torch.randint(
            0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(2 * step + dist.get_rank())
        )
        if step == WARM_UP:
            group = list(range(dist.get_world_size()))
            ranks = Ranks("overhead", group, names, set())
            start = Start(step, 1, 1, True, False, True)
            watch = Watch(model, model, optimizer, optimizer, start, ranks, Loaders(), None, None)
            watch.close()
        if is_on and watch is not None:
            watch.listen()
        restart_peak()
        dist.barrier()
        begin = time.perf_counter()
        model(inputs, labels=inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if step >= WARM_UP:
            seconds[is_on].append(time.perf_counter() - begin)
            peaks[is_on].append(peak_bytes())
        if is_on and watch is not None:
            watch.close()
    assert watch is not None
    both = list(zip(seconds[True], seconds[False], strict=True))
    result = {
        "model": name,
        "num_params": sum(p.numel() for p in model.parameters()),
        "ranks": dist.get_world_size(),
        "threads_per_rank": 1,
        "pairs": pairs,
        "median_seconds_with": statistics.median(seconds[True]),
        "median_seconds_without": statistics.median(seconds[False]),
        "ratio": statistics.median(seconds[True]) / statistics.median(seconds[False]),
        "interval_of_ratio": interval(both),
        "median_difference_seconds": statistics.median(a - b for a, b in both),
        "ratio_of_peak_memory": statistics.median(peaks[True]) / statistics.median(peaks[False]),
        "versions": {"torch": torch.__version__},
        **{f"watch_{key}": value for key, value in watch.summary().items()},
    }
    if dist.get_rank() == 0:
        results = json.loads(output.read_text()) if output.exists() else {}
        output.write_text(json.dumps(results | {name: result}, indent=1, sort_keys=True) + "\n")
        print(json.dumps(result, indent=1))
    sys.stdout.flush()
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
