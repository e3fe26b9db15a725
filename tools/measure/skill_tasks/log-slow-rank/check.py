"""Median of each phase and rank, and the median time per step if the slow phase took as long as on the other ranks."""

import re
from pathlib import Path
from statistics import median

rows = [
    tuple(map(int, re.findall(r"(\d+)", line)))
    for line in (Path(__file__).parent / "train.log").read_text().splitlines()
]
for rank in sorted({row[0] for row in rows}):
    values = [median(row[column] for row in rows if row[0] == rank) for column in range(2, 7)]
    print("rank", rank, "median of data, fwd+bwd, all_reduce, optim, total:", values)
busy = [
    max(sum(row[2:4]) + row[5] for row in rows if row[1] == step and row[0] != 2)
    for step in sorted({row[1] for row in rows})
]
print("median over steps of the slowest other rank without its waiting:", median(busy), "ms")
