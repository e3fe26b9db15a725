"""Makes any study small enough for a CPU: its own strategies, processes and switches on a tiny model."""

from __future__ import annotations

from typing import Any

from study.running import studies
from study.running.studies import Part, Study

AT_MOST = {"sequence_length": 16, "num_train_examples": 16, "num_eval_examples": 4, "max_steps": 3, "epochs": 1}
BATCHES = (4, 8)
LARGEST_WORLD = 2


def shrink(name: str) -> Study:
    """Return a shipped study with tiny models, few short steps and at most two processes, on the bundled sample."""
    study = studies.find(name)
    parts = tuple(_smaller(part) for part in study.parts)
    return study.model_copy(update={"text": "bundled", "device": "any", "parts": parts})


def _smaller(part: Part) -> Part:
    flags: dict[str, Any] = {**part.flags, "size": "tiny", "init": "scratch", "learning_rate": 1e-3}
    flags |= {knob: min(flags.get(knob) or most, most) for knob, most in AT_MOST.items()}
    batches = part.global_batch_sizes
    if batches is None:
        flags["global_batch_size"] = min(flags["global_batch_size"], BATCHES[-1])
    return part.model_copy(
        update={
            "flags": flags,
            "global_batch_sizes": batches and BATCHES[: len(batches)],
            "world_sizes": tuple(sorted({min(size, LARGEST_WORLD) for size in part.world_sizes})),
            "seeds": part.seeds[:1],
            "repeats": 1,
            # Parts that differ in nothing but the size of the model.
            "label": part.label or part.flags.get("size", "").replace(".", "_"),
        }
    )
