"""Trains as study/train.py does, and writes how many bytes of the states on the host are in pinned memory.

The file pinned.json in the run directory has two numbers for each kind of state: all bytes on the host, and those that
are pinned.
"""

from __future__ import annotations

import json
from typing import Any

from study import train
from zero_study.engines.readback import states

trained = train.train


def train_and_count(built: Any, journal: Any, checkpoints: Any) -> None:
    """Train, and then count the bytes."""
    trained(built, journal, checkpoints)
    of_kinds = states.engine_tensors(built.model, built.model.optimizer)
    counts = {}
    for kind, tensors in of_kinds.items():
        on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        counts[kind] = [sum(tensor.nbytes for tensor in some) for some in (on_host, filter(_is_pinned, on_host))]
    (built.run.folder / "pinned.json").write_text(json.dumps(counts))


def _is_pinned(tensor: Any) -> bool:
    return bool(tensor.is_pinned())


if __name__ == "__main__":
    train.train = train_and_count
    train.main()
