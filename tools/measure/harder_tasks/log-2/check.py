"""Compute from train.log which rank has fewer batches, and how many rows it lacks."""

import re
from pathlib import Path

text = (Path(__file__).parent / "train.log").read_text()
rows = {
    int(rank): int(count.replace(",", ""))
    for rank, count in re.findall(r"\[rank(\d)\] rows of this shard: ([\d,]+)", text)
}
batches = {rank: count // 32 for rank, count in sorted(rows.items())}
short = min(batches, key=batches.get)
print("batches per epoch:", batches)
print("rows that rank", short, "lacks:", max(batches.values()) * 32 - rows[short])
