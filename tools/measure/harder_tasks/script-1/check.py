"""Compare the weights of two ranks after every update, and two ranks with one: python script-1/check.py [SCRIPT].

One rank gets the rows of both ranks in the same windows, so that its updates are those the loss of the script defines.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HOOK = """
import runpy, sys, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
import torch.utils.data
step = torch.optim.AdamW.step
updates = [0]
def watched(self, *arguments, **options):
    result = step(self, *arguments, **options)
    updates[0] += 1
    flat = torch.cat([p.detach().flatten() for group in self.param_groups for p in group["params"]])
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"UPDATE {updates[0]} spread {(high - low).max().item():.1e}", file=sys.stderr, flush=True)
    return result
torch.optim.AdamW.step = watched
if WORLD == 1:
    class Both(DistributedSampler):
        def __init__(self, data, *_, **options):
            self.halves = [DistributedSampler(data, 2, rank, shuffle=True, seed=5) for rank in (0, 1)]
            super().__init__(data, 1, 0)
        def __len__(self):
            return sum(map(len, self.halves))
        def set_epoch(self, epoch):
            [half.set_epoch(epoch) for half in self.halves]
        def __iter__(self):
            first, second = (list(half) for half in self.halves)
            for start in range(0, len(first), 4):
                yield from first[start : start + 4] + second[start : start + 4]
    torch.utils.data.DistributedSampler = Both
script = sys.argv[1]
source = open(script).read()
if WORLD == 1:
    source = source.replace("EPOCHS = 4, 4, 3", "EPOCHS = 8, 4, 3")
exec(compile(source, script, "exec"), {"__name__": "__main__"})
"""


def run(script, world, folder):
    hook = Path(folder) / f"hook{world}.py"
    hook.write_text(f"WORLD = {world}\n{HOOK}")
    saved = Path(folder) / f"weights{world}.pt"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
        hook,
        script,
    ]
    done = subprocess.run(command, env={**os.environ, "SAVE": str(saved)}, capture_output=True, text=True, check=True)
    return saved, [line for line in done.stderr.splitlines() if line.startswith("UPDATE")], done.stdout.splitlines()


if __name__ == "__main__":
    import torch

    script = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "train.py")
    with tempfile.TemporaryDirectory() as folder:
        two, spreads, losses = run(script, 2, folder)
        one, _, reference = run(script, 1, folder)
        print(*spreads, sep="\n")
        print(losses[-1], "| one rank:", reference[-1])
        a, b = torch.load(two), torch.load(one)
        print("largest difference to one rank:", max((a[name] - b[name]).abs().max().item() for name in a))
