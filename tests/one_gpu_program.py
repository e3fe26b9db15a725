"""`tools/measure/one_gpu.py` with the shortest runs that reach each of its items; arguments as of that program.

Items keep the runs whose ids match. With --small their models are tiny.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "measure"))

import one_gpu
from one_gpu import Runs

RUNS = {
    "acceptance of every strategy": "",  # all runs
    "BERT-large: memory, time, MFU": r"zero3-1x-seed0-bf16$",
    "GPT of 1.5 billion: memory, time, MFU": r"ddp-1x-seed0-\w+-autocast",
    "LoRA, and frozen weights in 4 bits": r"gpt-.*-(zero2-1x-seed0-bf16|ddp-1x-seed0-in_4_bits)$",
    "bytes of 2, 4, 8 ranks on the card": r"-ddp-2x",
    "GPT 124m to 6b: peaks": r"-single-1x-seed0-batch8-124m",
}


def shortened() -> tuple[Runs, ...]:
    """Return the list's items with few runs each. An item that has none of `RUNS` keeps none of its runs."""
    return tuple(replace(item, ids=RUNS.get(item.title, "^$")) for item in one_gpu.ITEMS)


if __name__ == "__main__":
    one_gpu.ITEMS = shortened()
    one_gpu.main()
