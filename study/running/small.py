"""How is a study of GPUs rehearsed on a CPU? With its own strategies, precisions and switches, and a tiny model.

What a CPU cannot do is skipped by the run's own checks, with their reason.
"""

from __future__ import annotations

from typing import Any

from study.running.studies import Part, Study

# Steps enough for the warm-up, the probed step and two that are timed.
AT_MOST = {"sequence_length": 16, "num_train_examples": 64, "num_eval_examples": 4, "max_steps": 8, "epochs": 1}
BATCHES = (4, 8)
LARGEST_WORLD = 2


def shrink(study: Study) -> Study:
    """Return a study with tiny models, few short steps, at most two processes and one seed, on the bundled sample."""
    parts = tuple(_smaller(part) for part in study.parts)
    return study.model_copy(update={"text": "bundled", "device": "any", "parts": parts})


def _smaller(part: Part) -> Part:
    flags: dict[str, Any] = {**part.flags, "size": "tiny", "init": "scratch"}
    flags.setdefault("learning_rate", 1e-3)
    flags |= {knob: min(flags.get(knob) or most, most) for knob, most in AT_MOST.items()}
    batches = part.global_batch_sizes
    if batches is None:
        flags["global_batch_size"] = min(flags.get("global_batch_size") or BATCHES[-1], BATCHES[-1])
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
